"""The engine with a connector: what the GPU lost comes back right, at every state and after every failure."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.connectors.reference.tiered import TieredWorld
from tests.connectors.reference.worlds import FULL, WINDOW, WORLDS
from tiering.connectors.reference import RequestState

PROMPT = list(range(41))
IN_STEP = {"load_in_step_bytes_max": 1 << 20}


def world_with_stored_prompt(num_gpu_blocks: int = 40, groups: Any = (FULL,), **options: Any) -> TieredWorld:
    """``PROMPT`` was served, its ten full blocks are in the tiers, and the GPU has forgotten them."""
    world = TieredWorld(groups, num_gpu_blocks, **options)
    world.add(PROMPT, 1)
    world.run()
    world.evict_gpu_blocks()
    return world


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("blocks_per_slot", [1, 2])
@pytest.mark.parametrize("groups", list(WORLDS))
def test_a_prompt_evicted_from_the_gpu_comes_from_the_tiers(groups: str, blocks_per_slot: int, ranks: int) -> None:
    options = {"blocks_per_slot": blocks_per_slot, "ranks": ranks}
    with world_with_stored_prompt(60, WORLDS[groups], **options) as world:
        again = world.add(PROMPT, 6)
        world.run()
        # 40 tokens can be loaded, cut to a multiple of every group's slot.
        step = max(group.tokens_per_block for group in world.manager.layout.groups)
        assert again.record.tier_tokens == 40 // step * step
        assert again.record.engine_tokens == 0
        world.check_end()


def test_a_load_in_the_step_takes_no_waiting() -> None:
    with world_with_stored_prompt(**IN_STEP) as world:
        again = world.add(PROMPT, 1)
        result = world.step()
        assert (again.record.tier_tokens, result.scheduled_tokens) == (40, 1)
        assert again.state is RequestState.FINISHED
        world.run()
        world.check_end()


def test_others_run_while_a_load_goes_on() -> None:
    with world_with_stored_prompt() as world:
        world.loads[0].hold_back = True
        again = world.add(PROMPT, 4)
        other = world.add([7] * 9, 4)
        while other.state is not RequestState.FINISHED:
            world.step()
        assert again.state is RequestState.WAITING_FOR_REMOTE_KVS
        assert again.record.computed_tokens == 0
        world.loads[0].let_go()
        world.run()
        assert again.record.tier_tokens == 40
        assert again.record.computed_tokens == 1 + 3
        world.check_end()


def test_a_load_has_ended_when_all_ranks_say_so() -> None:
    """Row 33."""
    with world_with_stored_prompt(ranks=2) as world:
        world.loads[1].hold_back = True
        again = world.add(PROMPT, 2)
        for _ in range(50):
            world.step()
        assert again.state is RequestState.WAITING_FOR_REMOTE_KVS
        world.loads[1].let_go()
        world.run()
        assert again.record.tier_tokens == 40
        world.check_end()


@pytest.mark.parametrize("options", [{}, IN_STEP], ids=["async", "in_step"])
@pytest.mark.parametrize("groups", list(WORLDS))
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_failed_load_is_computed(groups: str, options: dict[str, Any], failing_rank: int) -> None:
    with world_with_stored_prompt(60, WORLDS[groups], ranks=2, **options) as world:
        world.loads[failing_rank].fail = True
        again = world.add(PROMPT, 5)
        world.run()
        assert world.loads[failing_rank].failed_jobs == 1
        assert again.state is RequestState.FINISHED  # its answer was checked
        assert again.record.failed_loads == 1
        assert again.record.tier_tokens == 0
        world.loads[failing_rank].fail = False
        world.evict_gpu_blocks()
        world.add([*PROMPT, 5], 5)
        world.run()
        world.check_end()


def test_what_a_failed_load_in_the_step_computed_is_never_stored() -> None:
    """The step computed on top of blocks that were not filled: none of it may ever be loaded."""
    with world_with_stored_prompt(**IN_STEP) as world:
        longer = PROMPT + [90 + n for n in range(30)]
        world.loads[0].fail = True
        world.add(longer, 2)
        world.run()
        world.loads[0].fail = False
        world.evict_gpu_blocks()
        again = world.add([*longer, 1], 2)
        world.run()
        assert again.record.tier_tokens > 40
        world.check_end()


def test_a_failed_load_behind_a_cached_prefix_keeps_the_prefix() -> None:
    with TieredWorld([FULL], 40) as world:
        world.add(PROMPT, 1)
        world.run()
        world.evict_gpu_blocks()
        world.add(PROMPT[:13], 1)
        world.run()
        world.loads[0].fail = True
        again = world.add(PROMPT, 3)
        world.run()
        assert again.record.engine_tokens == 12
        assert again.record.tier_tokens == 0
        assert again.record.computed_tokens == 41 - 12 + 2
        world.check_end()


# -- aborts at every state --------------------------------------------------------------------------------------------


def test_abort_while_it_waits_in_the_queue() -> None:
    """Row 25."""
    with world_with_stored_prompt() as world:
        request = world.add(PROMPT, 3)
        world.engine.abort(request.request_id)
        assert request.state is RequestState.ABORTED
        world.run()
        world.check_end()


def test_abort_during_a_load_keeps_the_blocks_until_the_load_has_ended() -> None:
    """Row 25."""
    with world_with_stored_prompt() as world:
        world.loads[0].hold_back = True
        request = world.add(PROMPT, 3)
        while not world.loads[0].held_jobs:
            world.step()
        world.engine.abort(request.request_id)
        assert request.state is RequestState.ABORTED
        other = world.add([9] * 30, 3)
        for _ in range(20):
            world.step()
        assert request.blocks
        assert other.state is RequestState.FINISHED
        world.loads[0].let_go()
        world.run()
        world.check_end()


def test_abort_between_a_load_and_the_first_step() -> None:
    """Row 25."""
    with world_with_stored_prompt(max_num_seqs=1) as world:
        request = world.add(PROMPT, 3)
        while request.state is RequestState.WAITING and not request.blocks:
            world.step()
        blocker = None
        while request.state is RequestState.WAITING_FOR_REMOTE_KVS:
            world.step()
            blocker = blocker or world.add([9] * 10, 50)
        assert request.blocks
        world.engine.abort(request.request_id)
        assert not request.blocks
        world.run()
        world.check_end()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_abort_while_it_runs(steps: int) -> None:
    """Row 25."""
    with world_with_stored_prompt() as world:
        request = world.add([3] * 30, 10)
        for _ in range(steps):
            world.step()
        assert request.state is RequestState.RUNNING
        world.engine.abort(request.request_id)
        world.run()
        world.check_end()


def test_abort_after_a_preemption() -> None:
    """Row 25."""
    with TieredWorld([FULL], 14, max_num_seqs=4) as world:
        for n in range(4):
            world.add([n] * 12, 30)
        while not any(request.record.preemptions for request in world.requests):
            world.step()
        request = next(request for request in world.requests if request.record.preemptions)
        assert request.state is RequestState.WAITING
        world.engine.abort(request.request_id)
        world.run()
        world.check_end()


def test_aborts_that_come_late_are_passed_over() -> None:
    with world_with_stored_prompt() as world:
        world.engine.abort("r0")
        world.engine.abort("nobody")
        world.run()
        world.check_end()


# -- preemption, pressure, reset --------------------------------------------------------------------------------------


@pytest.mark.parametrize("store_when", ["computed", "finished", "gpu_evicted", "adaptive"])
@pytest.mark.parametrize("groups", list(WORLDS))
def test_traffic_on_a_small_gpu(groups: str, store_when: str) -> None:
    options = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "store_when": store_when, "capacity": "512KiB"}
    with TieredWorld(WORLDS[groups], 40, {"type": "memory", "capacity": "4MiB"}, **options) as world:
        source = random.Random(f"{groups} {store_when}")
        prefixes = [[source.randrange(1000) for _ in range(source.randrange(20, 60))] for _ in range(4)]
        for _ in range(25):
            tail = [source.randrange(1000) for _ in range(source.randrange(1, 20))]
            world.add(source.choice(prefixes) + tail, source.randrange(1, 12))
        world.run()
        world.check_end()
        if groups != "windows alone":  # few blocks: these give theirs back as they run, and seldom need the tiers
            assert sum(request.record.tier_tokens for request in world.requests) > 0


def test_loaded_requests_that_fit_only_one_at_a_time_all_get_their_turn() -> None:
    """Several loads took all blocks, and none can go on: one starts over, and all are served."""
    with TieredWorld([FULL], 25, max_num_seqs=4) as world:
        prompts = [[100 * n + i for i in range(41)] for n in range(2)]
        for prompt in prompts:
            world.add(prompt, 1)
            world.run()
        world.evict_gpu_blocks()
        for prompt in prompts:
            world.add(prompt, 40)
        world.run()
        world.check_end()


def test_after_a_reset_nothing_of_the_old_weights_is_used() -> None:
    """Row 16: not in the engine's cache, not in a tier, not of a load or a store under way."""
    with world_with_stored_prompt() as world:
        world.loads[0].hold_back = world.stores[0].hold_back = True
        world.add(PROMPT, 3)
        world.add([4] * 20, 10)
        while not world.loads[0].held_jobs:
            world.step()
        world.reset(b"new")
        world.loads[0].let_go()
        world.stores[0].let_go()
        world.add(PROMPT, 3)
        world.run()
        world.evict_gpu_blocks()
        again = world.add(PROMPT, 3)
        world.run()
        assert again.record.tier_tokens == 40
        world.check_end()


def test_a_reset_drops_what_runs_what_loads_and_what_is_cached() -> None:
    with world_with_stored_prompt() as world:
        world.loads[0].hold_back = True
        loading = world.add(PROMPT, 3)
        running = world.add([4] * 20, 10)
        while not world.loads[0].held_jobs:
            world.step()
        world.engine.reset_prefix_cache()
        assert not running.blocks
        assert world.engine.pool.cached_blocks == 0
        world.loads[0].let_go()
        world.run()
        assert running.record.preemptions == 1
        assert loading.state is RequestState.FINISHED
        world.check_end()


def test_only_the_window_is_loaded() -> None:
    """Row 32: of a group with a short window, the blocks before it are not read."""
    with TieredWorld([WINDOW], 60) as world:
        world.add(PROMPT, 1)
        world.run()
        world.evict_gpu_blocks()
        again = world.add(PROMPT, 1)
        world.run()
        assert again.record.tier_tokens == 40
        # 9 tokens of the past lie in the last 3 of the 10 blocks.
        assert world.connection.scheduler.stats()["loaded_blocks"] == 3
