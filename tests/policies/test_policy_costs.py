"""What the policies may cost: room on demand, calls of ``protected``, memory. Counted, never timed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from tiering.api import EvictionPolicy
from tiering.policies import ARCPolicy, LRUPolicy, PrefixPolicy

POLICIES: list[Callable[[int], EvictionPolicy]] = [PrefixPolicy, LRUPolicy, ARCPolicy]


def chain(name: int, blocks: int) -> list[bytes]:
    return [b"%d %d" % (name, i) for i in range(blocks)]


def never(key: bytes) -> bool:
    return False


@pytest.mark.parametrize("make", POLICIES)
def test_burst_drops(make: Callable[[int], EvictionPolicy]) -> None:
    """Row 29: with 400 blocks resident, as many victims are named as are idle, at once and however few those are."""
    paths = [chain(i, 16) for i in range(25)]
    for leased in range(26):
        policy = make(400)
        for path in paths:
            policy.admit(path, None)
            policy.touch(path[: 1 + len(path) // 2])
        busy = {key for path in paths[:leased] for key in path}
        for n in (1, 144, 400 - len(busy), 400):
            named = policy.victims(n, busy.__contains__)
            assert len(named) == len(set(named)) == min(n, 400 - len(busy))
            assert busy.isdisjoint(named)


@pytest.mark.parametrize("make", POLICIES)
@pytest.mark.parametrize("batch_blocks", [1, 7, 640])
def test_protected_is_asked_about_few_blocks_in_use(make: Callable[[int], EvictionPolicy], batch_blocks: int) -> None:
    """The blocks in use are the most recent ones, so a long sequence of evictions meets hardly any of them."""
    policy = make(6_400)
    paths = [chain(i, 64) for i in range(100)]
    for path in paths:
        policy.admit(path, None)
    busy = {key for path in paths[-50:] for key in path}
    policy.touch([key for path in paths[-50:] for key in path])
    asked = 0

    def protected(key: bytes) -> bool:
        nonlocal asked
        asked += 1
        return key in busy

    evicted = 0
    while named := policy.victims(batch_blocks, protected):
        policy.forget(named, evicted=True)
        evicted += len(named)
    assert evicted == 3_200
    assert asked <= 2 * 3_200 + 3_200, "one call a victim, and the busy ones once, when nothing else is left"


def test_bookkeeping_does_not_grow_with_use() -> None:
    """Stale queue entries, forgotten parents and split runs are all cleaned up: memory follows residency."""
    paths = [[*chain(i % 10, 8), *chain(100 + i, 24)] for i in range(80)]
    orphans = [chain(1_000 + i, 2) for i in range(500)]

    def round_trip(policy: PrefixPolicy) -> None:
        for path in paths:
            policy.admit(path[:8], None)
            policy.admit(path[8:], path[7])
            policy.touch(path[:20])
            policy.touch(path[25:])
            policy.victims(len(path), set(path).__contains__)
        for orphan in orphans:
            policy.admit(orphan[1:], orphan[0])
            policy.forget(orphan[1:], evicted=False)
        policy.forget(policy.victims(400, never), evicted=True)

    tracemalloc.start()  # before all that the policy allocates, so that a table replaced is no growth
    try:
        policy = PrefixPolicy(2_000)
        for _ in range(10):
            round_trip(policy)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(10):
            round_trip(policy)
        growth = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert growth < 10_000, f"{growth} bytes after 10 rounds of the same"


@pytest.mark.parametrize(("make", "limit_bytes"), [(PrefixPolicy, 200), (LRUPolicy, 200), (ARCPolicy, 400)])
def test_bytes_a_resident_block(make: Callable[[int], EvictionPolicy], limit_bytes: int) -> None:
    """The keys themselves belong to the caller. ARC also keeps a ghost for each block."""
    blocks = 20_000
    paths = [chain(i, 50) for i in range(2 * blocks // 50)]
    tracemalloc.start()
    try:
        policy = make(blocks)
        for path in paths:
            policy.forget(policy.victims(len(policy) + len(path) - blocks, never), evicted=True)
            policy.admit(path, None)
            policy.touch(path)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(policy) == blocks
    assert used / blocks <= limit_bytes
