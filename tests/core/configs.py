"""The small worlds that are explored to the end."""

from __future__ import annotations

from tests.core.explore import Config, Events, tier_changes
from tests.core.worlds import (
    CANCELLED,
    CORRUPT,
    FAILED,
    MISSING,
    OK,
    REFUSED,
    STORED_BYTES,
    chain,
    exclusive,
    shared,
    spec_of,
)
from tiering.core import events as ev
from tiering.core.state import World
from tiering.types import ScanEntry, TierState

A, B, C = chain(3)
X = b"x"

UP, DOWN, DEGRADED = TierState.UP, TierState.DOWN, TierState.DEGRADED


def _up(*names: str) -> tuple[ev.Event, ...]:
    return tuple(ev.TierChanged(0.0, name, UP) for name in names)


def _scanned(*keys: bytes, foreign: int = 0, tier: str = "nvme") -> ev.Event:
    entries = [ScanEntry(b"f" * (40 + n), STORED_BYTES, foreign=True) for n in range(foreign)]
    parents = (None, *keys)
    entries += [ScanEntry(key, STORED_BYTES, parent) for key, parent in zip(keys, parents, strict=False)]
    return ev.TierScanned(0.0, tier, tuple(entries))


def _store(world: World, *runs: tuple[tuple[bytes, ...], bytes | None, bool], jobs_max: int = 1) -> Events:
    if len(world.stores) < jobs_max:
        for keys, parent, patient in runs:
            yield ev.StoreRequested(world.now_s, 0, keys, parent, patient)


def _load(world: World, *runs: tuple[bytes, ...], jobs_max: int = 2) -> Events:
    if len(world.loads) < jobs_max:
        for keys in runs:
            yield ev.LoadRequested(world.now_s, 0, keys)


def _flush(world: World) -> Events:
    if not world.flushes:
        yield ev.FlushRequested(world.now_s)


def _demoting(world: World) -> Events:
    yield from _store(world, ((A, B), None, True), ((B,), A, False))
    yield from tier_changes(world, (UP, DEGRADED))
    yield from _flush(world)


def _flowing(world: World) -> Events:
    yield from _store(world, ((A, B, C), None, True), ((C,), B, False))


def _joining(world: World) -> Events:
    yield from _load(world, (A, B))
    yield from tier_changes(world)


def _asking(world: World) -> Events:
    yield from _store(world, ((A,), None, False))
    yield from _load(world, (A,), jobs_max=1)
    yield ev.ProbeRequested(world.now_s, 0, (A,))


def _starving(world: World) -> Events:
    running = {job.keys for job in world.loads.values()}
    yield from _load(world, *(run for run in ((A, B), (X,)) if run not in running))


def _standing_in(world: World) -> Events:
    yield from _load(world, (A,), jobs_max=1)
    yield from tier_changes(world)


def _filling_nearer(world: World) -> Events:
    yield from _load(world, (A,), jobs_max=1)
    yield from _store(world, ((X,), None, False))


def _deleting(world: World) -> Events:
    yield from _load(world, (A,), jobs_max=1)
    yield from _store(world, ((X,), None, False))


def _resetting(world: World) -> Events:
    if len(world.loads) + len(world.stores) < 2:
        yield from _store(world, ((A,), None, False))
        yield from _load(world, (A, B), jobs_max=1)
    yield from _flush(world)
    yield ev.Reset(world.now_s)
    yield from tier_changes(world, (UP,))


def _holding(world: World) -> Events:
    yield from _store(world, ((X,), None, False), ((A, B), None, False))
    if not world.holds:
        yield ev.HoldRequested(world.now_s, 0, (A, B))
    for hold in world.holds:
        yield ev.HoldReleased(world.now_s, hold)
        yield ev.RestoreRequested(world.now_s, hold, 1 << 30)


def _stepping(world: World) -> Events:
    """A holder that asks by itself, ranked or not, whose run grows and leaves a window; and leases while it does."""
    yield from _store(world, ((X,), None, False), ((A, B), None, False))
    if not world.holds:
        yield ev.HoldRequested(world.now_s, 0, (A,), stepped=True)
    if not world.loads:
        yield ev.LeaseRequested(world.now_s, 0, (A, B))
    for job in world.loads:
        yield ev.Released(world.now_s, job)
    for number, hold in world.holds.items():
        yield ev.HoldReleased(world.now_s, number)
        if len(hold.keys) < 2:
            yield ev.HoldExtended(world.now_s, number, (B,))
        elif not hold.first:
            yield ev.HoldTrimmed(world.now_s, number, 1)
        for ranked in (True, False):
            yield ev.RestoreStep(world.now_s, (number,), 1 << 30, ranked)


def _counting_hits(world: World) -> Events:
    yield from _store(world, ((A,), None, False), ((X,), None, False))
    yield from _load(world, (A,), jobs_max=1)


def _leaving(world: World) -> Events:
    yield from _store(world, ((A, B), None, True), ((X,), None, False))


def _two_chains(world: World) -> Events:
    yield from _counting_hits(world)
    yield from _store(world, ((A, B), None, False))
    yield from _load(world, (A, B), jobs_max=1)


def _everything(world: World) -> Events:
    yield from _store(world, ((A,), None, True), ((B,), A, False))
    yield from _load(world, (A, B), jobs_max=1)
    yield ev.ProbeRequested(world.now_s, 0, (A, B))
    yield from tier_changes(world)
    yield from _flush(world)
    yield ev.Reset(world.now_s)


CONFIGS = (
    Config("demote into a tier of one block", spec_of(2, exclusive(room=1, batch=1)), _demoting, _up("nvme")),
    Config("flow through", spec_of(2, exclusive(room=2, batch=2)), _flowing, _up("nvme"), ticks=False),
    Config(
        "join, abort and time out",
        spec_of(2, exclusive(room=4, batch=2)),
        _joining,
        (_scanned(A, B), *_up("nvme")),
        answers={"promote": (OK, CORRUPT, CANCELLED)},
    ),
    Config("ask a shared tier", spec_of(1, shared()), _asking, _up("redis")),
    Config(
        "starve",
        spec_of(2, exclusive(room=4, rule="never", batch=1), window=1),
        _starving,
        (_scanned(A, B), _scanned(X), *_up("nvme")),
        overdue=False,
        ticks=False,
        answers={"promote": (OK, FAILED)},
    ),
    Config(
        "stand in for a tier",
        spec_of(1, exclusive("near", room=1, batch=1), exclusive("nvme", room=2, batch=1)),
        _standing_in,
        (_scanned(A, tier="near"), _scanned(A), *_up("near", "nvme")),
        ticks=False,
    ),
    Config(
        "fill the nearer tier",
        spec_of(1, exclusive("near", room=1, batch=1), exclusive("nvme", room=2, batch=1)),
        _filling_nearer,
        (_scanned(A), *_up("near", "nvme")),
        ticks=False,
        overdue=False,
        answers={"promote": (OK, MISSING), "demote": (OK, REFUSED), "delete": (OK,)},
    ),
    Config(
        "delete what is corrupt, foreign or too much",
        spec_of(2, exclusive(room=1, batch=1)),
        _deleting,
        (_scanned(A, foreign=1), *_up("nvme")),
    ),
    Config("reset", spec_of(2, shared(batch=2)), _resetting, _up("redis")),
    Config("hold and restore", spec_of(2), _holding),
    Config("hold and restore by steps", spec_of(2), _stepping),
    Config("demote after hits", spec_of(1, shared(rule=2)), _counting_hits, _up("redis"), ticks=False),
    Config(
        "demote on eviction",
        spec_of(2, exclusive(room=2, rule="on_evict")),
        _leaving,
        _up("nvme"),
        ticks=False,
        answers={"demote": (OK, FAILED)},
    ),
)
"""Explored to the end by the tests."""

LONG_CONFIGS = (
    Config(
        "starve, all answers",
        spec_of(2, exclusive(room=4, rule="never", batch=1), window=1),
        _starving,
        (_scanned(A, B), _scanned(X), *_up("nvme")),
        overdue=False,
        ticks=False,
    ),
    Config("demote after hits, two chains", spec_of(2, shared(rule=2)), _two_chains, _up("redis"), ticks=False),
    Config(
        "everything, two tiers",
        spec_of(2, exclusive("near", room=2, batch=1), shared(batch=1)),
        _everything,
        _up("near", "redis"),
        ops_max=2,
    ),
)
"""Besides, for ``make verify``: the last one goes as far as its time allows."""
