"""What callers do, as the manager's own flows do it: match, load, store, hold, flush. Each may be aborted anywhere."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final, TypeAlias, TypeVar

from tiering.core import events as ev
from tiering.testing.simulation.agenda import Aborted, Pulse, Until, Wait
from tiering.testing.simulation.contents import HALF_BYTES, content
from tiering.testing.simulation.process import Process
from tiering.testing.simulation.watch import fail
from tiering.types import BlockKey, Outcome, PrefixMatch

COPY_S: Final = 2e-4
"""Typical time of a copy between a caller's buffer and the arena."""

T = TypeVar("T")
Steps: TypeAlias = Generator[Wait, bool, T]


def match(process: Process, pool: int, keys: Sequence[BlockKey], deadline_s: float) -> Steps[PrefixMatch]:
    """Look, ask the tiers that do not know, and look again until all is known or the deadline comes."""
    while True:
        seen = process.progress.beats
        result = process.lookup(pool, keys)
        if not result.pending:
            return result.match
        if result.undecided:
            process.handle(ev.ProbeRequested(process.agenda.now_s, pool, result.undecided))
        if not (yield Until(process.progress, seen, deadline_s)):
            return result.match


def load(process: Process, pool: int, keys: Sequence[BlockKey], deadline_s: float) -> Steps[int]:
    """Lease the longest leading run that can be had, copy it out, check every byte; how many blocks it was."""
    plan = process.handle(ev.LoadRequested(process.agenda.now_s, pool, tuple(keys)))
    assert isinstance(plan, ev.LoadPlan)
    epoch, job, slots = process.epoch, plan.job, plan.slots
    try:
        if not plan.done:
            ended = process.pulse(job)
            if not (yield Until(ended, 0, deadline_s)):
                process.handle(ev.LoadOverdue(process.agenda.now_s, job))
                if not ended.beats:
                    fail(f"load job {job}: overdue, and it does not end")  # row 8
            slots = process.core.job_slots(job)
        heads = [process.arena.read((pool, slot))[:HALF_BYTES] for slot in slots]
        if slots:
            yield process.inject.latency_s(COPY_S)
        for key, slot, head in zip(keys, slots, heads, strict=False):
            payload = head + process.arena.read((pool, slot))[HALF_BYTES:]
            process.watch.served(key, payload, f"served by load job {job}", epoch)
        process.tally.hits += len(slots)
        process.tally.misses += len(keys) - len(slots)
        return len(slots)
    finally:
        process.handle(ev.Released(process.agenda.now_s, job))


def store(
    process: Process,
    pool: int,
    keys: Sequence[BlockKey],
    parent: BlockKey | None,
    deadline_s: float,
    *,
    patient: bool,
) -> Steps[int]:
    """Store a run, if ``patient`` as slots come free; how long a head was taken. Ends if the weights change."""
    turn, done = process.resets, 0
    while done < len(keys) and turn == process.resets:
        seen = process.freed.beats
        before = keys[done - 1] if done else parent
        rest = tuple(keys[done:])
        plan = process.handle(ev.StoreRequested(process.agenda.now_s, pool, rest, before, patient))
        assert isinstance(plan, ev.StorePlan)
        yield from fill(process, pool, plan)
        done += plan.stop
        if plan.stop == len(rest) or not plan.retry:
            break
        if not (yield Until(process.freed, seen, deadline_s)):
            if turn == process.resets:
                again = process.handle(ev.StoreRequested(process.agenda.now_s, pool, rest, before, patient=True))
                assert isinstance(again, ev.StorePlan)
                if again.grants:
                    fail(f"a store was told to wait for slots, and {len(again.grants)} came free without a word")
            break
    return done


def fill(process: Process, pool: int, plan: ev.StorePlan) -> Steps[None]:
    """Copy into the granted slots and report. Aborted, it reports once the copy has let go of them."""
    if not plan.job:
        return
    epoch, aborted = process.epoch, False
    for grant in plan.grants:
        process.arena.write_half((pool, grant.slot), content(epoch, grant.key))
    try:
        yield process.inject.latency_s(COPY_S)
    except Aborted:
        aborted = True
        yield process.inject.latency_s(COPY_S)
    outcomes = []
    for grant in plan.grants:
        if aborted:
            outcomes.append(Outcome.CANCELLED)
        elif process.inject.strikes("copy_failed"):
            outcomes.append(Outcome.failed("injected: copy"))
        else:
            process.arena.write((pool, grant.slot), content(epoch, grant.key))
            outcomes.append(Outcome.OK)
    process.handle(ev.StoreFinished(process.agenda.now_s, plan.job, tuple(outcomes)))
    if aborted:
        raise Aborted


def hold(process: Process, pool: int, keys: Sequence[BlockKey], until_s: float, budget_bytes: int) -> Steps[None]:
    """Hold the blocks elsewhere until then, and copy again what the primary tier lacks."""
    number = process.handle(ev.HoldRequested(process.agenda.now_s, pool, tuple(keys)))
    assert isinstance(number, int)
    turn, due, seen, more = process.resets, process.pulse(number), 0, False
    pause_s = process.core.world.spec.restore_pause_s
    try:
        while process.agenda.now_s < until_s and turn == process.resets:
            if not (yield from _due(process, due, seen, until_s, pause_s if more else None)):
                break
            seen = due.beats
            if turn == process.resets:
                plan = process.handle(ev.RestoreRequested(process.agenda.now_s, number, budget_bytes))
                assert isinstance(plan, ev.StorePlan)
                more = plan.retry
                yield from fill(process, pool, plan)
    finally:
        process.handle(ev.HoldReleased(process.agenda.now_s, number))


def _due(process: Process, due: Pulse, seen: int, until_s: float, pause_s: float | None) -> Steps[bool]:
    """Wait for news of the hold, or for the next try; False once the hold is over."""
    if pause_s is not None and process.agenda.now_s + pause_s < until_s:
        yield Until(due, seen, process.agenda.now_s + pause_s)
        return True
    return (yield Until(due, seen, until_s))


def flush(process: Process, deadline_s: float) -> Steps[dict[str, int]]:
    """Offer all that is owed; what was lost, by tier."""
    number = process.handle(ev.FlushRequested(process.agenda.now_s))
    assert isinstance(number, int)
    done = process.pulse(number)
    if not (yield Until(done, 0, deadline_s)):
        process.handle(ev.FlushOverdue(process.agenda.now_s, number))
        if not done.beats:
            fail(f"flush {number}: overdue, and it does not end")
    return dict(process.flushed.pop(number).lost_by_tier)
