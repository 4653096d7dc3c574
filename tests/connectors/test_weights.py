"""Row 16, stale weights: after a reset nothing of the old weights is found, loaded or stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.connectors.bare import TOKENS, Prompt, bare
from tests.connectors.rig import FULL, WINDOW, prompt, rig
from tiering.connectors.reference import CacheGroup


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["full", "window"])
def test_stale_weights_miss_on_every_tier_and_the_same_epoch_hits_again(
    tmp_path: Path, groups: tuple[CacheGroup, ...]
) -> None:
    """Row 16. NVMe keeps both epochs' blocks: after the weights changed nothing hits, after they came back all of it does."""
    tier = {"type": "nvme", "path": str(tmp_path), "capacity": "8MiB"}
    with rig(groups, slots=64, config={"tiers": [tier], "primary": {"store_when": "computed"}}) as world:

        def hit_tokens() -> int:
            world.forget_gpu()
            world.turn()
            return world.serve(prompt(1, 41)).record.tier_tokens

        def weights(epoch: str) -> None:
            flushed = world.flush()
            assert flushed.lost == 0
            world.manager.sync.reset(epoch)
            world.runner.weights = epoch.encode()
            world.engine.reset_prefix_cache()

        world.runner.weights = b"0"
        assert (hit_tokens(), hit_tokens()) == (0, 40)
        weights("1")
        assert (hit_tokens(), hit_tokens()) == (0, 40)
        weights("0")
        assert hit_tokens() == 40, "asleep and awake again with the same weights"
        weights("2")
        assert hit_tokens() == 0


@pytest.mark.parametrize("store_when", ["computed", "finished", "gpu_evicted", "adaptive"])
def test_stale_weights_of_a_request_that_runs_on_are_not_stored_under_the_new_epoch(store_when: str) -> None:
    """Row 16. An engine may let requests run on with the KV that they have, after it loaded other weights: neither that KV
    nor what is computed from it is what its keys say under the new epoch."""
    with bare(config={"primary": {"store_when": store_when}}) as world:
        request = Prompt("r", 6 * TOKENS)
        tables = (list(range(1, 8)),)
        world.half.get_num_new_matched_tokens(request, 0)
        world.half.update_state_after_alloc(request, tables, 0)
        world.report(world.step((request, tables, 0, 4 * TOKENS), allocated=tables[0]))
        world.manager.sync.reset("1")
        world.half.reset()
        world.report(world.step((request, tables, 4 * TOKENS, 2 * TOKENS)))
        request.num_tokens += TOKENS
        world.report(world.step((request, tables, 6 * TOKENS, TOKENS)))
        world.half.request_finished(request, tables)
        world.report(world.step())
        world.report(world.step(allocated=tables[0]))
        assert world.ready() == set()
        again = Prompt("again", 6 * TOKENS)
        world.half.get_num_new_matched_tokens(again, 0)
        world.half.update_state_after_alloc(again, tables, 0)
        world.report(world.step((again, tables, 0, 6 * TOKENS), allocated=tables[0]))
        world.half.request_finished(again, tables)
        world.report(world.step())
        world.report(world.step(allocated=tables[0]))
        assert world.ready() == set(again.keys()), "what is computed from scratch is stored as ever"


def test_stale_weights_of_a_request_that_is_preempted_by_the_reset_are_not_stored() -> None:
    """Row 16. Told as preempted after the reset: its blocks hold the old weights' bytes."""
    for store_when in ("computed", "finished", "gpu_evicted"):
        with bare(config={"primary": {"store_when": store_when}}) as world:
            request = Prompt("r", 4 * TOKENS)
            tables = ([1, 2, 3, 4],)
            world.half.get_num_new_matched_tokens(request, 0)
            world.half.update_state_after_alloc(request, tables, 0)
            old = world.step((request, tables, 0, 4 * TOKENS), allocated=tables[0])
            world.manager.sync.reset("1")
            world.half.reset()
            world.report(old)
            world.report(world.step(preempted=["r"]))
            world.report(world.step(allocated=tables[0]))
            assert world.ready() == set()
            world.half.request_finished(request, ([],))
            world.report(world.step())


def test_stale_weights_of_a_load_that_waits_across_a_reset_are_reported_missing() -> None:
    """Row 16. What was leased before the reset must not reach the GPU as a good load after it."""
    with bare() as world:
        request = Prompt("r", 4 * TOKENS + 1)
        world.put(request.keys())
        assert world.half.get_num_new_matched_tokens(request, 0) == (16, True)
        world.half.update_state_after_alloc(request, ([1, 2, 3, 4, 5],), 16)
        world.manager.sync.reset("1")
        world.half.reset()
        step = world.step()
        (job,) = step.load_jobs.values()
        assert job.spec.destination.block_ids == ()
        assert set(job.missing_block_ids) == {1, 2, 3, 4}
        world.report(step)
        world.half.request_finished(request, ([1, 2, 3, 4, 5],))
        world.report(world.step())
