"""One backend call: what it does to the slots when it starts, and to the slots and the medium when it lands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tiering.core.commands import Delete, Demote, IoCommand, Probe, Promote
from tiering.testing.simulation.agenda import Timer
from tiering.testing.simulation.contents import GARBAGE, HALF_BYTES, Arena
from tiering.testing.simulation.injection import Injector
from tiering.testing.simulation.medium import Medium, Stored, seal_of
from tiering.types import BlockKey, Outcome

Kind: TypeAlias = Literal["probe", "promote", "demote", "delete"]


@dataclass(slots=True, eq=False)
class Call:
    command: IoCommand
    kind: Kind
    due_s: float
    arena: Arena
    heads: list[bytes] = field(default_factory=list)
    """Of a store: the first halves, read when it started."""
    epoch: str = ""
    generation: int = 0
    """The breaker's, when it started."""
    stubborn: bool = False
    """Runs on when it is told to stop."""
    overdue: bool = False
    judged: bool = False
    lost: bool = False
    """Its tier was abandoned: nothing is reported."""
    verdict: Outcome | None = None
    """It was told to stop, and ends with this."""
    alarm: Timer | None = None
    landing: Timer | None = None

    @staticmethod
    def of(command: IoCommand, arena: Arena, due_s: float) -> Call:
        kinds: dict[type, Kind] = {Probe: "probe", Promote: "promote", Demote: "demote", Delete: "delete"}
        return Call(command, kinds[type(command)], due_s, arena)

    @property
    def op(self) -> int:
        return self.command.op

    @property
    def size(self) -> int:
        return len(self.command.items) if isinstance(self.command, Promote | Demote) else len(self.command.keys)

    def start(self, medium: Medium, epoch: str, inject: Injector) -> None:
        """The backend has the slots: it reads half of what it stores, or scribbles over what it fills."""
        self.epoch = epoch
        command = self.command
        if isinstance(command, Promote):
            for item in command.items:
                if inject.dice.random() < 0.5:
                    self.arena.write((item.pool, item.slot), GARBAGE)
        elif isinstance(command, Demote):
            for item in command.items:
                self.heads.append(self.arena.read((item.pool, item.slot))[:HALF_BYTES])
                medium.start_store((epoch, item.key), self._stored_bytes(medium, item.pool))

    def land(self, medium: Medium, epoch: str, now_s: float, inject: Injector, *, failed: bool) -> tuple[Outcome, ...]:
        """Do it, and let go of the slots. ``failed``: the call as a whole, before it did anything."""
        command = self.command
        verdict = self.verdict or (Outcome.failed("injected: whole call") if failed else None)
        if isinstance(command, Probe):
            return tuple(verdict or medium.contains((epoch, key)) for key in command.keys)
        if isinstance(command, Delete):
            return tuple(verdict or medium.delete(epoch, key, now_s) for key in command.keys)
        if isinstance(command, Promote):
            return tuple(self._load(medium, epoch, item.key, (item.pool, item.slot), verdict) for item in command.items)
        outcomes = []
        for key, block in self._blocks(medium, now_s):
            medium.end_store((epoch, key), block.stored_bytes)
            outcomes.append(verdict or medium.store((epoch, key), block))
        return tuple(outcomes)

    def _load(
        self, medium: Medium, epoch: str, key: BlockKey, place: tuple[int, int], verdict: Outcome | None
    ) -> Outcome:
        if verdict is not None:
            return verdict
        outcome, payload = medium.load((epoch, key))
        self.arena.write(place, payload)
        return outcome

    def _blocks(self, medium: Medium, now_s: float) -> list[tuple[BlockKey, Stored]]:
        """What a store hands over: the halves read at the start, and those read now, under one seal."""
        command = self.command
        assert isinstance(command, Demote)
        blocks = []
        for item, head in zip(command.items, self.heads, strict=True):
            payload = head + self.arena.read((item.pool, item.slot))[HALF_BYTES:]
            seal = seal_of((self.epoch, item.key), payload)
            parent = command.parents.get(item.key)
            blocks.append((item.key, Stored(payload, seal, self._stored_bytes(medium, item.pool), parent, now_s)))
        return blocks

    def cut_short(self, medium: Medium, epoch: str, now_s: float) -> None:
        """The process died while it ran."""
        if isinstance(self.command, Demote):
            for key, block in self._blocks(medium, now_s):
                medium.cut_short((epoch, key), block)

    def _stored_bytes(self, medium: Medium, pool: int) -> int:
        return medium.spec.capabilities.stored_bytes(self.arena.payload_bytes[pool])
