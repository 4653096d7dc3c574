"""Planted defects: cores and mediums that are each wrong in one way, for the simulation to find out."""

from __future__ import annotations

from tiering.core import events as ev
from tiering.core.commands import Command, JobDone, RestoreDue, SlotsFreed
from tiering.core.machine import Reply, TieringCore
from tiering.core.transitions import SlotState
from tiering.testing.simulation import Medium, Stored
from tiering.testing.simulation.medium import Name, seal_of
from tiering.types import Outcome, TierState

Handled = tuple[Reply, list[Command]]


class FreesDoomedSlots(TieringCore):
    """A promotion is overdue: its slots go to others at once, though the bytes still land."""

    def handle(self, event: ev.Event) -> Handled:
        handled = super().handle(event)
        op = self.world.ops.get(event.op) if isinstance(event, ev.OpOverdue) else None
        if op is not None and op.kind == "promote":
            pools = self.world.pools
            if all(pools[block.pool].states[slot] is SlotState.DOOMED for block, slot, _ in op.items):
                del self.world.ops[op.op]
                for block, slot, _ in op.items:
                    cell = block.cells[op.tier]
                    assert cell is not None
                    cell.reads -= 1
                    pools[block.pool].states[slot] = SlotState.FREE
                    pools[block.pool].free.append(slot)
                    pools[block.pool].busy -= 1
                if op.starter is not None:
                    op.starter.flight_bytes -= sum(pools[b.pool].spec.payload_bytes for b, _, _ in op.items)
        return handled


class ForgetsReleases(TieringCore):
    """Every third caller that is done with its slots is not heard."""

    releases = 0

    def handle(self, event: ev.Event) -> Handled:
        if isinstance(event, ev.Released) and event.job in self.world.loads:
            self.releases += 1
            if self.releases % 3 == 0:
                return None, []
        return super().handle(event)


class ForgetsFailedDemotions(TieringCore):
    """What a tier did not take is not offered again."""

    def handle(self, event: ev.Event) -> Handled:
        handled = super().handle(event)
        for tier in self.world.tiers:
            tier.parked.clear()
        return handled


class IgnoresRecovery(TieringCore):
    """A tier that was down stays out of use."""

    def handle(self, event: ev.Event) -> Handled:
        if isinstance(event, ev.TierChanged) and event.state is TierState.UP:
            tier = self.world.tiers[self.world.tier_index[event.tier]]
            if tier.state in (TierState.DOWN, TierState.DEGRADED):
                return None, []
        return super().handle(event)


class KeepsStaleVerdicts(TieringCore):
    """A read that failed does not change what is believed of the tier."""

    def handle(self, event: ev.Event) -> Handled:
        op = self.world.ops.get(event.op) if isinstance(event, ev.OpFinished) else None
        if isinstance(event, ev.OpFinished) and op is not None and op.kind == "promote":
            for (block, _, _), outcome in zip(op.items, event.outcomes, strict=True):
                cell = block.cells[op.tier]
                if not outcome.ok and cell is not None:
                    cell.generation += 1
        return super().handle(event)


class LosesEnds(TieringCore):
    """Nobody is told that a load is done."""

    def handle(self, event: ev.Event) -> Handled:
        reply, commands = super().handle(event)
        return reply, [command for command in commands if not isinstance(command, JobDone)]


class LosesWakeUps(TieringCore):
    """Callers who were told to come back are not called."""

    def handle(self, event: ev.Event) -> Handled:
        reply, commands = super().handle(event)
        return reply, [command for command in commands if not isinstance(command, SlotsFreed)]


class LosesHoles(TieringCore):
    """Holders are not told that a block of theirs is missing."""

    def handle(self, event: ev.Event) -> Handled:
        reply, commands = super().handle(event)
        return reply, [command for command in commands if not isinstance(command, RestoreDue)]


class KeepsOldWeights(TieringCore):
    """A reset does nothing."""

    def handle(self, event: ev.Event) -> Handled:
        return (None, []) if isinstance(event, ev.Reset) else super().handle(event)


class GivesUpAtOnce(TieringCore):
    """One slot always stays free."""

    def handle(self, event: ev.Event) -> Handled:
        if isinstance(event, ev.StoreRequested) and len(self.world.pools[event.pool].free) == 1:
            return ev.StorePlan(0, (), (), 0, "no free slot in the primary tier"), []
        return super().handle(event)


class AsksForEver(TieringCore):
    """An answer to a question is followed by the question."""

    def handle(self, event: ev.Event) -> Handled:
        op = self.world.ops.get(event.op) if isinstance(event, ev.OpFinished) else None
        reply, commands = super().handle(event)
        if op is not None and op.kind == "probe":
            keys = tuple(block.key for block, _, _ in op.items)
            for block, _, _ in op.items:
                cell = block.cells[op.tier]
                if cell is not None:
                    cell.until_s = min(cell.until_s, self.world.now_s)
            commands += super().handle(ev.ProbeRequested(event.now_s, op.items[0][0].pool, keys))[1]
        return reply, commands


class ServesNeighbours(Medium):
    """Now and then another block of the tier is served, as if all were well."""

    reads = 0

    def load(self, name: Name) -> tuple[Outcome, bytes]:
        self.reads += 1
        outcome, payload = super().load(name)
        others = [stored.payload for other, stored in self.kept.items() if other != name]
        return (outcome, others[0]) if outcome.ok and others and self.reads % 5 == 0 else (outcome, payload)


class TrustsItsDisk(Medium):
    """Nothing is verified."""

    def load(self, name: Name) -> tuple[Outcome, bytes]:
        if name in self.kept:
            return Outcome.OK, self.kept[name].payload
        return super().load(name)


class SealsTornBlocks(Medium):
    """A block that was half written when the process died looks whole."""

    def cut_short(self, name: Name, block: Stored) -> None:
        super().cut_short(name, block)
        if name in self.kept:
            self.kept[name].seal = seal_of(name, self.kept[name].payload)


class MixesNamespaces(Medium):
    """Another weight epoch's blocks are served."""

    def load(self, name: Name) -> tuple[Outcome, bytes]:
        if name not in self.kept:
            for (_, key), stored in self.kept.items():
                if key == name[1]:
                    return Outcome.OK, stored.payload
        return super().load(name)

    def contains(self, name: Name) -> Outcome:
        there = any(key == name[1] for _, key in self.kept)
        return Outcome.OK if there else super().contains(name)


class TakesMoreThanItSays(Medium):
    """Each block occupies a page more than was accounted."""

    def put(self, name: Name, block: Stored) -> None:
        block.stored_bytes += 4096
        super().put(name, block)


class KeepsWhatItDeletes(Medium):
    """Every other delete is acknowledged and not done."""

    deletes = 0

    def delete(self, epoch: str, handle: bytes, now_s: float) -> Outcome:
        self.deletes += 1
        if self.deletes % 2 and (epoch, handle) in self.kept:
            return Outcome.OK
        return super().delete(epoch, handle, now_s)
