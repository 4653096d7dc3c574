"""What a lane makes of backends that break their contract, of deaths, and of whose fault a missed deadline is."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import pytest

from tests.runtime.driver_rig import SPEC, ScriptedBackend, key, opened
from tiering.api import Outcome
from tiering.core.commands import Cancel, Promote, Touch, Transfer
from tiering.core.events import OpFinished, TierChanged
from tiering.types import OutcomeCode, TierState

OK = Outcome.OK


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
