"""The async pipelines of one contiguous run: store, match, load, hold. The manager adds lifecycle and groups."""

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
from tiering.runtime.gate import KEYS_PER_HOLD_MAX
from tiering.runtime.waiting import Pulse, wait_until
from tiering.support.blocking import run_blocking
from tiering.types import BlockKey, FlushReport, Outcome, PrefixMatch

Rows = npt.NDArray[np.uint8]


# -- store ------------------------------------------------------------------------------------------------------------


async def store_run(
    parts: Parts, pool: int, keys: tuple[BlockKey, ...], rows: Rows, parent: BlockKey | None, deadline_s: float
) -> tuple[list[Outcome], int]:
    """Copy the run's missing blocks into the primary tier, as slots come free; one outcome a key, and how many copied.

    Waits while demotions under way will make room, at most until ``deadline_s`` (a time of the clock). Returns, or
    raises on cancellation, only when nothing reads ``rows`` any more.
    """
    outcomes: list[Outcome] = []
    stored = 0
    while len(outcomes) < len(keys):
        start = len(outcomes)
        chunk = keys[start : start + KEYS_PER_HOLD_MAX]
        seen = parts.freed.beats
        request = ev.StoreRequested(parts.clock.now(), pool, chunk, keys[start - 1] if start else parent, patient=True)
        plan = parts.gate.handle(request)
        assert isinstance(plan, ev.StorePlan)
        part = [Outcome.OK] * plan.stop
        if plan.job:
            for grant, outcome in zip(plan.grants, await _fill(parts, pool, plan, rows[start:]), strict=True):
                part[grant.index] = outcome
                stored += outcome.ok
        outcomes += part
        if plan.stop == len(chunk):
            continue
        if not plan.retry or not await wait_until(parts.clock, parts.freed.after(seen), deadline_s):
            outcomes += [Outcome.refused(plan.refused)] * (len(keys) - len(outcomes))
    return outcomes, stored


async def _fill(parts: Parts, pool: int, plan: ev.StorePlan, rows: Rows) -> tuple[Outcome, ...]:
    """Copy the granted rows into their slots on a thread and tell the core; whatever happens, the core is told."""
    result = (Outcome.CANCELLED,) * len(plan.grants)
    try:
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
        if not result.pending:
            return result.match
        for start in range(0, len(result.undecided), KEYS_PER_HOLD_MAX):
            part = result.undecided[start : start + KEYS_PER_HOLD_MAX]
            parts.gate.handle(ev.ProbeRequested(parts.clock.now(), pool, part))
        if not await wait_until(parts.clock, parts.progress.after(seen), deadline_s):
            return result.match


@contextlib.asynccontextmanager
async def leased_run(
    parts: Parts, pool: int, keys: tuple[BlockKey, ...], deadline_s: float
) -> AsyncIterator[tuple[int, ...]]:
    """The slots of the longest leading run that can be had, leased for the block's length.

    On cancellation reads that are still queued are dropped; slots whose bytes are in motion stay taken until these landed.
    """
    await match_run(parts, pool, keys, deadline_s)
    jobs: list[int] = []
    slots: tuple[int, ...] = ()
    try:
        for start in range(0, len(keys), KEYS_PER_HOLD_MAX):
            chunk = keys[start : start + KEYS_PER_HOLD_MAX]
            plan = parts.gate.handle(ev.LoadRequested(parts.clock.now(), pool, chunk))
            assert isinstance(plan, ev.LoadPlan)
            if plan.job:
                jobs.append(plan.job)
            part = plan.slots if plan.done else await _end_of(parts, plan.job, deadline_s)
            slots += part
            if len(part) < len(chunk):
                break
        yield slots
    finally:
        for job in jobs:
            parts.gate.handle(ev.Released(parts.clock.now(), job))
            parts.mailbox.forget(job)


async def _end_of(parts: Parts, job: int, deadline_s: float) -> tuple[int, ...]:
    """The slots of a load job once it is done, or of what is ready at the deadline."""
    future = parts.mailbox.expect(job)
    if not await wait_until(parts.clock, future, deadline_s):
        parts.gate.handle(ev.LoadOverdue(parts.clock.now(), job))
        await future
    return parts.gate.job_slots(job)


async def load_run(parts: Parts, pool: int, keys: tuple[BlockKey, ...], out: Rows, deadline_s: float) -> int:
    """Fill ``out[:n]`` with the longest leading run that can be had; n. Nothing beyond ``out[:n]`` is written."""
    async with leased_run(parts, pool, keys, deadline_s) as slots:
        if slots:
            await run_blocking(parts.arena.take, pool, slots, out[: len(slots)], executor=parts.copies)
        return len(slots)


async def trim(parts: Parts, deadline_s: float) -> None:
    """Wait until no exclusive tier holds more than its budget: after an open with a capacity that was lowered."""
    while True:
        seen = parts.progress.beats
        tiers = parts.gate.snapshot()["tiers"].values()
        over = any(tier["room_bytes"] is not None and tier["used_bytes"] > tier["room_bytes"] for tier in tiers)
        if not over or not await wait_until(parts.clock, parts.progress.after(seen), deadline_s):
            return


# -- hold and flush ---------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def held_run(parts: Parts, pool: int, keys: tuple[BlockKey, ...], rows: Rows) -> AsyncIterator[None]:
    """While the block runs, blocks of the run that the primary tier lacks are copied again from ``rows``."""
    hold = parts.gate.handle(ev.HoldRequested(parts.clock.now(), pool, keys))
    assert isinstance(hold, int)
    due = parts.restore_due.setdefault(hold, Pulse())
    task = asyncio.create_task(_restore(parts, pool, hold, rows, due), name=f"kvtiering-restore-{hold}")
    try:
        yield
    finally:
        parts.gate.handle(ev.HoldReleased(parts.clock.now(), hold))
        task.cancel()
        await asyncio.wait({task})
        parts.restore_due.pop(hold, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


async def _restore(parts: Parts, pool: int, hold: int, rows: Rows, due: Pulse) -> None:
    """Copy again what falls due. What found no room is tried again, when the core says so and every now and then."""
    seen, pause_s = 0, parts.core.world.spec.restore_pause_s
    budget = max(parts.config.restore.bytes_per_step_max, parts.layout.groups[pool].block_bytes)
    more = False
    while True:
        pulse = due.after(seen)
        await (wait_until(parts.clock, pulse, parts.clock.now() + pause_s) if more else pulse)
        seen = due.beats
        plan = parts.gate.handle(ev.RestoreRequested(parts.clock.now(), hold, budget))
        assert isinstance(plan, ev.StorePlan)
        more = plan.retry
        if plan.job:
            await _fill(parts, pool, plan, rows)


async def flush(parts: Parts, deadline_s: float) -> FlushReport:
    """Offer everything owed and wait for the answers, at most until ``deadline_s``."""
    job = parts.gate.handle(ev.FlushRequested(parts.clock.now()))
    if not job:
        return FlushReport(0, 0, {})
    assert isinstance(job, int)
    future = parts.mailbox.expect(job)
    try:
        if not await wait_until(parts.clock, future, deadline_s):
            parts.gate.handle(ev.FlushOverdue(parts.clock.now(), job))
        done = await future
    finally:
        parts.mailbox.forget(job)
    if not isinstance(done, FlushDone):
        return FlushReport(0, 0, {})
    return FlushReport(done.acknowledged, sum(done.lost_by_tier.values()), done.lost_by_tier)
