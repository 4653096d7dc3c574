"""Blocks between tiers and a caller that may wait but has no event loop: what a script's thread does step by step.

The manager's asynchronous calls need a loop, and a notebook's own is taken. Its synchronous face never waits. Here is
what lies between: each call waits, at most until its deadline, and whatever is raised in it (also by Ctrl-C) leaves no
lease behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tiering import flows
from tiering.build import Parts
from tiering.core import events as ev
from tiering.manager import TieringOffloadingManager
from tiering.runtime.gate import KEYS_PER_HOLD_MAX, STORE_KEYS_PER_HOLD_MAX
from tiering.types import BlockKey, Outcome, PrefixMatch

PAUSE_S = 0.0005
"""Between two looks at something that is awaited: short beside the read of a block."""

Copy: TypeAlias = Callable[[int, memoryview], None]
"""Copies one block: its position among the keys, and its bytes in a slot, valid during the call only."""


class BlockIO:
    """Calls of one manager, while it is open. Any thread."""

    def __init__(self, manager: TieringOffloadingManager) -> None:
        """Raises ``ClosedError`` unless the manager is open."""
        self._parts: Parts = manager.parts
        self._sync = manager.sync
        [pool] = self._parts.gate.snapshot()["pools"]
        self._window = min(pool["slots"] - pool["reserve_slots"], KEYS_PER_HOLD_MAX)  # the reserve is less than all

    @property
    def epoch(self) -> int:
        """Grows with each reset."""
        return self._parts.gate.epoch

    def match(self, keys: Sequence[BlockKey], deadline_s: float) -> PrefixMatch:
        """The longest run that some tier has. Asks tiers that do not know, and waits for them until ``deadline_s`` from now."""
        gate, clock = self._parts.gate, self._parts.clock
        until_s = clock.now() + deadline_s
        while True:
            result = gate.lookup(0, keys, clock.now())
            if not result.pending or gate.closed or clock.now() >= until_s:
                return result.match
            flows.ask(self._parts, 0, result.undecided)
            time.sleep(PAUSE_S)

    def known(self, keys: Sequence[BlockKey]) -> int:
        """Blocks of the longest run that some tier is known to have. Asks nobody."""
        return self._parts.gate.lookup(0, keys, self._parts.clock.now()).match.blocks

    def load(self, keys: Sequence[BlockKey], take: Copy, deadline_s: float) -> int:
        """Give ``take`` the leading blocks that can be had in time, in order; how many.

        A run longer than the primary tier passes through it piece by piece: each is released before the next is asked for.
        """
        until_s = self._parts.clock.now() + deadline_s
        done = 0
        while done < len(keys):
            plan = self._sync.plan_load(keys[done : done + self._window])
            try:
                slots = plan.slots if plan.done else self._slots_of(plan.job, until_s)
                for slot in slots:
                    take(done, self._sync.slot_view(slot))
                    done += 1
            finally:
                if plan.job:
                    self._sync.release(plan.job)
            if not slots:
                break
        return done

    def _slots_of(self, job: int, until_s: float) -> tuple[int, ...]:
        """The slots of a load job once it is done, or of what is ready at the deadline."""
        gate, clock = self._parts.gate, self._parts.clock
        # Not sync.poll: it tells each end once, and the user of the same manager may ask it too.
        while not (ended := gate.ended((job,))):
            if clock.now() >= until_s:
                gate.handle(ev.LoadOverdue(clock.now(), job))
                return gate.job_slots(job)
            time.sleep(PAUSE_S)
        return ended[0][1]

    def store(
        self, keys: Sequence[BlockKey], fill: Copy, *, parent: BlockKey | None, deadline_s: float, epoch: int
    ) -> tuple[list[Outcome], int]:
        """Have ``fill`` copy the blocks that the primary tier lacks into their slots; an outcome a key, and how many copied.

        Waits for demotions that make room until ``deadline_s`` from now; what finds none is refused, from the end.
        ``epoch`` is that of the weights which the blocks were computed with: after a reset nothing is stored.
        """
        gate, clock = self._parts.gate, self._parts.clock
        until_s = clock.now() + deadline_s
        outcomes: list[Outcome] = []
        stored = 0
        while (start := len(outcomes)) < len(keys):
            if gate.epoch != epoch:
                return outcomes + [flows.RESET] * (len(keys) - start), stored
            chunk = tuple(keys[start : start + STORE_KEYS_PER_HOLD_MAX])
            before = keys[start - 1] if start else parent
            # Not sync.plan_store: an engine's scheduler cannot wait, so for it blocks go that are still owed to a tier.
            plan = gate.handle(ev.StoreRequested(clock.now(), 0, chunk, before, patient=True))
            assert isinstance(plan, ev.StorePlan)
            outcomes += [Outcome.OK] * plan.stop
            stored += self._fill(plan, start, fill)
            if plan.stop < len(chunk):
                if not plan.retry or not self._parts.io.alive or clock.now() >= until_s:
                    outcomes += [Outcome.refused(plan.refused)] * (len(keys) - len(outcomes))
                else:
                    time.sleep(PAUSE_S)
        return outcomes, stored

    def _fill(self, plan: ev.StorePlan, start: int, fill: Copy) -> int:
        """Fill what was granted; the core is told whatever happens."""
        if not plan.job:
            return 0
        outcomes = [Outcome.CANCELLED] * len(plan.grants)
        try:
            for index, grant in enumerate(plan.grants):
                fill(start + grant.index, self._sync.slot_view(grant.slot))
                outcomes[index] = Outcome.OK
        finally:
            self._sync.complete(plan.job, outcomes)
        return len(outcomes)
