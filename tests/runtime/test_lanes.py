"""What a lane does with commands: order, bounds, deadlines, retries, cancellation, deaths."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest

from tests.runtime.driver_rig import BLOCK_BYTES, SPEC, ScriptedBackend, key, opened, payload
from tiering.api import BackendError, ClosedError, Outcome
from tiering.core.commands import Cancel, Promote, Touch, Transfer
from tiering.core.events import OpFinished, OpOverdue
from tiering.runtime.driver import LaneSpec
from tiering.testing.faults import Op

OK = Outcome.OK


async def test_bytes_go_to_the_tier_and_come_back() -> None:
    async with opened() as rig:
        stored = rig.store(0, 1)
        await rig.settle()
        loaded = rig.load(0, 1, 9)
        await rig.settle()
        assert rig.sink.outcomes(stored) == (OK, OK)
        assert rig.sink.outcomes(loaded) == (OK, OK, Outcome.MISSING)
        assert [rig.slots.data(32), rig.slots.data(33)] == [payload(0), payload(1)]
        counts = rig.driver.counters()["mem"]
        assert counts["bytes"] == {"probe": 0, "load": 2 * BLOCK_BYTES, "store": 2 * BLOCK_BYTES, "delete": 0}
        assert counts["blocks"]["load"]["missing"] == 1


async def test_probes_and_deletes_report_an_outcome_a_key() -> None:
    async with opened() as rig:
        rig.store(0)
        await rig.settle()
        probed = rig.probe(0, 1)
        await rig.settle()
        deleted = rig.delete(0, 1)
        await rig.settle()
        assert rig.sink.outcomes(probed) == (OK, Outcome.MISSING)
        assert rig.sink.outcomes(deleted) == (OK, Outcome.MISSING)


async def test_views_are_padded_to_the_backends_alignment() -> None:
    backend = ScriptedBackend({}, alignment_bytes=512)
    async with opened(make=lambda: backend) as rig:
        rig.store(0, 1)
        rig.load(2)
        await rig.settle()
        assert rig.slots.lengths == [512] * 3


async def test_links_are_told_before_the_store_and_touches_are_passed_on() -> None:
    seen: list[tuple[str, object]] = []

    def store(items: Sequence[tuple[bytes, memoryview]]) -> list[Outcome]:
        seen.append(("store", [k for k, _ in items]))
        return [OK] * len(items)

    backend = ScriptedBackend({
        "link": lambda parents: seen.append(("link", parents)),
        "store": store,
        "touch": lambda keys: seen.append(("touch", keys)),
    })  # fmt: skip
    async with opened(make=lambda: backend) as rig:
        rig.store(0, 1, parents={key(1): key(0), key(7): key(6)})
        rig.driver.submit([Touch("mem", (key(1), key(0)))])
        await rig.settle()
        # The touch is passed on when it comes, the store when it has a place.
        assert seen == [
            ("touch", (key(1), key(0))), ("link", [{key(1): key(0)}]), ("store", [key(0), key(1)]),
        ]  # fmt: skip


# Order and bounds.


async def test_at_most_ops_max_calls_of_each_direction_run() -> None:
    """Row 12: what is beyond the places waits, and is counted in bytes."""
    async with opened() as rig:
        ops: tuple[Op, ...] = ("load", "store", "contains")
        for op in ops:
            rig.plan.hang(op)
        for number in range(6):
            rig.load(number)
            rig.store(number, number + 6)
        await rig.settle()
        assert (rig.plan.hung("load"), rig.plan.hung("store")) == (2, 2)
        health = rig.driver.health()["mem"]
        assert health["read"]["queued_ops"] == 4
        assert health["read"]["queued_bytes"] == 4 * BLOCK_BYTES
        assert health["read"]["running_bytes"] == 2 * BLOCK_BYTES
        assert health["write"]["queued_bytes"] == 8 * BLOCK_BYTES
        assert health["write"]["running_bytes"] == 4 * BLOCK_BYTES


async def test_hung_stores_do_not_hold_up_loads() -> None:
    """Row 11, the driver's part: directions have places of their own."""
    async with opened() as rig:
        rig.store(0)
        await rig.settle()
        rig.plan.hang("store")
        for number in range(1, 6):
            rig.store(number)
        loaded = rig.load(0)
        probed = rig.probe(0)
        await rig.settle()
        assert rig.sink.outcomes(loaded) == (OK,)
        assert rig.sink.outcomes(probed) == (OK,)


async def test_deletes_go_before_stores_and_each_queue_keeps_its_order() -> None:
    backend = ScriptedBackend({})
    async with opened(make=lambda: backend, spec=LaneSpec("mem", ops_max=1)) as rig:
        rig.store(1)
        rig.store(1, 2)
        rig.store(1, 2, 3)
        rig.delete(1)
        rig.load(1)
        rig.probe(1, 2)
        rig.load(1, 2, 3)
        await rig.settle()
        writes = [call for call in backend.calls if call[0] in ("store", "delete")]
        reads = [call for call in backend.calls if call[0] in ("load", "contains")]
        # The first store had the place already when the delete came.
        assert writes == [("store", 1), ("delete", 1), ("store", 2), ("store", 3)]
        assert reads == [("load", 1), ("contains", 2), ("load", 3)]


# Deadlines.


async def test_running_load_past_its_deadline_is_overdue_once_and_lands_late() -> None:
    """Row 8: a miss at the deadline; the slots are free only when the bytes have landed."""
    async with opened() as rig:
        rig.store(0)
        await rig.settle()
        rig.plan.hang("load", cancellable=False)
        op = rig.load(0)
        await rig.hung("load")
        await rig.clock.advance(0.999)
        assert rig.sink.overdue() == []
        await rig.clock.advance(0.001)
        assert rig.sink.overdue() == [op]
        assert rig.sink.outcomes(op) is None
        assert rig.driver.health()["mem"]["read"]["zombies"] == 1
        await rig.clock.advance(10)
        assert rig.sink.overdue() == [op]
        rig.plan.release()
        await rig.settle()
        assert rig.sink.outcomes(op) == (Outcome.failed("deadline"),)
        assert rig.driver.health()["mem"]["read"]["zombies"] == 0
        assert rig.driver.counters()["mem"]["timeouts"] == 1


async def test_backend_that_honours_cancellation_gives_the_slot_back_at_the_deadline() -> None:
    """Row 8."""
    async with opened() as rig:
        rig.plan.hang("load")
        op = rig.load(0)
        await rig.hung("load")
        await rig.clock.advance(1.0)
        assert rig.sink.events[-2:] == [OpOverdue(101.0, op), OpFinished(101.0, op, (Outcome.failed("deadline"),))]


async def test_outcomes_of_a_call_that_finished_in_spite_of_its_cancellation_are_kept() -> None:
    release = asyncio.Event()

    class Stubborn(ScriptedBackend):
        async def load(self, items: object) -> list[Outcome]:
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue
            return [OK]

    async with opened(make=lambda: Stubborn({})) as rig:
        op = rig.load(0)
        await rig.settle()
        await rig.clock.advance(1.0)
        release.set()
        await rig.settle()
        assert rig.sink.overdue() == [op]
        assert rig.sink.outcomes(op) == (OK,)


async def test_queued_load_past_its_deadline_ends_at_once() -> None:
    """Row 8: the deadline counts from submit, queueing included, and nothing is asked for it any more."""
    async with opened(spec=dataclasses.replace(SPEC, failures_max=10)) as rig:
        rig.plan.hang("load", cancellable=False)
        running = [rig.load(0), rig.load(1)]
        await rig.hung("load", 2)
        await rig.clock.advance(0.5)
        queued = rig.load(2, 3)
        late_probe = rig.probe(4)
        await rig.clock.advance(0.5)
        assert rig.sink.overdue() == running
        await rig.clock.advance(0.5)
        assert rig.sink.overdue() == [*running, queued, late_probe]
        assert rig.sink.outcomes(queued) == (Outcome.failed("deadline"),) * 2
        assert rig.sink.outcomes(late_probe) == (Outcome.failed("deadline"),)
        at = rig.sink.events.index(OpOverdue(101.5, queued))
        assert isinstance(rig.sink.events[at + 1], OpFinished)
        assert rig.backend.calls["load"] == 2
        assert rig.driver.counters()["mem"]["errors"]["queue_timeout"] == 2


async def test_stores_have_no_deadline_of_their_own() -> None:
    async with opened() as rig:
        rig.plan.hang("store")
        op = rig.store(0)
        await rig.hung("store")
        await rig.clock.advance(1.5)
        assert (rig.sink.overdue(), rig.sink.outcomes(op)) == ([], None)
        assert rig.driver.health()["mem"]["write"]["zombies"] == 1
        rig.plan.release()
        await rig.settle()
        assert rig.sink.outcomes(op) == (OK,)


async def test_deadline_is_not_postponed_by_retries() -> None:
    """Three tries, the third hangs: overdue one second after submit all the same."""
    spec = LaneSpec("mem", deadline_s=1.0, retry_max=2, backoff_s=0.3, backoff_max_s=0.3)
    async with opened(spec=spec) as rig:
        rig.plan.fail_calls("load", lambda: BackendError("gone", retryable=True), times=2)
        op = rig.load(0)
        await rig.clock.advance(0.5)
        rig.plan.hang("load")
        await rig.clock.advance(0.5)
        assert rig.sink.overdue() == [op]
        assert rig.sink.outcomes(op) == (Outcome.failed("deadline"),)


# Retries.


async def test_only_the_failed_items_of_a_batch_are_tried_again() -> None:
    async with opened() as rig:
        rig.store(0, 1, 2, 3)
        await rig.settle()
        rig.plan.outcomes("load", Outcome.failed("blip", retryable=True), keys=[key(1)], times=1)
        rig.plan.outcomes("load", Outcome.failed("bad"), keys=[key(2)], times=1)
        op = rig.load(0, 1, 2, 3)
        await rig.settle()
        assert rig.sink.outcomes(op) is None
        await rig.clock.advance(0.1)
        assert rig.sink.outcomes(op) == (OK, OK, Outcome.failed("bad"), OK)
        assert rig.backend.keys["load"] == 5
        assert rig.driver.counters()["mem"]["retries"] == 1


async def test_retries_pause_longer_each_time_up_to_the_cap_and_stop_at_retry_max() -> None:
    async with opened() as rig:
        blip = Outcome.failed("blip", retryable=True)
        rig.plan.outcomes("load", blip, keys=[key(0)])
        op = rig.load(0, 1)
        calls = []
        for _ in range(6):
            await rig.clock.advance(0.05)
            calls.append(rig.backend.calls["load"])
        # Pauses of 0.1 and 0.15 s.
        assert calls == [1, 2, 2, 2, 3, 3]
        assert rig.sink.outcomes(op) == (blip, Outcome.MISSING)


async def test_no_retry_that_could_not_end_before_the_deadline() -> None:
    async with opened(spec=LaneSpec("mem", deadline_s=0.1, backoff_s=0.1)) as rig:
        rig.plan.outcomes("load", Outcome.failed("blip", retryable=True))
        op = rig.load(0)
        await rig.settle()
        assert rig.sink.outcomes(op) == (Outcome.failed("blip", retryable=True),)


async def test_whole_call_is_tried_again_when_the_error_says_so() -> None:
    """Row 10: one dropped connection is nobody's miss."""
    async with opened() as rig:
        rig.plan.fail_calls("store", lambda: BackendError("connection reset", retryable=True), times=1)
        op = rig.store(0, 1)
        await rig.clock.advance(0.1)
        assert rig.sink.outcomes(op) == (OK, OK)


@pytest.mark.parametrize("error", [BackendError("denied", tier="mem", op="store"), ClosedError("closed")])
async def test_other_errors_fail_the_batch_at_once(error: Exception) -> None:
    async with opened() as rig:
        rig.plan.fail_calls("store", lambda: error, times=1)
        op = rig.store(0, 1)
        await rig.settle()
        assert rig.sink.outcomes(op) == (Outcome.failed(str(error)),) * 2
        assert rig.backend.calls["store"] == 1
        assert rig.kinds() == []


# Cancellation.


async def test_cancelled_while_queued_is_dropped_and_reported() -> None:
    """Row 27."""
    async with opened() as rig:
        rig.plan.hang("load")
        running = [rig.load(0), rig.load(1)]
        await rig.hung("load", 2)
        queued = rig.load(2, 3)
        rig.driver.submit([Cancel(queued, "mem"), Cancel(running[0], "mem"), Cancel(999, "mem")])
        await rig.settle()
        assert rig.sink.outcomes(queued) == (Outcome.CANCELLED,) * 2
        assert rig.sink.outcomes(running[0]) is None
        rig.plan.release()
        await rig.settle()
        assert rig.sink.outcomes(running[0]) == (Outcome.MISSING,)
        assert rig.backend.keys["load"] == 2


async def test_cancelled_between_two_tries_is_not_tried_again() -> None:
    """Row 27."""
    async with opened() as rig:
        rig.plan.outcomes("load", Outcome.failed("blip", retryable=True), keys=[key(0)])
        op = rig.load(0, 1)
        await rig.settle()
        rig.driver.submit([Cancel(op, "mem")])
        await rig.settle()
        assert rig.sink.outcomes(op) == (Outcome.CANCELLED, Outcome.MISSING)
        assert rig.backend.calls["load"] == 1


async def test_cancel_in_the_batch_that_submits_it() -> None:
    async with opened() as rig:
        op = 7000
        rig.driver.submit([Promote(op, "mem", (Transfer(key(0), 0, 32),)), Cancel(op, "mem")])
        await rig.settle()
        assert rig.sink.outcomes(op) == (Outcome.MISSING,)
