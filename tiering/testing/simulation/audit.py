"""What must hold at rest, once faults are off. Each check names the fault in this field that it is about."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from tiering.core.demotion import NO_ROOM
from tiering.core.state import Block, Pool, Tier, World
from tiering.core.transitions import CellState, PrimaryState
from tiering.testing.simulation import callers
from tiering.testing.simulation.medium import OUT_OF_MEMORY
from tiering.testing.simulation.process import Process
from tiering.testing.simulation.watch import fail
from tiering.types import BlockKey, PrefixMatch, TierState

T = TypeVar("T")


class Do(Protocol):
    """Runs one caller alone, and all that follows from it."""

    def __call__(self, steps: callers.Steps[T], /) -> T: ...


def tiers_are_back(process: Process) -> None:
    """Row 9: a tier that works again is used again."""
    for lane, tier in zip(process.lanes, process.core.world.tiers, strict=True):
        if lane.state is not TierState.UP or tier.state is not TierState.UP:
            fail(f"tier {lane.name} works, and is {lane.state.value}; the core takes it for {tier.state.value}")


def drained(process: Process) -> None:
    """Rows 8, 18 and 25: nothing is leased, lent, in flight or waited for."""
    world = process.core.world
    left = {
        "operations": world.ops,
        "store jobs": world.stores,
        "load jobs": world.loads,
        "waiting loads": world.waiting,
        "starved loads": world.starved,
        "flushes": world.flushes,
        "holds": world.holds,
        "held keys": world.holders,
        "foreign blocks leaving": world.foreign_leaving,
        "slots in use": process.arena.in_use(),
    }
    for what, things in left.items():
        if things:
            fail(f"at rest there are still {what}: {things}")
    for pool in world.pools:
        held = sum(block is not None for block in pool.owner)
        if pool.busy or len(pool.free) + held != pool.spec.slots:
            fail(f"pool {pool.index}: {pool.busy} of {pool.spec.slots} slots busy, {len(pool.free)} free, {held} held")
    for tier in world.tiers:
        name, flying = tier.spec.name, (tier.lent_bytes, tier.asking, tier.deleting_bytes)
        if any(flying):
            fail(f"tier {name}: at rest there are still (bytes lent, keys asked, bytes leaving) {flying}")
        if tier.owed:
            fail(f"tier {name}: {len(tier.owed)} blocks are owed, and nothing is under way")
        if tier.room_bytes is not None and tier.used_bytes > tier.room_bytes:
            fail(f"tier {name}: {tier.used_bytes} bytes used of {tier.room_bytes}")


def flushed(process: Process, lost: Mapping[str, int]) -> None:
    """Rows 5 and 6: after a flush each tier has what it should have, unless there is no room for it."""
    drained(process)
    for lane, tier in zip(process.lanes, process.core.world.tiers, strict=True):
        why = set(tier.parked.values()) - {NO_ROOM, OUT_OF_MEMORY}
        if why:
            fail(f"tier {lane.name}: blocks stay owed after a flush, though nothing fails: {why}")
        if tier.spec.demote_rule == "on_store" and tier.room_bytes is None:
            _has_all(process, tier)
        if lost.get(lane.name) and tier.room_bytes is None and not tier.parked:
            fail(f"tier {lane.name}: the flush lost {lost[lane.name]} blocks, though nothing fails and there is room")


def _has_all(process: Process, tier: Tier) -> None:
    """An unbounded tier has all that was stored, and all that came from a farther one, or has said that it is full."""
    world = process.core.world
    limit = tier.spec.capabilities.value_bytes_max
    for pool in world.pools:
        if limit is not None and pool.spec.payload_bytes > limit:
            continue
        for slot, block in enumerate(pool.owner):
            if block is None or block.key in tier.parked:
                continue
            source, _ = process.watch.source.get((pool.index, slot), ("", 0))
            if source and world.tier_index[source] <= tier.index:
                continue
            cell = block.cells[tier.index]
            if cell is None or cell.state is not CellState.PRESENT:
                fail(f"tier {tier.spec.name}: block {block.key.hex()} should be there, and is not even owed")


def stuck(world: World, pool: Pool) -> int:
    """Blocks that no eviction may take: last copies with a child, or one behind it, in another tier."""
    if not pool.policy.leaf_first:
        return 0
    children: dict[BlockKey, list[Block]] = {}
    for block in world.blocks.values():
        if block.copies and block.parent is not None:
            children.setdefault(block.parent, []).append(block)

    def stays(block: Block) -> bool:
        if block.state is PrimaryState.ABSENT or block.copies > 1:
            return True
        return any(stays(child) for child in children.get(block.key, ()))

    owners = [block for block in pool.owner if block is not None and block.copies == 1]
    return sum(stays(block) for block in owners)


def read_back(keys: Sequence[BlockKey], match: PrefixMatch | None, n: int, reads: int, failed: int) -> None:
    """Rows 1 and 7: what is said to be loadable is loaded, with no more reads than blocks.

    ``match`` is None where what was said need not come true: the core forgets verdicts for want of room, or blocks are
    ``stuck`` in the slots that were counted on.
    """
    if reads > len(keys) + failed:
        fail(f"{reads} reads for a path of {len(keys)} blocks, {failed} of them failed")
    if match is not None and not failed and n != match.loadable_blocks:
        fail(f"{match.loadable_blocks} blocks of {len(keys)} are said to be loadable ({match}), and {n} were loaded")


def takes_new_blocks(process: Process, do: Do) -> None:
    """Rows 2, 3 and 29: at rest the whole primary tier is room for a new prefix."""
    for pool in process.core.world.pools:
        keys = [hashlib.blake2b(bytes([pool.index, n]), digest_size=6).digest() for n in range(pool.spec.slots)]
        before = stuck(process.core.world, pool)
        deadline_s = process.agenda.now_s + 60
        done = do(callers.store(process, pool.index, keys, None, deadline_s, patient=True))
        if done < len(keys) - before:
            fail(f"pool {pool.index}: {done} blocks of a new prefix of {len(keys)} were stored, in as many idle slots")
    drained(process)


def restored(process: Process, do: Do, paths: Sequence[tuple[int, Sequence[BlockKey]]]) -> None:
    """Row 4: what somebody holds elsewhere, and there is room for, does not stay a hole."""
    world = process.core.world
    for pool, keys in paths if world.spec.restore else ():
        head = keys[: len(world.pools[pool].free)]
        do(callers.hold(process, pool, head, process.agenda.now_s + 1, budget_bytes=1 << 30))
        missing = [
            key for key in head if (block := world.blocks.get(key)) is None or block.state is PrimaryState.ABSENT
        ]
        if missing:
            fail(f"pool {pool}: {len(missing)} of {len(head)} held blocks are missing, with room for all")


def books_are_right(process: Process, *, exact: bool) -> None:
    """Row 35: what is accounted is there; to the byte, if nothing was ever lost behind the core's back."""
    if not exact:
        return
    for lane, tier in zip(process.lanes, process.core.world.tiers, strict=True):
        occupied = lane.medium.occupied_bytes()
        if tier.room_bytes is not None and tier.used_bytes != occupied:
            fail(f"tier {lane.name}: {tier.used_bytes} bytes are accounted, {occupied} are there")


def found_again(process: Process) -> None:
    """Row 19: after a restart a tier that can be scanned has all that it had, at the right size."""
    world = process.core.world
    for lane, tier in zip(process.lanes, world.tiers, strict=True):
        if not (tier.spec.capabilities.can_scan and tier.spec.capabilities.exclusive):
            continue
        known = {
            key for key, block in world.blocks.items()
            if (cell := block.cells[tier.index]) is not None and cell.state is CellState.PRESENT
        }  # fmt: skip
        there = {key for epoch, key in lane.medium.kept if epoch == process.epoch}
        if known != there:
            fail(f"tier {lane.name}: after a restart {len(known)} blocks are known, {len(there)} are there")
        occupied = lane.medium.occupied_bytes()
        if tier.used_bytes != occupied:
            fail(f"tier {lane.name}: after a restart {tier.used_bytes} bytes are accounted, {occupied} are there")
    if any(block.state is not PrimaryState.ABSENT for block in world.blocks.values()):
        fail("after a restart the primary tier is not empty")
