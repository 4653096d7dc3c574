"""How fast the core is: ``python -m tests.core.bench_core [--json]``. Best of several runs; no I/O, one thread.

The targets are those of DESIGN section 15; the machine decides, so compare runs on the same one.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Callable

from tests.core.worlds import exclusive, spec_of
from tiering.core import events as ev
from tiering.core.machine import TieringCore
from tiering.core.state import CoreSpec
from tiering.types import Outcome, TierState

RUN = 1000
"""Blocks a request: a prompt of 16,000 tokens at 16 a block."""

REPEATS = 300
TARGETS = {
    "lookup": 6.0e6,
    "store_cycle": 0.6e6,
    "lease_and_release": 1.5e6,
}
BYTES_TARGET = 500


def _keys(n: int, salt: int = 0) -> tuple[bytes, ...]:
    """32-byte keys, as block_keys makes them."""
    return tuple(salt.to_bytes(8, "big") + i.to_bytes(24, "big") for i in range(n))


def _stored(spec: CoreSpec, keys: tuple[bytes, ...]) -> TieringCore:
    core = TieringCore(spec)
    for tier in spec.tiers:
        core.handle(ev.TierChanged(0.0, tier.name, TierState.UP))
    _store(core, keys)
    return core


def _store(core: TieringCore, keys: tuple[bytes, ...], parent: bytes | None = None) -> None:
    plan, _ = core.handle(ev.StoreRequested(0.0, 0, keys, parent))
    assert isinstance(plan, ev.StorePlan)
    assert len(plan.grants) == len(keys)
    core.handle(ev.StoreFinished(0.0, plan.job, (Outcome.OK,) * len(keys)))


def _best(work: Callable[[], int]) -> float:
    """Blocks a second, best of the repeats."""
    gc.collect()
    best = 0.0
    for _ in range(REPEATS):
        started_s = time.perf_counter()
        blocks = work()
        best = max(best, blocks / (time.perf_counter() - started_s))
    return best


def lookup() -> float:
    """1,000 hot keys at a time."""
    keys = _keys(RUN)
    core = _stored(spec_of(2 * RUN), keys)

    def work() -> int:
        assert core.lookup(0, keys, 0.0).match.blocks == RUN
        return RUN

    return _best(work)


def store_cycle() -> float:
    """Plan, finish and evict: a full tier of 10 runs takes one run after another, policy ``prefix``, no tiers behind."""
    core = TieringCore(spec_of(10 * RUN))
    runs = [_keys(RUN, salt) for salt in range(200)]
    turn = iter(range(1 << 30))
    for run in runs[:10]:
        _store(core, run)

    def work() -> int:
        _store(core, runs[next(turn) % len(runs)])
        return RUN

    for _ in range(10):
        next(turn)
    return _best(work)


def lease_and_release() -> float:
    """Load and release 1,000 READY blocks at a time."""
    keys = _keys(RUN)
    core = _stored(spec_of(2 * RUN), keys)

    def work() -> int:
        plan, _ = core.handle(ev.LoadRequested(0.0, 0, keys))
        assert isinstance(plan, ev.LoadPlan)
        assert len(plan.slots) == RUN
        core.handle(ev.Released(0.0, plan.job))
        return RUN

    return _best(work)


def bytes_per_block(spec: CoreSpec) -> float:
    """Control state of a READY block, its policy's and the key's 65 bytes included, by tracemalloc."""
    n = 20_000
    core = TieringCore(spec)
    for tier in spec.tiers:
        core.handle(ev.TierChanged(0.0, tier.name, TierState.UP))
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    parent = None
    for start in range(0, n, RUN):
        run = _keys(RUN, start)
        _store(core, run, parent)
        for op in list(core.world.ops.values()):
            core.handle(ev.OpFinished(0.0, op.op, (Outcome.OK,) * len(op.items)))
    core.recent = type(core.recent)(1, 1)  # the ring of events has its own bound
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / n


def main() -> None:
    rates = {"lookup": lookup(), "store_cycle": store_cycle(), "lease_and_release": lease_and_release()}
    memory = {
        "primary only": bytes_per_block(spec_of(20_000)),
        "primary and one bounded tier": bytes_per_block(spec_of(20_000, exclusive(room=20_000))),
    }
    if "--json" in sys.argv[1:]:
        print(json.dumps({"blocks_per_s": rates, "targets": TARGETS, "bytes_per_block": memory}))
        return
    for name, rate in rates.items():
        verdict = "" if rate >= TARGETS[name] else "  BELOW"
        print(f"{name:20} {rate / 1e6:6.2f} M blocks/s   target {TARGETS[name] / 1e6:.1f}{verdict}")
    for name, size in memory.items():
        print(f"{name:30} {size:5.0f} B a block   target {BYTES_TARGET}{'' if size <= BYTES_TARGET else '  ABOVE'}")


if __name__ == "__main__":
    main()
