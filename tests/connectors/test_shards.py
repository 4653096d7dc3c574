"""Row 33, shards: a block is there only if every rank copied its part of it."""

from __future__ import annotations

import itertools

import pytest

from tests.connectors.bare import TOKENS, Prompt, bare
from tests.connectors.rig import FULL, WINDOW, prompt, rig
from tiering.connectors.wire import JobReport, WorkerOutput
from tiering.memory.transfer.spec import STORE, TransferResult

RANKS = 3


def _of_rank(rank: int, job: int, *, failed: bool = False) -> WorkerOutput:
    """What a worker of this rank says."""
    return WorkerOutput.of([TransferResult(job, not failed, 0, 0.0, STORE, "EIO" * failed)], rank)


FAILING: list[tuple[int, ...]] = [(), (0,), (1,), (2,), (0, 2), (0, 1, 2)]


@pytest.mark.parametrize("merged", [1, 2, 3])
def test_shards_a_block_is_there_when_all_ranks_have_stored_it(merged: int) -> None:
    """Row 33. In any order, rank by rank or merged: not before the last rank, and not if one failed."""
    with bare(world_size=RANKS, config={"restore": {"enabled": False}}) as world:
        for order, failing in itertools.product(itertools.permutations(range(RANKS)), FAILING):
            before, found = world.half.stats(), world.ready()
            request = Prompt("r", 2 * TOKENS, f"{order} {failing}")
            world.half.on_new_request(request)
            world.half.update_state_after_alloc(request, ([1, 2],), 0)
            (job,) = world.step((request, ([1, 2],), 0, 8)).store_jobs
            outputs = [_of_rank(rank, job, failed=rank in failing) for rank in order]
            while outputs:
                output, *outputs = outputs
                for other in outputs[: merged - 1]:
                    output = output.merge(other)
                outputs = outputs[merged - 1 :]
                assert world.ready() == found
                world.half.update_connector_output(output)
            assert world.ready() - found == (set() if failing else set(request.keys()))
            world.half.update_connector_output(_of_rank(1, job))
            after = world.half.stats()
            assert after["stored_blocks"] - before["stored_blocks"] == (0 if failing else 2)
            assert after["failed_store_jobs"] - before["failed_store_jobs"] == bool(failing)
            assert after["unknown_reports"] - before["unknown_reports"] == 1, "all have reported: it is known no more"
            world.half.request_finished(request, ([1, 2],))
            world.report(world.step())


def test_shards_a_rank_that_reports_twice_does_not_stand_for_another() -> None:
    """Row 33. A duplicate is counted and ignored: the block is not there before the rank that still copies is done."""
    with bare(world_size=2) as world:
        request = Prompt("r", 2 * TOKENS)
        world.half.on_new_request(request)
        world.half.update_state_after_alloc(request, ([1, 2],), 0)
        (job,) = world.step((request, ([1, 2],), 0, 8)).store_jobs
        world.half.update_connector_output(_of_rank(0, job))
        world.half.update_connector_output(_of_rank(0, job))
        assert not world.ready()
        world.half.update_connector_output(_of_rank(1, job))
        assert world.ready() == set(request.keys())
        assert world.half.stats()["unknown_reports"] == 1
        world.half.request_finished(request, ([1, 2],))
        world.report(world.step())


@pytest.mark.parametrize("job", [0, 77])
def test_shards_reports_of_jobs_that_never_were_are_counted_and_ignored(job: int) -> None:
    """Rows 25 and 33."""
    with bare(world_size=2) as world:
        world.half.update_connector_output(WorkerOutput({job: JobReport(frozenset((0, 1)))}))
        assert world.half.stats()["unknown_reports"] == 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("in_step", [False, True])
def test_shards_one_ranks_failed_load_is_a_failed_load(rank: int, in_step: bool) -> None:
    """Row 33. The other rank has its part: the request computes the block anew all the same, on both."""
    with rig((FULL, WINDOW), ranks=2, slots=200, held=True, load_in_step_bytes_max=in_step << 20) as world:
        world.serve(prompt(1, 41))
        world.forget_gpu()
        world.loads[rank].fail_next = 1
        record = world.serve(prompt(1, 41), max_tokens=3).record
        assert (record.failed_loads, record.tier_tokens) == (1, 0)
        world.forget_gpu()
        assert world.serve(prompt(1, 41)).record.tier_tokens == 40


@pytest.mark.parametrize("rank", [0, 1])
def test_shards_one_ranks_failed_store_leaves_no_block(rank: int) -> None:
    """Row 33. And once it works again, the block is stored: the request still holds it."""
    config = {"primary": {"store_when": "computed"}}
    with rig(ranks=2, slots=200, held=True, config=config) as world:
        world.stores[rank].fail_next = 1
        first = world.serve(prompt(1, 41))
        assert not set(world.keys(first)) & world.ready()
        world.forget_gpu()
        second = world.serve(prompt(1, 41))
        assert second.record.tier_tokens == 0
        assert set(world.keys(second)) <= world.ready()
