"""The synchronous face: for an engine's scheduler, which may never wait. Only ``open``, ``reset`` and ``close`` block."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from tiering import flows
from tiering.build import Parts
from tiering.core import events as ev
from tiering.core.lookup import EachResult, LookupResult
from tiering.errors import ShapeError
from tiering.runtime.gate import KEYS_PER_HOLD_MAX, STORE_KEYS_PER_HOLD_MAX, check_keys
from tiering.types import BlockKey, Outcome, PrefixMatch

if TYPE_CHECKING:
    from tiering.manager import TieringOffloadingManager


RESET_DEADLINE_S = 10.0


class SyncFace:
    """``manager.sync``. Any thread may call; each call takes the gate's lock for a moment and returns.

    A caller moves the bytes itself, between the GPU and the slots that a plan names (``slot_view``): it must report a
    store with ``complete`` and end each load with ``release``. These two work during and after a close as well, which
    waits for them, at most until its deadline; the others then raise ``ClosedError``. A bad group, key or outcome is a
    ``ShapeError``, and nothing has changed.
    """

    def __init__(self, manager: TieringOffloadingManager) -> None:
        self._manager = manager
        self._open_loads: dict[int, None] = {}
        """Load jobs whose end ``poll`` has not told."""

    def open(self) -> None:
        """Open the manager; blocks. Raises ``RuntimeError`` in a thread whose event loop is running: await ``open`` there."""
        _run_here(self._manager.open, "open")

    def reset(self, epoch: str, *, deadline_s: float = RESET_DEADLINE_S) -> None:
        """The weights changed; blocks, as ``open`` does. See the manager's ``reset``."""
        _run_here(functools.partial(self._manager.reset, epoch, deadline_s=deadline_s), "reset")

    def close(self) -> list[str]:
        """Close the manager; blocks. Names of tiers given up as hung. Idempotent, also together with ``aclose``."""
        closing = self._manager.begin_close()
        self._manager.end_close()
        return closing.result()

    def lookup(self, keys: Sequence[BlockKey], *, group: int = 0) -> PrefixMatch | None:
        """The longest run that some tier has; None: a tier has been asked, ask again. Takes no slot, loads nothing."""
        result = self.look(keys, group=group)
        return None if result.pending else result.match

    def look(self, keys: Sequence[BlockKey], *, group: int = 0) -> LookupResult:
        """As ``lookup``, but with what is known so far where answers or fills are still on their way (``pending``)."""
        parts = self._parts(group)
        result = parts.gate.lookup(group, keys, parts.clock.now())
        if result.pending:
            flows.ask(parts, group, result.undecided)
        return result

    def plan_store(
        self, keys: Sequence[BlockKey], *, parent: BlockKey | None = None, group: int = 0, patient: bool = False
    ) -> ev.StorePlan:
        """Slots for the longest head of ``keys`` that fits now. Fill them, then ``complete(plan.job, outcomes)``.

        Looks at no more than 512 keys a call; ``plan.stop`` tells where it stopped: call again from there. ``patient``: the
        caller will, later, so blocks that a tier has not taken yet are not evicted for it.
        """
        parts = self._parts(group)
        head = _head(keys, STORE_KEYS_PER_HOLD_MAX)
        if parent is not None:
            check_keys((parent,), "parent")
        plan = parts.gate.handle(ev.StoreRequested(parts.clock.now(), group, head, parent, patient))
        assert isinstance(plan, ev.StorePlan)
        return plan

    def plan_load(self, keys: Sequence[BlockKey], *, group: int = 0) -> ev.LoadPlan:
        """Lease the leading run and start promotions for what is not in the primary tier.

        ``plan.done``: ``plan.slots`` is all. Otherwise ``poll`` tells when it ends. Always ``release(plan.job)``. Looks
        at no more than 2,048 keys a call.
        """
        parts = self._parts(group)
        plan = parts.gate.handle(ev.LoadRequested(parts.clock.now(), group, _head(keys, KEYS_PER_HOLD_MAX)))
        assert isinstance(plan, ev.LoadPlan)
        if not plan.done:
            self._open_loads[plan.job] = None
        return plan

    def lookup_each(self, keys: Sequence[BlockKey], *, group: int = 0) -> EachResult:
        """Where each key is, not only those of the leading run; at most 2,048 keys. Tiers that do not know are asked.

        ``awaited`` positions may turn into hits: ask again.
        """
        parts = self._parts(group)
        result = parts.gate.lookup_each(group, _head(keys, KEYS_PER_HOLD_MAX), parts.clock.now())
        flows.ask(parts, group, result.undecided)
        return result

    def lease(self, keys: Sequence[BlockKey], *, group: int = 0) -> ev.LoadPlan:
        """Lease the leading READY run, at most 2,048 keys, so that it stays until ``release(plan.job)``. Starts no I/O."""
        parts = self._parts(group)
        plan = parts.gate.handle(ev.LeaseRequested(parts.clock.now(), group, _head(keys, KEYS_PER_HOLD_MAX)))
        assert isinstance(plan, ev.LoadPlan)
        return plan

    def end_load(self, job: int) -> None:
        """Wait no longer: an unfinished load job ends with the leading run that is ready now; ``poll`` tells it."""
        parts = self._manager.organs
        parts.gate.handle(ev.LoadOverdue(parts.clock.now(), job))

    def hold(self, keys: Sequence[BlockKey], *, group: int = 0) -> int:
        """ "The engine holds these blocks": what the primary tier lacks of them is due for ``plan_restores``.

        At most 2,048 keys; ``extend_hold`` adds more. Returns the hold's number, 0 if nothing is granted any more.
        ``drop_hold`` ends it, and so does a reset.
        """
        parts = self._parts(group)
        event = ev.HoldRequested(parts.clock.now(), group, _head(keys, KEYS_PER_HOLD_MAX), stepped=True)
        hold = parts.gate.handle(event)
        assert isinstance(hold, int)
        return hold

    def extend_hold(self, hold: int, keys: Sequence[BlockKey]) -> None:
        """The run that is held goes on with ``keys``."""
        parts = self._parts(0)
        check_keys(keys, "keys")
        for start in range(0, len(keys), KEYS_PER_HOLD_MAX):
            part = tuple(keys[start : start + KEYS_PER_HOLD_MAX])
            parts.gate.handle(ev.HoldExtended(parts.clock.now(), hold, part))

    def trim_hold(self, hold: int, below: int) -> None:
        """The first ``below`` blocks of the run left the engine's sliding window."""
        parts = self._manager.organs
        parts.gate.handle(ev.HoldTrimmed(parts.clock.now(), hold, below))

    def drop_hold(self, hold: int) -> None:
        """The engine holds the run no more."""
        parts = self._manager.organs
        parts.gate.handle(ev.HoldReleased(parts.clock.now(), hold))

    def plan_restores(self, holds: Sequence[int] | None, *, bytes_max: int, ranked: bool = True) -> ev.RestorePlan:
        """Slots for what is due in these holds, or (None) in all: fill them, then ``complete`` each plan's job.

        Ranked over all of them by the tokens that each block would regain, and never at the cost of a block worth as much;
        not ``ranked``: in the holds' order, evicting as a store would. Empty where ``restore`` is off.
        """
        parts = self._parts(0)
        plan = parts.gate.handle(
            ev.RestoreStep(parts.clock.now(), None if holds is None else tuple(holds), bytes_max, ranked)
        )
        assert isinstance(plan, ev.RestorePlan)
        return plan

    def free_slots(self, *, group: int = 0) -> int:
        """Slots of the group that hold nothing; the next store takes them without evicting."""
        return self._parts(group).gate.free_slots(group)

    def slots_for_loads(self, *, group: int = 0) -> int:
        """Slots of the group that one load can fill at most: all but the reserve for stores."""
        spec = self._parts(group).core.world.pools[group].spec
        return spec.slots - spec.reserve_slots

    def complete(self, job: int, outcomes: Sequence[Outcome]) -> None:
        """Report a store job: one outcome a grant, in the plan's order. Unknown jobs are counted and ignored."""
        parts = self._manager.organs
        for index, outcome in enumerate(outcomes):
            if not isinstance(outcome, Outcome):
                raise ShapeError(f"outcomes[{index}]: expected an Outcome; got {type(outcome).__name__}")
        parts.gate.handle(ev.StoreFinished(parts.clock.now(), job, tuple(outcomes)))

    def poll(self) -> list[tuple[int, tuple[int, ...]]]:
        """Load jobs that ended since the last call: (job, slots of its leading blocks)."""
        ended = self._manager.organs.gate.ended(list(self._open_loads)) if self._open_loads else []
        # Told once, whoever polls, and not after a release.
        return [(job, slots) for job, slots in ended if self._open_loads.pop(job, self) is None]

    def release(self, job: int) -> None:
        """The caller reads the job's slots no more, or gives it up at whatever state; queued reads are dropped."""
        parts = self._manager.organs
        self._open_loads.pop(job, None)
        parts.gate.handle(ev.Released(parts.clock.now(), job))

    def touch(self, keys: Sequence[BlockKey], *, group: int = 0) -> None:
        """A request used this path, also where the GPU served it."""
        parts = self._parts(group)
        check_keys(keys, "keys")
        for start in range(0, len(keys), KEYS_PER_HOLD_MAX):
            part = tuple(keys[start : start + KEYS_PER_HOLD_MAX])
            parts.gate.handle(ev.Touched(parts.clock.now(), group, part))

    def slot_view(self, slot: int, *, group: int = 0) -> memoryview:
        """The block's bytes in a slot of a plan: writable, flat, valid until ``complete`` or ``release``."""
        parts = self._manager.organs
        _check_group(parts, group)
        return parts.arena.view(group, slot, parts.layout.groups[group].block_bytes)

    def _parts(self, group: int) -> Parts:
        parts = self._manager.parts
        _check_group(parts, group)
        return parts


def _run_here(call: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(call())
    else:
        raise RuntimeError(f"sync.{name} would block the running event loop; use `await manager.{name}(...)`")


def _check_group(parts: Parts, group: int) -> None:
    if not 0 <= group < len(parts.layout.groups):
        raise ShapeError(f"group is {group}; the layout has groups 0..{len(parts.layout.groups) - 1}")


def _head(keys: Sequence[BlockKey], keys_max: int) -> tuple[BlockKey, ...]:
    head = tuple(keys[:keys_max])
    check_keys(head, "keys")
    return head
