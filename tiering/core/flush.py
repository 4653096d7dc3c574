"""Flushes: who waits for which demotion, and how each came to its end."""

from __future__ import annotations

from tiering.core.commands import FlushDone
from tiering.core.state import FlushJob, Tier, World
from tiering.types import BlockKey


def begin(world: World) -> FlushJob:
    """A flush that waits for all that is owed to a working tier or on its way; the rest is lost to it at once."""
    flush = FlushJob(world.next_id(), set())
    for tier in world.tiers:
        if tier.writable:
            flush.remaining.update((tier.index, key) for key in tier.owed)
        elif tier.owed or tier.parked:
            flush.lost[tier.spec.name] = len(tier.owed) + len(tier.parked)
    for op in world.ops.values():
        if op.kind == "demote" and op.epoch == world.epoch:
            flush.remaining.update((op.tier, block.key) for block, _, _ in op.items)
    world.flushes[flush.job] = flush
    return flush


def settle(world: World, tier: Tier, key: BlockKey, *, acknowledged: bool) -> None:
    """A demotion came to its end, this way or that: flushes that wait for it count it."""
    for flush in world.flushes.values():
        if (tier.index, key) in flush.remaining:
            flush.remaining.discard((tier.index, key))
            if acknowledged:
                flush.acknowledged += 1
            else:
                flush.lost[tier.spec.name] = flush.lost.get(tier.spec.name, 0) + 1


def give_up(world: World, flush: FlushJob) -> None:
    """What the flush still waits for is lost to it."""
    for index, _ in flush.remaining:
        name = world.tiers[index].spec.name
        flush.lost[name] = flush.lost.get(name, 0) + 1
    flush.remaining.clear()


def end_done(world: World) -> None:
    """Report the flushes that wait for nothing more."""
    for flush in [f for f in world.flushes.values() if not f.remaining]:
        del world.flushes[flush.job]
        world.commands.append(FlushDone(flush.job, flush.acknowledged, dict(flush.lost)))
