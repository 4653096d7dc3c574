"""How fast the policies are, and how much they remember. ``python -m tests.policies.bench_policies``.

One cycle of a block is what storing it into a full tier costs a policy: name a victim, forget it, admit the block,
touch it. Blocks come in paths; the figures are for the best of several passes, in CPU time, so that a busy machine
disturbs them less.
"""

from __future__ import annotations

import hashlib
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

from tiering.api import EvictionPolicy
from tiering.policies import ARCPolicy, LRUPolicy, PrefixPolicy

RESIDENT_BLOCKS = 100_000
POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"prefix": PrefixPolicy, "lru": LRUPolicy, "arc": ARCPolicy}


@dataclass(frozen=True, slots=True)
class Figures:
    """``cycles_per_s``: blocks a second through all four calls. ``bytes_per_block``: what the policy holds, keys not counted."""

    cycles_per_s: float
    bytes_per_block: float


def nothing_protected(key: bytes) -> bool:
    return False


def make_paths(path_blocks: int) -> list[list[bytes]]:
    """Twice the residency, in paths of ``path_blocks``, with keys as long as real ones."""
    count = 2 * RESIDENT_BLOCKS // path_blocks
    return [[hashlib.sha256(b"%d %d" % (i, at)).digest() for at in range(path_blocks)] for i in range(count)]


def one_pass(policy: EvictionPolicy, paths: list[list[bytes]]) -> None:
    for path in paths:
        policy.forget(policy.victims(len(path), nothing_protected), evicted=True)
        policy.admit(path, None)
        policy.touch(path)


def measure(make: Callable[[int], EvictionPolicy], path_blocks: int, passes: int = 5) -> Figures:
    """Fill a policy, then send every path through it ``passes`` times."""
    paths = make_paths(path_blocks)
    blocks = sum(map(len, paths))
    tracemalloc.start()
    policy = make(blocks // 2)
    for path in paths[: len(paths) // 2]:
        policy.admit(path, None)
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    best_s = float("inf")
    paths = paths[len(paths) // 2 :] + paths[: len(paths) // 2]
    for _ in range(passes):
        begin = time.process_time()
        one_pass(policy, paths)
        best_s = min(best_s, time.process_time() - begin)
    return Figures(blocks / best_s, held_bytes / len(policy))


def main() -> None:
    print(f"{RESIDENT_BLOCKS:,} resident blocks; victims + forget + admit + touch a block")
    print(f"{'policy':8} {'path blocks':>11} {'M cycles/s':>11} {'bytes/block':>12}")
    for name, make in POLICIES.items():
        for path_blocks in (64, 8, 1):
            figures = measure(make, path_blocks)
            print(f"{name:8} {path_blocks:11} {figures.cycles_per_s / 1e6:11.2f} {figures.bytes_per_block:12.0f}")


if __name__ == "__main__":
    main()
