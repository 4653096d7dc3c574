"""Rows 24 and 27: what is reported is leased in the same step; what nobody wants any more is given back, and not read."""

from __future__ import annotations

import asyncio

import pytest

from tests.connectors.bare import TOKENS, Prompt, bare
from tests.connectors.rig import FULL, WINDOW, prompt, rig
from tests.manager.world import backend_of, faulty
from tiering import Outcome
from tiering.connectors.reference import CacheGroup
from tiering.connectors.scheduler import FILL_DEADLINE_S
from tiering.testing import VirtualClock

_OK = Outcome.OK
OTHERS = [b"other %d" % n for n in range(16)]


@pytest.mark.parametrize("policy", ["prefix", "lru", "arc"])
def test_check_then_pin_what_is_reported_cannot_be_evicted_before_it_is_allocated(policy: str) -> None:
    """Row 24. Between the report and the allocation others want every slot: they get all but those reported."""
    with bare(slots=8, config={"primary": {"policy": policy}}) as world:
        request = Prompt("r", 5 * TOKENS + 1)
        world.put(request.keys())
        assert world.half.get_num_new_matched_tokens(request, 0) == (20, True)
        assert world.leases == 5
        assert world.put(OTHERS) == 3
        assert set(request.keys()) <= world.ready()
        world.half.update_state_after_alloc(request, (list(range(1, 7)),), 20)
        assert world.leases == 5, "the load has them now"
        assert world.put(OTHERS[3:]) == 3
        step = world.step()
        (job,) = step.load_jobs.values()
        assert (job.missing_block_ids, job.spec.destination.block_ids) == ((), (1, 2, 3, 4, 5))
        world.report(step)
        assert world.leases == 0
        world.half.request_finished(request, (list(range(1, 7)),))


def test_check_then_pin_a_lease_that_no_allocation_took_ends_with_the_step() -> None:
    """Row 24. A request that waits for GPU blocks is asked about in every step; none of its leases outlives a step."""
    with bare(slots=8) as world:
        request = Prompt("r", 5 * TOKENS + 1)
        world.put(request.keys())
        for _ in range(3):
            assert world.half.get_num_new_matched_tokens(request, 0) == (20, True)
            assert world.half.get_num_new_matched_tokens(request, 0) == (20, True), "asked twice in a step"
            assert world.leases == 5
            world.step()
            assert world.leases == 0
        assert world.put(OTHERS) == 8
        assert world.half.get_num_new_matched_tokens(request, 0) == (0, False), "evicted meanwhile: a miss"
        stats = world.half.stats()
        assert (stats["requests"], stats["query_tokens"], stats["hit_tokens"]) == (1, 21, 0), (
            "counted once, however often asked"
        )
        world.half.request_finished(request, ([],))


def test_check_then_pin_an_abort_gives_the_lease_back() -> None:
    """Rows 24 and 25."""
    with bare(slots=8) as world:
        request = Prompt("r", 5 * TOKENS + 1)
        world.put(request.keys())
        world.half.get_num_new_matched_tokens(request, 0)
        world.half.request_finished(request, ([],))
        assert world.leases == 0


def test_a_lookup_takes_no_slot_and_reads_nothing() -> None:
    """Rows 2 and 24: however many requests wait."""
    far, _ = faulty("far")
    with rig(slots=8, config={"tiers": [far], "primary": {"store_when": "computed"}}) as world:
        world.serve(prompt(1, 33))
        world.flush()
        world.serve(prompt(2, 33))
        world.flush()
        reads = backend_of(far).keys["load"]
        world.forget_gpu()
        hog = world.add(prompt(3, 4), max_tokens=200)
        waiting = [world.add(prompt(1, 33 + n), max_tokens=1) for n in range(10)]
        before = world.manager.stats()["primary"]["free_slots"]
        for request in waiting:
            tokens, _ = world.scheduler.get_num_new_matched_tokens(request, 0)
            assert tokens == 32
            world.engine.abort(request.request_id)
        assert backend_of(far).keys["load"] == reads
        assert world.manager.stats()["primary"]["free_slots"] == before
        world.engine.abort(hog.request_id)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["full", "window"])
def test_reads_after_abort_of_queued_promotions_are_cancelled(groups: tuple[CacheGroup, ...]) -> None:
    """Row 27. Forty requests wait for a tier that hangs and are aborted: only what had begun is ever read."""
    far, plan = faulty("far", blocks=512, ops_max=1, batch_blocks_max=4)
    config = {"tiers": [far], "primary": {"store_when": "computed"}}
    with rig(groups, slots=120, gpu_blocks=200, config=config, clock=VirtualClock()) as world:
        for seed in range(8):
            world.serve(prompt(seed, 33))
            world.flush()
        world.forget_gpu()
        others = [b"o%d" % n for n in range(300)]
        for group in range(len(groups)):
            plan_ = world.manager.sync.plan_store(others, group=group)
            world.manager.sync.complete(plan_.job, [_OK] * len(plan_.grants))
        world.flush()
        reads = backend_of(far).keys["load"]
        plan.hang("load")
        waiting = [world.add(prompt(seed, 34)) for seed in range(8)]
        for _ in range(4):
            world.step()
            world.turn()
        assert plan.hung("load") == 1
        begun = backend_of(far).keys["load"] - reads
        assert 0 < begun <= 4
        for request in waiting:
            world.engine.abort(request.request_id)
        world.turn()
        plan.release()
        for _ in range(6):
            world.step()
            world.turn()
        assert backend_of(far).keys["load"] - reads == begun
        assert all(request.state.value == "aborted" for request in waiting)


def test_a_lookup_that_gets_no_answer_is_a_miss_at_its_deadline() -> None:
    """Rows 8 and 24: ask again until then, and not for ever; counted."""
    far, plan = faulty("far", shared=True, deadline_s=1.0)
    clock = VirtualClock()
    with bare(config={"tiers": [far]}, clock=clock) as world:
        plan.hang("contains")
        request = Prompt("r", 5 * TOKENS)
        for _ in range(5):
            assert world.half.get_num_new_matched_tokens(request, 0) == (None, False)
            world.step()
        asyncio.run(clock.advance(1.01))
        assert world.half.get_num_new_matched_tokens(request, 0) == (0, False)
        assert world.half.stats()["asked_again"] == 5
        plan.heal()
        world.half.request_finished(request, ([],))


def test_a_block_that_is_being_stored_is_asked_for_again_also_without_a_tier_behind() -> None:
    """DESIGN section 9: FILLING means ask again, until the deadline, then a miss."""
    with bare() as world:
        first, second = Prompt("first", 3 * TOKENS), Prompt("second", 3 * TOKENS + 1)
        world.half.get_num_new_matched_tokens(first, 0)
        world.half.update_state_after_alloc(first, ([1, 2, 3],), 0)
        stored = world.step((first, ([1, 2, 3],), 0, 12))
        assert world.half.get_num_new_matched_tokens(second, 0) == (None, False)
        world.report(stored)
        assert world.half.get_num_new_matched_tokens(second, 0) == (12, True)
        for request in (first, second):
            world.half.request_finished(request, ([1, 2, 3],))
        world.report(world.step())


def test_a_preempted_request_may_ask_again_as_a_new_one() -> None:
    """Its first wait has used up its deadline; the second has one of its own."""
    clock = VirtualClock()
    with bare(clock=clock) as world:
        first, second = Prompt("first", 3 * TOKENS), Prompt("second", 3 * TOKENS + 1)
        world.half.get_num_new_matched_tokens(first, 0)
        world.half.update_state_after_alloc(first, ([1, 2, 3],), 0)
        stored = world.step((first, ([1, 2, 3],), 0, 12))
        assert world.half.get_num_new_matched_tokens(second, 0) == (None, False)
        asyncio.run(clock.advance(FILL_DEADLINE_S + 0.01))
        assert world.half.get_num_new_matched_tokens(second, 0) == (0, False)
        world.half.update_state_after_alloc(second, ([4, 5, 6, 7],), 0)
        world.report(world.step((second, ([4, 5, 6, 7],), 0, 12)))
        world.report(world.step(preempted=["second"]))
        assert world.half.get_num_new_matched_tokens(second, 0) == (None, False)
        world.report(stored)
        for request in (first, second):
            world.half.request_finished(request, ([1, 2, 3],))
        world.report(world.step())
