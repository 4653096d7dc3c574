"""Row 26, reused GPU blocks: a store copies what the block held when it was made, however late it is copied."""

from __future__ import annotations

import pytest

from tests.connectors.bare import TOKENS, Prompt, bare
from tests.connectors.rig import FULL, WINDOW, prompt, rig
from tiering.connectors.reference import CacheGroup

STORE_WHEN = ["computed", "finished", "gpu_evicted", "adaptive"]


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["full", "window"])
@pytest.mark.parametrize("span", [1, 2])
@pytest.mark.parametrize("store_when", STORE_WHEN)
def test_reused_gpu_block_is_stored_with_its_old_bytes(
    store_when: str, span: int, groups: tuple[CacheGroup, ...]
) -> None:
    """Row 26. Hardly more GPU blocks than one request needs: each is given away while its store is queued."""
    config = {"primary": {"store_when": store_when}}
    with rig(groups, span=span, slots=400, gpu_blocks=10 * len(groups) + 6, config=config, held=True) as world:
        served = [world.add(prompt(seed, 37), max_tokens=4) for seed in range(5)]
        world.finish()
        assert world.scheduler.stats()["flushed_jobs"] > 0
        assert world.scheduler.stats()["failed_store_jobs"] == 0
        world.forget_gpu()
        goes_on = world.serve([*served[1].token_ids, 1, 2, 3])  # its last token was never computed, hence 40 of 41
        if span == 1 or WINDOW not in groups or store_when in ("computed", "adaptive"):
            # Else: at its end half of a span may have left the window, and half a block is not stored.
            assert goes_on.record.tier_tokens == 40 // world.step_tokens * world.step_tokens


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("store_when", STORE_WHEN)
def test_reused_gpu_block_of_a_request_whose_load_brought_nothing(store_when: str, in_step: bool) -> None:
    """Row 26. It loses its blocks, gets others, and computes what it lacks: what it stores is what it computed."""
    config = {"primary": {"store_when": store_when}}
    with rig(slots=64, gpu_blocks=9, config=config, held=True, load_in_step_bytes_max=in_step << 20) as world:
        world.serve(prompt(1, 16))
        world.serve(prompt(2, 30))  # gets all GPU blocks, also those that are stored as they go
        world.forget_gpu()
        world.loads[0].fail_next = 1
        again = world.serve(prompt(1, 31), max_tokens=2)
        assert again.record.failed_loads == 1
        world.forget_gpu()
        world.serve(prompt(1, 31))


@pytest.mark.parametrize("store_when", STORE_WHEN)
def test_reused_gpu_block_of_a_request_that_is_preempted_and_runs_again_in_one_step(store_when: str) -> None:
    """Row 26. An engine that preempts between two steps may run the request again in the next: what the step computes for it
    is not copied before its forward pass, and not lost from sight."""
    with bare(config={"primary": {"store_when": store_when}}) as world:
        request = Prompt("r", 8 * TOKENS + 1)
        world.half.on_new_request(request)
        first, second = range(1, 10), range(11, 20)
        assert world.half.get_num_new_matched_tokens(request, 0) == (0, False)
        world.half.update_state_after_alloc(request, (first,), 0)
        world.report(world.step((request, (first,), 0, 3 * TOKENS), allocated=first))
        assert world.half.get_num_new_matched_tokens(request, 0)[0] is not None
        world.half.update_state_after_alloc(request, (second,), 0)
        step = world.step((request, (second,), 0, 4 * TOKENS), preempted=["r"], allocated=second)
        for job_id in step.jobs_to_flush & set(step.store_jobs):
            read = set(step.store_jobs[job_id].spec.source.block_ids)
            assert not read & set(second), "copied before the forward pass that fills them"
        world.report(step)
        last = world.step((request, (second,), 4 * TOKENS, 4 * TOKENS + 1))
        world.report(last)
        world.half.request_finished(request, (second,))
        world.report(world.step())
        if store_when == "gpu_evicted":
            world.report(world.step(allocated=second))
        assert world.ready() == set(request.keys())


def test_reused_gpu_block_this_steps_store_of_a_running_request_waits_for_its_forward_pass() -> None:
    """Row 26, the other half: what the step itself computes must not be copied before it, though its blocks are fresh."""
    with bare() as world:
        request = Prompt("r", 3 * TOKENS)
        world.half.on_new_request(request)
        world.half.get_num_new_matched_tokens(request, 0)
        world.half.update_state_after_alloc(request, ([1, 2, 3],), 0)
        step = world.step((request, ([1, 2, 3],), 0, 12), allocated=[1, 2, 3])
        assert len(step.store_jobs) == 1
        assert step.jobs_to_flush == frozenset()
        world.half.request_finished(request, ([1, 2, 3],))
        taken = world.step(allocated=[3, 9])
        assert taken.jobs_to_flush == frozenset(step.store_jobs), (
            "somebody gets one of its blocks: now it must be copied"
        )
        assert world.step(allocated=[8]).jobs_to_flush == frozenset()
        world.report(step)
        assert world.step(allocated=[1, 2]).jobs_to_flush == frozenset(), "copied: nobody reads them"


def test_reused_gpu_block_that_a_load_will_fill() -> None:
    """Row 26. The blocks of a request that waits for a load are overwritten by the load, before any forward pass."""
    with bare() as world:
        first, other = Prompt("first", 2 * TOKENS, "f"), Prompt("other", 2 * TOKENS + 1, "o")
        world.put(other.keys())
        world.half.get_num_new_matched_tokens(first, 0)
        world.half.update_state_after_alloc(first, ([1, 2],), 0)
        stored = world.step((first, ([1, 2],), 0, 8), allocated=[1, 2])
        world.half.request_finished(first, ([1, 2],))
        assert world.half.get_num_new_matched_tokens(other, 0) == (8, True)
        world.half.update_state_after_alloc(other, ([2, 1, 3],), 8)
        loaded = world.step()  # not even told that the blocks were given away
        assert loaded.jobs_to_flush == frozenset(stored.store_jobs)
        assert next(iter(loaded.load_jobs.values())).spec.destination.block_ids == (2, 1)
        world.report(stored)
        world.report(loaded)
        world.half.request_finished(other, ([2, 1, 3],))
        world.report(world.step())
