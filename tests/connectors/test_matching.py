"""Row 32: the reported prefix is the longest that every group can serve, against a search through all prefixes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.connectors.bare import TOKENS, Bare, Prompt, bare
from tests.manager.world import faulty
from tiering import Outcome
from tiering.connectors.geometry import Geometry
from tiering.connectors.matching import Match, match_prefix
from tiering.connectors.requests import RequestLimits
from tiering.testing import VirtualClock

KINDS: dict[str, tuple[tuple[str, int], ...]] = {
    "full": (("full", 4),),
    "two full": (("full", 4), ("full", 8)),
    "window": (("sliding_window(10)", 4),),
    "full and window": (("full", 4), ("sliding_window(10)", 4)),
    "all kinds": (("full", 4), ("sliding_window(18)", 8), ("recurrent", 12)),
}
_cases = itertools.count()
BLOCKS = 24
"""Of four tokens."""


def _needs(kind: str, size: int, computed: int, tokens: int) -> set[int]:
    """Blocks of ours that a prefix of ``tokens`` needs and ``computed`` tokens on the GPU do not have."""
    if kind == "recurrent":
        read = {tokens // size - 1}
    else:
        reach = int(kind[15:-1]) if kind != "full" else tokens + 1
        read = {position // size for position in range(max(0, tokens - reach + 1), tokens)}
    return {block for block in read if (block + 1) * size > computed}


@pytest.fixture(scope="module", params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[Bare]:
    with bare(KINDS[request.param], slots=200) as made:
        yield made


@given(data=st.data())
def test_the_longest_prefix_that_every_group_can_serve(world: Bare, data: st.DataObject) -> None:
    """Row 32. Blocks are there at random; every prefix is tried."""
    case = b"%d " % next(_cases)
    present: list[set[int]] = []
    keys: list[list[bytes]] = []
    kinds = [(group.kind, group.tokens_per_block) for group in world.layout.groups]
    for number, (_, size) in enumerate(kinds):
        blocks = BLOCKS * 4 // size
        keys.append([case + bytes([n, number]) for n in range(blocks)])
        lost = data.draw(st.sets(st.integers(0, blocks - 1), max_size=4))
        present.append(set(range(blocks)) - lost)
        run = [keys[-1][n] for n in sorted(present[-1])]
        assert world.put(run, number) == len(run)
    computed = 4 * data.draw(st.integers(0, BLOCKS))
    tokens_max = data.draw(st.integers(computed, BLOCKS * 4))
    step = Geometry.of(world.layout, [4] * len(kinds), 4).step_tokens
    right = max(
        (
            tokens
            for tokens in range(0, tokens_max + 1, step)
            if tokens > computed
            and all(
                _needs(kind, size, computed, tokens) <= there
                for (kind, size), there in zip(kinds, present, strict=True)
            )
        ),
        default=computed,
    )
    geometry = Geometry.of(world.layout, [4] * len(kinds), 4)
    found = match_prefix(world.manager.sync, geometry, keys, computed, tokens_max, None)
    assert found == Match(right, right)
    world.manager.sync.reset(str(case))


def _filled(world: Bare, keys: Sequence[bytes], group: int = 0) -> int:
    """Their copies are under way."""
    return world.manager.sync.plan_store(keys, group=group).job


def test_an_answer_on_its_way_makes_the_match_pending() -> None:
    """Of a window as well: what may still come counts as possible, what is there as possible now."""
    with bare((("full", TOKENS), ("sliding_window(6)", TOKENS))) as world:
        prompt = Prompt("r", 6 * TOKENS)
        geometry = Geometry.of(world.layout, [TOKENS] * 2, TOKENS)
        world.put(prompt.keys(0), 0)
        world.put(prompt.keys(1)[:4], 1)
        copy = _filled(world, prompt.keys(1)[4:], 1)
        keys = [prompt.keys(0), prompt.keys(1)]
        match = match_prefix(world.manager.sync, geometry, keys, 0, 24, None)
        assert (match, match.pending) == (Match(16, 24), True)
        assert not match_prefix(world.manager.sync, geometry, keys, 0, 16, None).pending
        world.manager.sync.complete(copy, [Outcome.OK] * 2)
        assert match_prefix(world.manager.sync, geometry, keys, 0, 24, None) == Match(24, 24)


def test_a_window_that_cannot_fit_is_no_hit() -> None:
    """Row 32: the window needs three slots and the group has two."""
    with bare((("full", TOKENS), ("sliding_window(12)", TOKENS)), slots=2) as world:
        prompt = Prompt("r", 4 * TOKENS)
        assert len(world.manager.parts.core.world.pools[1].free) == 2
        geometry = Geometry.of(world.layout, [TOKENS] * 2, TOKENS)
        match = match_prefix(world.manager.sync, geometry, [prompt.keys(0), prompt.keys(1)], 0, 16, None)
        assert match.tokens == 0


def test_tiers_that_may_serve_a_request() -> None:
    far, _ = faulty("far", blocks=64)
    with bare(slots=4, config={"tiers": [far]}, clock=VirtualClock()) as world:
        prompt = Prompt("r", 6 * TOKENS + 1)
        # The first two are in the primary tier, all of them in the far one.
        for start in (2, 0):
            world.put(prompt.keys()[start : start + 4])
            world.manager.parts.io.run(world.manager.flush(), 20)
        assert world.ready() == set(prompt.keys()[:4])

        def tokens(*tiers: str) -> int | None:
            request = Prompt(f"r {tiers}", 6 * TOKENS + 1)
            world.half.on_new_request(request, RequestLimits(load_tiers=frozenset(tiers)))
            answer, _ = world.half.get_num_new_matched_tokens(request, 0)
            world.half.request_finished(request, ([],))
            world.step()
            return answer

        assert tokens("primary") == 16
        assert tokens("far") == 0, "the nearest tier that has the first block is another"
        assert tokens() == 0


@pytest.mark.parametrize(
    ("limit", "computed", "found"),
    [(None, 0, 20), (0, 0, 0), (7, 0, 4), (8, 0, 8), (8, 4, 8), (100, 8, 12), (None, 20, 0), (None, 16, 4)],
)
def test_limits_of_a_request_and_the_token_that_is_always_computed(
    limit: int | None, computed: int, found: int
) -> None:
    with bare() as world:
        prompt = Prompt("r", 6 * TOKENS)
        world.put(prompt.keys())
        world.half.on_new_request(prompt, RequestLimits(load_tokens_max=limit))
        assert world.half.get_num_new_matched_tokens(prompt, computed)[0] == found
        world.half.request_finished(prompt, ([],))
