"""The synchronous face: for an engine's scheduler, which may never wait. Only ``open`` and ``close`` block."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tiering.core import events as ev
from tiering.runtime.gate import KEYS_PER_HOLD_MAX
from tiering.types import BlockKey, Outcome, PrefixMatch

if TYPE_CHECKING:
    from tiering.manager import TieringOffloadingManager


class SyncFace:
    """``manager.sync``. Any thread may call; each call takes the gate's lock for a moment and returns.

    A caller moves the bytes itself, between the GPU and the slots that a plan names (``slot_view``): it must report a
    store with ``complete`` and end each load with ``release``.
    """

    def __init__(self, manager: TieringOffloadingManager) -> None:
        self._manager = manager
        self._open_loads: dict[int, int] = {}

    def open(self) -> None:
        """Open the manager; blocks. Must not be called from a running event loop."""
        asyncio.run(self._manager.open())

    def close(self) -> list[str]:
        """Close the manager; blocks. Names of tiers given up as hung."""
        return asyncio.run(self._manager.aclose())

    def lookup(self, keys: Sequence[BlockKey], *, group: int = 0) -> PrefixMatch | None:
        """The longest run that some tier has; None: a tier has been asked, ask again. Takes no slot, loads nothing."""
        parts = self._manager.parts
        now_s = self._manager.parts.clock.now()
        result = parts.gate.lookup(group, keys, now_s)
        if not result.pending:
            return result.match
        if result.undecided:
            parts.gate.handle(ev.ProbeRequested(now_s, group, result.undecided))
        return None

    def plan_store(self, keys: Sequence[BlockKey], *, parent: BlockKey | None = None, group: int = 0) -> ev.StorePlan:
        """Slots for the longest head of ``keys`` that fits now. Fill them, then ``complete(plan.job, outcomes)``.

        Looks at no more than 2,048 keys a call; ``plan.stop`` tells where it stopped: call again from there.
        """
        parts = self._manager.parts
        plan = parts.gate.handle(ev.StoreRequested(parts.clock.now(), group, tuple(keys[:KEYS_PER_HOLD_MAX]), parent))
        assert isinstance(plan, ev.StorePlan)
        return plan

    def plan_load(self, keys: Sequence[BlockKey], *, group: int = 0) -> ev.LoadPlan:
        """Lease the leading run and start promotions for what is not in the primary tier.

        ``plan.done``: ``plan.slots`` is all. Otherwise ``poll`` tells when it ends. Always ``release(plan.job)``. Looks
        at no more than 2,048 keys a call.
        """
        parts = self._manager.parts
        plan = parts.gate.handle(ev.LoadRequested(parts.clock.now(), group, tuple(keys[:KEYS_PER_HOLD_MAX])))
        assert isinstance(plan, ev.LoadPlan)
        if not plan.done:
            self._open_loads[plan.job] = group
        return plan

    def complete(self, job: int, outcomes: Sequence[Outcome]) -> None:
        """Report a store job: one outcome a grant, in the plan's order. Unknown jobs are counted and ignored."""
        parts = self._manager.parts
        parts.gate.handle(ev.StoreFinished(parts.clock.now(), job, tuple(outcomes)))

    def poll(self) -> list[tuple[int, tuple[int, ...]]]:
        """Load jobs that ended since the last call: (job, slots of its leading blocks)."""
        parts = self._manager.parts
        ended = []
        for job in list(self._open_loads):
            if parts.mailbox.take(job) is not None:
                del self._open_loads[job]
                ended.append((job, parts.gate.job_slots(job)))
        return ended

    def release(self, job: int) -> None:
        """The caller reads the job's slots no more, or gives it up at whatever state; queued reads are dropped."""
        parts = self._manager.parts
        self._open_loads.pop(job, None)
        parts.gate.handle(ev.Released(parts.clock.now(), job))
        parts.mailbox.forget(job)

    def touch(self, keys: Sequence[BlockKey], *, group: int = 0) -> None:
        """A request used this path, also where the GPU served it."""
        parts = self._manager.parts
        parts.gate.handle(ev.Touched(parts.clock.now(), group, tuple(keys)))

    def slot_view(self, slot: int, *, group: int = 0) -> memoryview:
        """The block's bytes in a slot of a plan: writable, flat, valid until ``complete`` or ``release``."""
        parts = self._manager.parts
        return parts.arena.view(group, slot, parts.layout.groups[group].block_bytes)
