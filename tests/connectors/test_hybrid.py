"""Row 32, hybrid models: several kinds of attention in one layout, also where a block of ours spans several of the engine's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.connectors.bare import TOKENS, Prompt, bare
from tests.connectors.rig import FULL, RECURRENT, WIDE, WINDOW, prompt, rig
from tests.manager.world import backend_of, faulty
from tiering.connectors.reference import CacheGroup

LAYOUTS: dict[str, tuple[CacheGroup, ...]] = {
    "full": (FULL,),
    "window": (WINDOW,),
    "recurrent": (RECURRENT,),
    "full and window": (FULL, WINDOW),
    "all kinds": (FULL, WIDE, RECURRENT),
}


@pytest.mark.parametrize("span", [1, 2, 3])
@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_hybrid_models_are_served_what_every_group_has(groups: Sequence[CacheGroup], span: int) -> None:
    """Row 32. What is reported is loaded, for each group, and right to the byte; at most a step of all groups is lost."""
    with rig(groups, span=span, slots=400, gpu_blocks=90) as world:
        world.serve(prompt(1, 73))
        world.check_slots()
        for tokens in (73, 74, 95, 53):
            world.forget_gpu()
            record = world.serve(prompt(1, tokens)).record
            assert record.tier_tokens % world.step_tokens == 0
            # A recurrent state, or a window, is there only where it was kept: at the end of what was computed at once.
            if groups == (FULL,):
                assert record.tier_tokens == (min(tokens, 73) - 1) // world.step_tokens * world.step_tokens


@pytest.mark.parametrize(
    ("kind", "needed"), [("full", 40), ("sliding_window(10)", 3), ("sliding_window(1)", 0), ("recurrent", 1)]
)
def test_hybrid_models_read_just_the_blocks_that_are_needed(kind: str, needed: int) -> None:
    """Row 32. Of a prompt of 40 blocks: the window, or the last state, is read from the tier behind and copied, and no more."""
    far, _ = faulty("far", blocks=400)
    with bare((("full", TOKENS), (kind, TOKENS)), slots=64, config={"tiers": [far]}) as world:
        request = Prompt("r", 40 * TOKENS + 1)
        world.put(request.keys(0), 0)
        for keys in (request.keys(1), [b"other %d" % n for n in range(64)]):
            world.put(keys, 1)
            world.manager.parts.io.run(world.manager.flush(), 20)
        assert not world.ready() & set(request.keys(1))
        before = backend_of(far).keys["load"]
        assert world.half.get_num_new_matched_tokens(request, 0) == (160, True)
        assert world.leases == 40, "of the other group; what is not in the primary tier is not leased"
        table = [0] * (40 - needed) + list(range(50, 50 + needed + 1))
        world.half.update_state_after_alloc(request, (list(range(1, 42)), table), 160)
        for _ in range(2_000):
            step = world.step()
            if step.load_jobs:
                break
            world.manager.parts.io.run(_no_work(), 20)
        (job,) = step.load_jobs.values()
        assert job.spec.destination.group_sizes == (40, needed)
        assert backend_of(far).keys["load"] - before == needed
        world.report(step)
        world.half.request_finished(request, ([], []))


async def _no_work() -> None:
    """The manager's loop comes round."""


def test_hybrid_models_touch_just_the_window() -> None:
    """Row 32 and DESIGN section 9: of a short window the rest of the prompt is not kept young."""
    config = {"primary": {"policy": "lru"}}
    with bare((("full", TOKENS), ("sliding_window(8)", TOKENS)), slots=12, config=config) as world:
        request = Prompt("r", 8 * TOKENS + 1)
        for group in (0, 1):
            world.put(request.keys(group), group)
            world.put([b"other %d %d" % (group, n) for n in range(4)], group)
        world.half.get_num_new_matched_tokens(request, 0)
        world.step()
        for group in (0, 1):
            world.put([b"new %d %d" % (group, n) for n in range(4)], group)
        ready = world.ready()
        assert set(request.keys(0)) <= ready, "touched: others went"
        assert [key in ready for key in request.keys(1)] == [False] * 4 + [True] * 4, (
            "the oldest of what lies before it"
        )
        world.half.request_finished(request, ([], []))


def test_hybrid_models_have_slots_of_each_groups_size() -> None:
    """Row 32: no slots wasted. A short window's group has small blocks, and every group slots for as many tokens."""
    groups = (CacheGroup("full", 4, tuple(range(16)), 32), WINDOW, CacheGroup("recurrent", 8, (17,), 32))
    config = {"primary": {"capacity": 1 << 20}}
    with rig(groups, config=config, gpu_blocks=60) as world:
        pools = world.manager.parts.arena.pools
        assert [pool.slot_bytes for pool in pools] == [4096, 4096, 4096]
        tokens = [pool.slots * group.tokens_per_block for pool, group in zip(pools, groups, strict=True)]
        assert max(tokens) - min(tokens) < 8
    big = (CacheGroup("full", 64, tuple(range(16)), 32), CacheGroup("sliding_window(10)", 64, (16,), 32))
    with rig(big, config=config, gpu_blocks=60, step_tokens=128) as world:
        first, second = world.manager.parts.arena.pools
        assert (first.slot_bytes, second.slot_bytes) == (16 * 64 * 32, 4096)
        assert abs(first.slots - second.slots) <= 1
