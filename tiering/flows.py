"""The async pipelines of one contiguous run: store, match, load, hold; and flush and close. The manager adds groups.

``epoch`` is the gate's as the call began. A reset in between ends the call: bytes of the old weights are neither
stored under the new epoch nor given out as its.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import numpy as np
import numpy.typing as npt

from tiering.build import Parts
from tiering.core import events as ev
from tiering.core.commands import FlushDone
from tiering.errors import TieringError
from tiering.runtime.gate import KEYS_PER_HOLD_MAX, STORE_KEYS_PER_HOLD_MAX
from tiering.runtime.waiting import Pulse, outlast, wait_until
from tiering.support.blocking import run_blocking
from tiering.types import BlockKey, FlushReport, Outcome, PrefixMatch

Rows = npt.NDArray[np.uint8]

RESET = Outcome.refused("the weights changed (reset) while the call was under way")
NO_EPOCH = -1
"""The epoch of a call that is to get and store nothing."""
LAST_WORDS_S = 1.0
"""What calls under way get to end in after the tiers are closed, if that took all the time there was."""


# -- store ------------------------------------------------------------------------------------------------------------


async def store_run(
    parts: Parts,
    pool: int,
    keys: tuple[BlockKey, ...],
    rows: Rows,
    parent: BlockKey | None,
    deadline_s: float,
    epoch: int,
) -> tuple[list[Outcome], int]:
    """Copy the run's missing blocks into the primary tier, as slots come free; one outcome a key, and how many copied.

    Waits while demotions under way will make room, at most until ``deadline_s`` (a time of the clock). Returns, or
    raises on cancellation, only when nothing reads ``rows`` any more.
    """
    outcomes: list[Outcome] = []
    stored = 0
    while len(outcomes) < len(keys):
        if parts.gate.epoch != epoch:
            return [RESET] * len(keys), 0
        start = len(outcomes)
        chunk = keys[start : start + STORE_KEYS_PER_HOLD_MAX]
        seen = parts.freed.beats
        request = ev.StoreRequested(parts.clock.now(), pool, chunk, keys[start - 1] if start else parent, patient=True)
        plan = parts.gate.handle(request)
        assert isinstance(plan, ev.StorePlan)
        part = [Outcome.OK] * plan.stop
        if plan.job:
            for grant, outcome in zip(plan.grants, await _fill(parts, pool, plan, rows[start:], epoch), strict=True):
                part[grant.index] = outcome
                stored += outcome.ok
        outcomes += part
        if plan.stop == len(chunk):
            continue
        # Without the I/O thread what is in flight will never free anything.
        waits = plan.retry and parts.io.alive
        if not waits or not await parts.freed.beyond(seen, parts.clock, deadline_s):
            outcomes += [Outcome.refused(plan.refused)] * (len(keys) - len(outcomes))
    return (outcomes, stored) if parts.gate.epoch == epoch else ([RESET] * len(keys), 0)


async def _fill(parts: Parts, pool: int, plan: ev.StorePlan, rows: Rows, epoch: int) -> tuple[Outcome, ...]:
    """Copy the granted rows into their slots on a thread and tell the core; whatever happens, the core is told."""
    result = (Outcome.CANCELLED,) * len(plan.grants)
    try:
        # Slots that were granted before a reset are doomed by it; those granted after it must not get the old bytes.
        if parts.gate.epoch == epoch:
            await run_blocking(_copy_in, parts, pool, plan.grants, rows, executor=parts.copies)
            result = (Outcome.OK,) * len(plan.grants)
    except TieringError as error:
        result = (Outcome.failed(str(error)),) * len(plan.grants)
    finally:
        parts.gate.handle(ev.StoreFinished(parts.clock.now(), plan.job, result))
    return result


def _copy_in(parts: Parts, pool: int, grants: Sequence[ev.Grant], rows: Rows) -> None:
    """One call a batch; rows that lie side by side go as one slice, without gathering them first."""
    first = 0
    for last in range(1, len(grants) + 1):
        if last < len(grants) and grants[last].index == grants[last - 1].index + 1:
            continue
        run = grants[first:last]
        parts.arena.fill(pool, [g.slot for g in run], rows[run[0].index : run[-1].index + 1])
        first = last


# -- match and load ---------------------------------------------------------------------------------------------------


async def match_run(parts: Parts, pool: int, keys: tuple[BlockKey, ...], deadline_s: float) -> PrefixMatch:
    """Look, ask the tiers that do not know, and look again until all is known or ``deadline_s`` comes."""
    while True:
        seen = parts.progress.beats
        result = parts.gate.lookup(pool, keys, parts.clock.now())
        if not result.pending or parts.gate.closed:
            return result.match
        ask(parts, pool, result.undecided)
        if not await parts.progress.beyond(seen, parts.clock, deadline_s):
            return result.match


def ask(parts: Parts, pool: int, undecided: Sequence[BlockKey]) -> None:
    """Have the tiers asked about these keys."""
    for start in range(0, len(undecided), KEYS_PER_HOLD_MAX):
        part = tuple(undecided[start : start + KEYS_PER_HOLD_MAX])
        parts.gate.handle(ev.ProbeRequested(parts.clock.now(), pool, part))


@contextlib.asynccontextmanager
async def leased_run(
    parts: Parts, pool: int, keys: tuple[BlockKey, ...], deadline_s: float, epoch: int
) -> AsyncIterator[tuple[int, ...]]:
    """The slots of the longest leading run that can be had, leased for the block's length.

    On cancellation reads that are still queued are dropped; slots whose bytes are in motion stay taken until these landed.
    They are of ``epoch``, or none.
    """
    jobs: list[int] = []
    slots: tuple[int, ...] = ()
    if parts.gate.epoch == epoch:
        await match_run(parts, pool, keys, deadline_s)
    try:
        for start in range(0, len(keys), KEYS_PER_HOLD_MAX):
            if parts.gate.epoch != epoch:
                break
            chunk = keys[start : start + KEYS_PER_HOLD_MAX]
            with parts.loads.asking():
                plan = parts.gate.handle(ev.LoadRequested(parts.clock.now(), pool, chunk))
                assert isinstance(plan, ev.LoadPlan)
                if plan.job:
                    jobs.append(plan.job)
                ended = None if plan.done else parts.loads.expect(plan.job)
            part = plan.slots if ended is None else await _end_of(parts, plan.job, ended, deadline_s)
            slots += part
            if len(part) < len(chunk):
                break
        yield slots if parts.gate.epoch == epoch else ()
    finally:
        for job in jobs:
            parts.gate.handle(ev.Released(parts.clock.now(), job))
            parts.loads.forget(job)


async def _end_of(parts: Parts, job: int, ended: asyncio.Future[object], deadline_s: float) -> tuple[int, ...]:
    """The slots of a load job once it is done, or of what is ready at the deadline."""
    if not await wait_until(parts.clock, ended, deadline_s):
        parts.gate.handle(ev.LoadOverdue(parts.clock.now(), job))
    return parts.gate.job_slots(job)


async def load_run(
    parts: Parts, pool: int, keys: tuple[BlockKey, ...], out: Rows, deadline_s: float, epoch: int
) -> int:
    """Fill ``out[:n]`` with the longest leading run that can be had; n. Nothing beyond ``out[:n]`` is written."""
    async with leased_run(parts, pool, keys, deadline_s, epoch) as slots:
        # First counted, then looked: a reset either sees this copy and waits for it, or is seen here.
        with parts.reads.one():
            if not slots or parts.gate.epoch != epoch:
                return 0
            await run_blocking(parts.arena.take, pool, slots, out[: len(slots)], executor=parts.copies)
        return len(slots)


async def trim(parts: Parts, deadline_s: float) -> None:
    """Wait until no tier that works holds more than its budget: after an open with a capacity that was lowered."""
    while not (parts.gate.fused or parts.gate.closed):
        seen = parts.progress.beats
        tiers = [tier for tier in parts.gate.snapshot()["tiers"].values() if tier["state"] == "up"]
        over = any(tier["room_bytes"] is not None and tier["used_bytes"] > tier["room_bytes"] for tier in tiers)
        if not over or not await parts.progress.beyond(seen, parts.clock, deadline_s):
            return


# -- hold -------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def held_run(parts: Parts, pool: int, keys: tuple[BlockKey, ...], rows: Rows, epoch: int) -> AsyncIterator[None]:
    """While the block runs, blocks of the run that the primary tier lacks are copied again from ``rows``.

    An error of the copying is raised at the block's end; if the block raised itself it is noted there.
    """
    if not parts.config.restore.enabled or parts.gate.epoch != epoch:
        yield
        return
    hold = parts.gate.handle(ev.HoldRequested(parts.clock.now(), pool, keys))
    assert isinstance(hold, int)
    if not hold:  # nothing is granted any more
        yield
        return
    due = parts.restore_due[hold] = Pulse()
    task = asyncio.create_task(_restore(parts, pool, hold, rows, due, epoch), name=f"kvtiering-restore-{hold}")
    try:
        yield
    except BaseException as error:
        if (own := await _let_go(parts, hold, task)) is not None:
            error.add_note(f"and the blocks that were held could not be copied again: {own!r}")
        raise
    if (own := await _let_go(parts, hold, task)) is not None:
        raise own


async def _let_go(parts: Parts, hold: int, task: asyncio.Task[None]) -> BaseException | None:
    """End the hold; the error that its task died of. On return, or cancellation, nothing reads the held rows any more."""
    del parts.restore_due[hold]
    parts.gate.handle(ev.HoldReleased(parts.clock.now(), hold))
    task.cancel()
    await outlast(task)
    return None if task.cancelled() else task.exception()


async def _restore(parts: Parts, pool: int, hold: int, rows: Rows, due: Pulse, epoch: int) -> None:
    """Copy again what falls due. What found no room is tried again, when the core says so and every now and then."""
    clock, pause_s = parts.clock, parts.core.world.spec.restore_pause_s
    budget = max(parts.config.restore.bytes_per_step_max, parts.layout.groups[pool].block_bytes)
    # At once for the first time: what fell due before there was somebody to tell.
    while parts.gate.epoch == epoch:
        seen = due.beats
        plan = parts.gate.handle(ev.RestoreRequested(clock.now(), hold, budget))
        assert isinstance(plan, ev.StorePlan)
        if plan.job:
            with parts.calls.one():
                await _fill(parts, pool, plan, rows, epoch)
        await (due.beyond(seen, clock, clock.now() + pause_s) if plan.retry else due.beyond(seen, clock))


# -- flush and close --------------------------------------------------------------------------------------------------


async def flush(parts: Parts, deadline_s: float) -> FlushReport:
    """Offer everything owed and wait for the answers, at most until ``deadline_s``."""
    with parts.flushes.asking():
        job = parts.gate.handle(ev.FlushRequested(parts.clock.now()))
        assert isinstance(job, int)
        ended = parts.flushes.expect(job)
    try:
        if job and not await wait_until(parts.clock, ended, deadline_s):
            parts.gate.handle(ev.FlushOverdue(parts.clock.now(), job))
        done = await ended if job else None
    except asyncio.CancelledError:
        parts.gate.handle(ev.FlushOverdue(parts.clock.now(), job))
        raise
    finally:
        parts.flushes.forget(job)
    if not isinstance(done, FlushDone):  # the fuse went
        return FlushReport(0, 0, {})
    return FlushReport(done.acknowledged, sum(done.lost_by_tier.values()), done.lost_by_tier)


def stop_admitting(parts: Parts) -> None:
    """Grant nothing more, and let go who waits: they return with what they have."""
    parts.gate.shut("the manager is closed")
    parts.gate.end_loads(parts.clock.now())
    parts.freed.beat()
    parts.progress.beat()


async def wind_down(parts: Parts, deadline_s: float, flush_s: float) -> list[str]:
    """After ``stop_admitting``: flush for ``flush_s``, close the tiers; names of those given up as hung.

    Runs on the I/O loop. Then waits for whoever copies to or from slots, as far as ``deadline_s`` goes.
    """
    clock, gate = parts.clock, parts.gate
    if flush_s > 0:
        await flush(parts, clock.now() + flush_s)
    until_s = clock.now() + deadline_s
    hung = await parts.driver.aclose(deadline_s)
    gate.end_flushes(clock.now())
    await parts.calls.zero(clock, max(until_s, clock.now() + LAST_WORDS_S))
    while gate.busy_slots() and not gate.fused:  # after the fuse nothing is accounted any more
        seen = parts.progress.beats
        if gate.busy_slots() and not await parts.progress.beyond(seen, clock, until_s):
            break
    return hung
