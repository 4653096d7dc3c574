"""Loads from an allocation to the wire: which GPU blocks are filled from which slots, and which are named missing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.connectors.bare import TOKENS, Bare, Prompt, bare
from tests.manager.world import faulty
from tiering import Outcome
from tiering.connectors.wire import ConnectorMetadata, LoadJob
from tiering.testing import VirtualClock


def _slots(world: Bare, keys: Sequence[bytes]) -> tuple[int, ...]:
    """Where the core keeps them."""
    return tuple(world.manager.parts.core.world.blocks[key].slot for key in keys)


def _only(metadata: ConnectorMetadata) -> LoadJob:
    (job,) = metadata.load_jobs.values()
    return job


def _turn(world: Bare) -> None:
    async def turns() -> None:
        for _ in range(40):
            await asyncio.sleep(0)

    world.manager.parts.io.run(turns(), 20.0)


def _in_far_tier(world: Bare, prompt: Prompt, group: int = 0) -> None:
    """The prompt's blocks are in the tier behind, and the primary tier is full of others."""
    world.put(prompt.keys(group), group)
    world.manager.parts.io.run(world.manager.flush(), 20)
    free = world.manager.sync.slots_for_loads(group=group)
    world.put([b"other %d %d" % (group, n) for n in range(free)], group)
    world.manager.parts.io.run(world.manager.flush(), 20)
    assert not world.ready() & set(prompt.keys(group))


def _far(**options: Any) -> tuple[dict[str, Any], Any]:
    tier, plan = faulty("far", blocks=256, **options)
    return {"tiers": [tier]}, plan


def _end(world: Bare, request: Prompt, metadata: ConnectorMetadata) -> None:
    world.report(metadata)
    world.half.request_finished(request, tuple([] for _ in world.layout.groups))
    world.report(world.step())


def test_a_load_fills_the_blocks_behind_those_computed() -> None:
    with bare() as world:
        request = Prompt("r", 6 * TOKENS + 2)
        world.put(request.keys())
        assert world.half.get_num_new_matched_tokens(request, 8) == (16, True)
        world.half.update_state_after_alloc(request, ([11, 12, 13, 14, 15, 16, 17],), 16)
        step = world.step()
        job = _only(step)
        assert job.spec.destination.block_ids == (13, 14, 15, 16)
        assert job.spec.source.block_ids == _slots(world, request.keys()[2:])
        assert (job.missing_block_ids, job.in_step, job.request_id) == ((), False, "r")
        _end(world, request, step)


@pytest.mark.parametrize(("computed", "index", "filled"), [(0, 0, 6), (4, 1, 5), (8, 0, 4), (12, 1, 3), (20, 1, 1)])
def test_a_load_may_begin_inside_a_block_that_spans_two_of_the_engines(computed: int, index: int, filled: int) -> None:
    """The engine has the first half: the block's second half lands in the engine's block, and no other."""
    with bare((("full", 2 * TOKENS),)) as world:
        request = Prompt("r", 6 * TOKENS + 1)
        keys = request.keys(hashes_per_block=2)
        world.put(keys)
        assert world.half.get_num_new_matched_tokens(request, computed) == (24 - computed, True)
        world.half.update_state_after_alloc(request, ([11, 12, 13, 14, 15, 16, 17],), 24 - computed)
        step = world.step()
        spec = _only(step).spec
        assert spec.destination.block_ids == (11, 12, 13, 14, 15, 16)[-filled:]
        assert spec.destination.block_indices == (index,)
        assert spec.source.block_ids == _slots(world, keys[computed // 8 :])
        _end(world, request, step)


@pytest.mark.parametrize(("first_null", "index", "filled"), [(4, 0, (15, 16)), (5, 1, (16,))])
def test_a_window_may_begin_inside_a_block_that_spans_two_of_the_engines(
    first_null: int, index: int, filled: tuple[int, ...]
) -> None:
    """Row 32: what the engine's window does not reach has no block there."""
    window = 9 if first_null == 4 else 5
    with bare((("full", 2 * TOKENS), (f"sliding_window({window})", 2 * TOKENS))) as world:
        request = Prompt("r", 6 * TOKENS + 1)
        for group in (0, 1):
            world.put(request.keys(group, hashes_per_block=2), group)
        assert world.half.get_num_new_matched_tokens(request, 0) == (24, True)
        table = [0] * first_null + [15, 16, 17][first_null - 4 :]
        world.half.update_state_after_alloc(request, ([1, 2, 3, 4, 5, 6, 7], table), 24)
        step = world.step()
        destination = _only(step).spec.destination
        assert destination.of_group(1) == filled
        assert destination.block_indices == (0, index)
        assert _only(step).missing_block_ids == ()
        _end(world, request, step)


def test_a_promotion_that_fails_shortens_the_load_to_what_is_before_it() -> None:
    config, plan = _far()
    with bare(slots=8, config=config, clock=VirtualClock()) as world:
        request = Prompt("r", 6 * TOKENS + 1)
        _in_far_tier(world, request)
        plan.outcomes("load", Outcome.MISSING, keys=[request.keys()[3]], times=1)
        assert world.half.get_num_new_matched_tokens(request, 0) == (24, True)
        world.half.update_state_after_alloc(request, ([1, 2, 3, 4, 5, 6, 7],), 24)
        _turn(world)
        step = world.step()
        job = _only(step)
        assert (job.spec.destination.block_ids, job.missing_block_ids) == ((1, 2, 3), (4, 5, 6))
        assert world.half.stats()["short_tokens"] == 12
        _end(world, request, step)


def test_half_a_step_of_two_groups_is_of_no_use() -> None:
    """Three blocks of eight tokens are there and the whole of the other group: 16 tokens are what both can give."""
    config, plan = _far()
    with bare((("full", 4), ("full", 8)), slots=24, config=config, clock=VirtualClock()) as world:
        request = Prompt("r", 32 + 1)
        keys = [request.keys(0), request.keys(1, hashes_per_block=2)]
        world.put(keys[1], 1)
        _in_far_tier(world, request)
        plan.outcomes("load", Outcome.MISSING, keys=[keys[0][5]], times=None)
        assert world.half.get_num_new_matched_tokens(request, 0) == (32, True)
        world.half.update_state_after_alloc(request, (list(range(1, 10)), list(range(21, 30))), 32)
        _turn(world)
        step = world.step()
        job = _only(step)
        assert job.spec.destination.of_group(0) == (1, 2, 3, 4)
        assert job.spec.destination.of_group(1) == (21, 22, 23, 24)
        assert set(job.missing_block_ids) == {5, 6, 7, 8, 25, 26, 27, 28}
        plan.heal()
        _end(world, request, step)


def test_a_window_that_comes_short_is_of_no_use_to_a_shorter_prefix() -> None:
    """Row 32: it is the window of the whole prefix. All is named missing, also of the group that has all."""
    config, plan = _far()
    kinds = (("full", TOKENS), ("sliding_window(10)", TOKENS))
    with bare(kinds, slots=12, config=config, clock=VirtualClock()) as world:
        request = Prompt("r", 6 * TOKENS + 1)
        world.put(request.keys(0), 0)
        _in_far_tier(world, request, 1)
        plan.outcomes("load", Outcome.MISSING, keys=[request.keys(1)[5]], times=1)
        assert world.half.get_num_new_matched_tokens(request, 0) == (24, True)
        world.half.update_state_after_alloc(request, ([1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 14, 15, 16, 17]), 24)
        _turn(world)
        step = world.step()
        job = _only(step)
        assert job.spec.destination.block_ids == ()
        assert set(job.missing_block_ids) == {1, 2, 3, 4, 5, 6, 14, 15, 16}
        _end(world, request, step)


def test_a_load_whose_promotions_hang_ends_at_its_deadline_with_what_is_there() -> None:
    """Row 8."""
    config, plan = _far(deadline_s=1000.0)
    clock = VirtualClock()
    with bare(slots=8, config=config, clock=clock) as world:
        request = Prompt("r", 6 * TOKENS + 1)
        _in_far_tier(world, request)
        world.put(request.keys()[:2])
        plan.hang("load")
        assert world.half.get_num_new_matched_tokens(request, 0) == (24, True)
        world.half.update_state_after_alloc(request, ([1, 2, 3, 4, 5, 6, 7],), 24)
        for _ in range(3):
            _turn(world)
            assert not world.step().load_jobs
        assert world.half.has_pending_work()
        asyncio.run(clock.advance(30.1))
        step = world.step()
        job = _only(step)
        assert (job.spec.destination.block_ids, job.missing_block_ids) == ((1, 2), (3, 4, 5, 6))
        plan.heal()
        _turn(world)
        _end(world, request, step)


@pytest.mark.parametrize("on_the_wire", [False, True])
def test_abort_of_a_request_whose_load_waits_or_is_copied(on_the_wire: bool) -> None:
    """Row 25. It ends on the wire all the same, once, so that the engine gets its GPU blocks back."""
    config, plan = _far(deadline_s=1000.0)
    with bare(slots=8, config=config, clock=VirtualClock()) as world:
        request = Prompt("r", 6 * TOKENS + 1)
        _in_far_tier(world, request)
        plan.hang("load")
        world.half.get_num_new_matched_tokens(request, 0)
        world.half.update_state_after_alloc(request, ([1, 2, 3, 4, 5, 6, 7],), 24)
        _turn(world)
        assert not world.step().load_jobs
        if on_the_wire:
            plan.heal()
            _turn(world)
            step = world.step()
            assert _only(step).spec.destination.block_ids == (1, 2, 3, 4, 5, 6)
            assert world.half.request_finished(request, ([1, 2, 3, 4, 5, 6, 7],)) == (False, None)
            assert world.leases == 6, "the copy still reads the slots"
        else:
            assert world.half.request_finished(request, ([1, 2, 3, 4, 5, 6, 7],)) == (False, None)
            assert world.leases == 0
            step = world.step()
            assert _only(step).spec.destination.block_ids == ()
            plan.heal()
            _turn(world)
        assert not world.step().load_jobs
        world.report(step)
        assert world.leases == 0
        world.half.request_finished(request, ([],))


def test_small_loads_of_what_is_ready_happen_in_the_step_and_others_do_not() -> None:
    config, _ = _far()
    with bare(slots=16, config=config, clock=VirtualClock(), load_in_step_bytes_max=3 * 64) as world:
        # What a request waits for is leased till the step's end: there is room for all.
        ready, long, away = Prompt("r", 13, "r"), Prompt("l", 17, "l"), Prompt("a", 9, "a")
        _in_far_tier(world, away)
        world.put(ready.keys())
        world.put(long.keys())
        assert world.half.get_num_new_matched_tokens(ready, 0) == (12, False)
        assert world.half.get_num_new_matched_tokens(long, 0) == (16, True)
        assert world.half.get_num_new_matched_tokens(long, 4) == (12, False)
        assert world.half.get_num_new_matched_tokens(away, 0) == (8, True)
        world.half.update_state_after_alloc(ready, ([1, 2, 3, 4],), 12)
        step = world.step((ready, ([1, 2, 3, 4],), 12, 1))
        assert _only(step).in_step
        world.report(step)
        for request in (ready, long, away):
            world.half.request_finished(request, ([],))
        world.report(world.step())


def test_a_prefix_longer_than_one_look_is_loaded_in_one_job() -> None:
    """2,100 blocks: several calls of the manager's, one copy, and the same answer."""
    with bare(slots=2_200) as world:
        request = Prompt("r", 2_100 * TOKENS + 1)
        keys = request.keys()
        for start in range(0, len(keys), 500):
            world.put(keys[start : start + 500])
        assert world.half.get_num_new_matched_tokens(request, 0) == (2_100 * TOKENS, True)
        table = list(range(1, 2_102))
        world.half.update_state_after_alloc(request, (table,), 2_100 * TOKENS)
        step = world.step()
        assert _only(step).spec.destination.block_ids == tuple(table[:2_100])
        assert _only(step).spec.source.block_ids == _slots(world, keys)
        _end(world, request, step)
