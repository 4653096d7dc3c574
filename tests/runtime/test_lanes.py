"""What a lane does with commands: order, bounds, deadlines, retries, cancellation, deaths."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

import pytest

from tests.runtime.driver_rig import BLOCK_BYTES, SPEC, ScriptedBackend, key, opened, payload
from tiering.api import BackendError, ClosedError, Outcome
from tiering.core.commands import Cancel, Promote, Touch, Transfer
from tiering.core.events import OpFinished, OpOverdue, TierChanged
from tiering.runtime.driver import LaneSpec
from tiering.testing.faults import Op
from tiering.types import OutcomeCode, TierState

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


# Broken backends and deaths.


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda items: [OK], "1 outcomes for 2 items"),
        (lambda items: None, "NoneType"),
        (lambda items: (OK, OK), "tuple"),
        (lambda items: [OK, True], "bool"),
    ],
)
async def test_answer_of_the_wrong_shape_fails_the_batch_and_is_noticed(
    answer: Callable[..., object], words: str
) -> None:
    backend = ScriptedBackend({"load": answer})
    async with opened(make=lambda: backend) as rig:
        op = rig.load(0, 1)
        await rig.settle()
        outcomes = rig.sink.outcomes(op)
        assert outcomes is not None
        assert [o.code for o in outcomes] == [OutcomeCode.FAILED] * 2
        assert rig.kinds() == ["backend_defect"]
        detail = rig.notices[-1].detail
        assert all(word in detail for word in ("ScriptedBackend.load", words, "rule 1"))


async def test_defect_of_a_backend_fails_the_batch_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as rig:
        rig.plan.die("load", times=2)
        ops = [rig.load(0), rig.load(1)]
        await rig.settle()
        for op in ops:
            outcomes = rig.sink.outcomes(op)
            assert outcomes is not None
            assert "InjectedError" in outcomes[0].why
        assert rig.kinds() == ["backend_defect"] * 2
        assert len([r for r in caplog.records if "FaultyBackend.load" in r.message]) == 1
        assert rig.driver.counters()["mem"]["errors"]["defect"] == 2


async def test_advice_that_raises_costs_nothing_but_a_notice() -> None:
    def broken(_: object) -> object:
        raise KeyError("advice")

    backend = ScriptedBackend({"link": broken, "touch": broken})
    async with opened(make=lambda: backend) as rig:
        op = rig.store(0, 1, parents={key(1): key(0)})
        rig.driver.submit([Touch("mem", (key(0),))])
        await rig.settle()
        assert rig.sink.outcomes(op) == (OK, OK)
        assert rig.kinds() == ["backend_defect"] * 2


async def test_backend_that_cancels_itself_is_a_defect_and_no_hang() -> None:
    def cancelled(_: object) -> object:
        raise asyncio.CancelledError

    async with opened(make=lambda: ScriptedBackend({"load": cancelled})) as rig:
        op = rig.load(0)
        await rig.settle()
        outcomes = rig.sink.outcomes(op)
        assert outcomes is not None
        assert "CancelledError" in outcomes[0].why
        assert rig.kinds() == ["backend_defect"]


async def test_dead_worker_is_an_event_a_metric_and_a_health_state_and_the_lane_goes_on() -> None:
    """Row 34: a slot that cannot be lent kills the worker; its operation FAILED, the next one is served."""
    async with opened() as rig:
        dead = 7000
        rig.driver.submit([Promote(dead, "mem", (Transfer(key(0), 0, 999),))])
        rig.store(0)
        await rig.settle()
        loaded = rig.load(0)
        await rig.settle()
        outcomes = rig.sink.outcomes(dead)
        assert outcomes is not None
        assert outcomes[0].code is OutcomeCode.FAILED
        assert "no slot 999" in outcomes[0].why
        assert rig.sink.outcomes(loaded) == (OK,)
        assert rig.kinds() == ["worker_died"]
        assert rig.driver.health()["mem"]["dead_tasks"] == 1
        assert rig.driver.counters()["mem"]["worker_deaths"] == 1
        assert rig.state == "up"


async def test_no_exception_of_a_backend_takes_the_loop_down(caplog: pytest.LogCaptureFixture) -> None:
    """Row 34: even SystemExit, which would end an asyncio loop."""

    def leave(_: object) -> object:
        raise SystemExit(3)

    backend = ScriptedBackend({"load": leave})
    async with opened(make=lambda: backend) as rig:
        ops = [rig.load(n) for n in range(4)]
        probed = rig.probe(0)
        await rig.settle()
        for op in ops:
            outcomes = rig.sink.outcomes(op)
            assert outcomes is not None
            assert outcomes[0].code is OutcomeCode.FAILED
        assert rig.sink.outcomes(probed) == (OK,)
        assert rig.kinds() == ["worker_died"] * 4
        assert len([record for record in caplog.records if "died" in record.message]) == 1


async def test_command_that_cannot_be_routed_ends_failed() -> None:
    """Row 34: an unknown tier or pool is our defect; nobody waits for it for ever, and the rest of the batch is done."""
    async with opened() as rig:
        unknown_pool = Promote(7000, "mem", (Transfer(key(0), 5, 0),))
        unknown_tier = Promote(7001, "moon", (Transfer(key(0), 0, 0),) * 2)
        rig.driver.submit([unknown_pool, unknown_tier, Promote(7002, "mem", (Transfer(key(0), 0, 32),))])
        await rig.settle()
        for op, count in ((7000, 1), (7001, 2)):
            outcomes = rig.sink.outcomes(op)
            assert outcomes is not None
            assert [o.code for o in outcomes] == [OutcomeCode.FAILED] * count
        assert rig.sink.outcomes(7002) == (Outcome.MISSING,)
        assert rig.kinds() == ["worker_died"] * 2
        # They never came to a lane, so its books do not know them.
        rig.sink.events[:] = [e for e in rig.sink.events if not (isinstance(e, OpFinished) and e.op in (7000, 7001))]


async def test_sink_that_raises_takes_no_lane_down() -> None:
    async with opened() as rig:

        def refuse(event: object) -> None:
            if isinstance(event, OpFinished) and event.op == first:
                raise RuntimeError("sink")

        rig.sink.on_event = refuse
        first = rig.load(0)
        await rig.settle()
        second = rig.load(1)
        await rig.settle()
        assert rig.sink.outcomes(second) == (Outcome.MISSING,)
        assert rig.kinds() == ["sink_failed"]


async def test_empty_batches_are_legal_and_say_nothing_about_the_tier() -> None:
    async with opened() as rig:
        ops = [rig.load(), rig.store(), rig.probe(), rig.delete()]
        await rig.settle()
        assert [rig.sink.outcomes(op) for op in ops] == [()] * 4


async def test_latency_is_counted_in_seconds_of_the_clock() -> None:
    async with opened() as rig:
        rig.plan.latency("store", 0.3, times=1)
        rig.store(0)
        await rig.clock.advance(0.3)
        rig.store(1)
        await rig.settle()
        latency = rig.driver.counters()["mem"]["latency"]["store"]
        assert latency["calls"] == 2
        assert latency["sum_s"] == pytest.approx(0.3)


async def test_queue_longer_than_the_deadline_is_not_the_tiers_fault() -> None:
    """Row 9: a burst beyond what the tier can do in time ends in misses for its tail, and leaves the tier UP."""
    async with opened(spec=dataclasses.replace(SPEC, ops_max=1)) as rig:
        rig.plan.latency("load", 0.4)
        ops = [rig.load(n) for n in range(8)]
        await rig.clock.advance(5.0)
        # Two in time, one that ran into its deadline, five that never began.
        late = (Outcome.failed("deadline"),)
        assert [rig.sink.outcomes(op) for op in ops] == [(Outcome.MISSING,)] * 2 + [late] * 6
        assert rig.backend.calls["load"] == 3
        assert rig.sink.states() == [TierState.UP]


async def test_steady_queue_before_a_hung_tier_is_the_tiers_fault() -> None:
    """Row 8: with each operation of a queue cut off early, none runs for a whole deadline; the tier is down all the same."""
    async with opened(spec=dataclasses.replace(SPEC, ops_max=1)) as rig:
        rig.plan.hang("load")
        rig.plan.hang("contains")
        for number in range(50):
            rig.load(number % 16)
            await rig.clock.advance(0.05)
        assert rig.state == "down"
        at_s = next(e.now_s for e in rig.sink.events if isinstance(e, TierChanged) and e.state is TierState.DOWN)
        assert at_s <= 100.0 + 1.0 + 3 * 0.05


async def test_cancelled_while_it_runs_lands_and_is_not_tried_again() -> None:
    """Row 27."""
    async with opened() as rig:
        rig.plan.latency("load", 0.2, times=1)
        blip = Outcome.failed("blip", retryable=True)
        rig.plan.outcomes("load", blip, keys=[key(0)], times=1)
        op = rig.load(0, 1)
        await rig.settle()
        rig.driver.submit([Cancel(op, "mem")])
        await rig.clock.advance(0.2)
        assert rig.sink.outcomes(op) == (blip, Outcome.MISSING)
        await rig.clock.advance(1.0)
        assert rig.backend.calls["load"] == 1
