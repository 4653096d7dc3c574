"""A tier's state: how it goes down, what that means for those who wait, and how it comes back by itself."""

from __future__ import annotations

import dataclasses

import pytest

from tests.runtime.driver_rig import NAMESPACE, SPEC, Rig, ScriptedBackend, key, opened
from tiering.api import BackendError, Outcome
from tiering.core.events import OpFinished, TierChanged
from tiering.runtime.driver import LaneSpec
from tiering.testing.faults import Op
from tiering.types import TierState

OK = Outcome.OK
UP, DOWN, DEGRADED = TierState.UP, TierState.DOWN, TierState.DEGRADED
DENIED = Outcome.failed("EIO: input/output error")
TIER_DOWN = Outcome.failed("tier down")
TIER_DEGRADED = Outcome.failed("tier degraded: stores fail")


def break_server(rig: Rig) -> None:
    ops: tuple[Op, ...] = ("contains", "load", "store", "delete")
    for op in ops:
        rig.plan.fail_calls(op, lambda: BackendError("connection refused"))


async def fail_loads(rig: Rig, count: int = 3) -> None:
    for number in range(count):
        rig.load(number)
        await rig.settle()


async def test_third_failed_call_in_a_row_takes_the_tier_down() -> None:
    """Row 10: health is red while the server is gone, with the reason in words."""
    async with opened() as rig:
        break_server(rig)
        await fail_loads(rig, 2)
        assert rig.state == "up"
        await fail_loads(rig, 1)
        health = rig.driver.health()["mem"]
        assert (health["state"], health["read"]["breaker"]) == ("down", "open")
        assert "connection refused" in health["reason"]
        assert rig.sink.states() == [UP, DOWN]
        assert rig.driver.counters()["mem"]["breaker_opens"] == {"read": 1, "write": 0}


async def test_answers_that_are_no_failures_leave_it_up() -> None:
    """Row 9: a miss, a corrupt block and a full tier are answers; "down" is counted apart from "miss"."""
    async with opened() as rig:
        rig.plan.outcomes("load", Outcome.corrupt("bad bytes"), keys=[key(1)])
        rig.plan.enospc(100)
        for _ in range(5):
            rig.load(0)
            rig.load(1)
            rig.store(2)
            await rig.settle()
        assert rig.state == "up"
        counts = rig.driver.counters()["mem"]
        assert counts["blocks"]["load"] == {
            "ok": 0, "missing": 5, "corrupt": 5, "failed": 0, "refused": 0, "cancelled": 0
        }  # fmt: skip
        assert counts["blocks"]["store"]["refused"] == 5
        break_server(rig)
        await fail_loads(rig, 3)
        await fail_loads(rig, 4)
        counts = rig.driver.counters()["mem"]
        assert counts["errors"]["refused_down"] == 4
        assert counts["blocks"]["load"]["missing"] == 5


async def test_batch_in_which_something_worked_is_no_failure() -> None:
    async with opened() as rig:
        rig.plan.outcomes("load", DENIED, keys=[key(0)])
        for _ in range(5):
            rig.load(0, 1)
            await rig.settle()
        assert rig.state == "up"


async def test_down_ends_what_waits_at_once_after_telling_the_core() -> None:
    """Row 8: nobody waits for a dead server."""
    async with opened() as rig:
        rig.plan.hang("load", cancellable=False)
        rig.plan.hang("store", cancellable=False)
        running = [rig.load(0), rig.load(1), rig.store(0), rig.store(1)]
        await rig.hung("load", 2)
        await rig.clock.advance(0.5)
        queued = [rig.load(2), rig.probe(4), rig.store(5), rig.delete(6)]
        await rig.clock.advance(0.5)
        assert rig.state == "up"
        await rig.clock.advance(0.5)
        # Two hung loads and a lookup that found every place hung: three failures.
        down = rig.sink.events.index(TierChanged(101.5, "mem", DOWN))
        flushed = [event for event in rig.sink.events[down + 1 :] if isinstance(event, OpFinished)]
        assert sorted(event.op for event in flushed) == queued[1:]
        assert {event.outcomes for event in flushed} == {(TIER_DOWN,)}
        assert not set(running) & set(rig.sink.finished())


async def test_commands_to_a_tier_that_is_down_end_at_once() -> None:
    async with opened() as rig:
        break_server(rig)
        await fail_loads(rig)
        calls = sum(rig.backend.calls.values())
        ops = [rig.load(0, 1), rig.probe(0), rig.store(1), rig.delete(2)]
        await rig.settle()
        assert [rig.sink.outcomes(op) for op in ops] == [(TIER_DOWN,) * 2, (TIER_DOWN,), (TIER_DOWN,), (TIER_DOWN,)]
        assert sum(rig.backend.calls.values()) == calls


async def test_recovers_by_itself_by_one_lookup_after_the_cooldown() -> None:
    """Row 9: no traffic is needed to find out that the server is back."""
    async with opened() as rig:
        break_server(rig)
        await fail_loads(rig)
        rig.plan.heal()
        await rig.clock.advance(0.499)
        assert (rig.state, rig.backend.calls["contains"]) == ("down", 0)
        await rig.clock.advance(0.001)
        assert (rig.state, rig.backend.calls["contains"], rig.backend.keys["contains"]) == ("up", 1, 1)
        assert rig.sink.states() == [UP, DOWN, UP]
        op = rig.load(0)
        await rig.settle()
        assert rig.sink.outcomes(op) == (Outcome.MISSING,)


async def test_trials_of_a_dead_server_double_their_pause_up_to_the_cap() -> None:
    """Row 9: after any outage, however long, the tier is back at most 5 s after the server."""
    async with opened() as rig:
        break_server(rig)
        await fail_loads(rig)
        at_s = []
        for _ in range(250):
            before = rig.backend.calls["contains"]
            await rig.clock.advance(0.1)
            if rig.backend.calls["contains"] != before:
                at_s.append(round(rig.clock.now() - 100.0, 1))
        # Pauses 0.5, 1, 2, then 4: with what a trial takes, that is within the 5 s.
        assert at_s == [0.5, 1.5, 3.5, 7.5, 11.5, 15.5, 19.5, 23.5]
        assert rig.sink.states() == [UP, DOWN]
        rig.plan.heal()
        await rig.clock.advance(2.5)
        assert rig.state == "up"
        assert rig.driver.counters()["mem"]["trials"] == 9


async def test_hung_trial_counts_as_failed_at_the_deadline_and_is_cancelled() -> None:
    async with opened() as rig:
        break_server(rig)
        await fail_loads(rig)
        rig.plan.heal()
        rig.plan.hang("contains")
        await rig.clock.advance(0.5)
        assert rig.plan.hung("contains") == 1
        await rig.clock.advance(1.0)
        assert (rig.state, rig.plan.hung("contains")) == ("down", 0)
        rig.plan.heal()
        await rig.clock.advance(1.0)
        assert rig.state == "up"


async def test_no_second_trial_while_the_first_has_not_returned() -> None:
    async with opened() as rig:
        break_server(rig)
        await fail_loads(rig)
        rig.plan.heal()
        rig.plan.hang("contains", cancellable=False)
        await rig.clock.advance(30.0)
        assert rig.plan.hung("contains") == 1
        rig.plan.release()
        # Its late answer does not count; the next trial is long due.
        await rig.clock.advance(0.001)
        assert (rig.state, rig.backend.calls["contains"]) == ("up", 2)


async def test_no_trial_while_every_place_is_held_by_a_hung_call() -> None:
    """A disk that hangs its reads and answers its lookups from memory stays down until a read returns."""
    async with opened() as rig:
        rig.plan.hang("load", cancellable=False)
        ops = [rig.load(0), rig.load(1), rig.load(2)]
        await rig.clock.advance(1.0)
        assert rig.state == "down"
        await rig.clock.advance(60.0)
        assert (rig.state, rig.backend.calls["contains"]) == ("down", 0)
        rig.plan.release()
        await rig.clock.advance(0.001)
        assert rig.state == "up"
        assert [rig.sink.outcomes(op) for op in ops] == [(Outcome.failed("deadline"),)] * 3


@pytest.mark.parametrize("op_name", ["load", "store", "delete"])
async def test_retries_stop_when_the_breaker_opens(op_name: Op) -> None:
    async with opened(spec=dataclasses.replace(SPEC, retry_max=10, backoff_s=0.01)) as rig:
        rig.plan.fail_calls(op_name, lambda: BackendError("refused", retryable=True))
        op = rig.load(0) if op_name == "load" else rig.store(0) if op_name == "store" else rig.delete(0)
        await rig.clock.advance(0.1)
        assert rig.backend.calls[op_name] == 3
        outcomes = rig.sink.outcomes(op)
        assert outcomes is not None
        assert outcomes[0].why == "refused"


async def test_operation_between_two_tries_ends_when_the_tier_goes_down() -> None:
    async with opened(spec=dataclasses.replace(SPEC, ops_max=4, backoff_s=0.4, backoff_max_s=0.4)) as rig:
        rig.plan.outcomes("load", Outcome.failed("blip", retryable=True), keys=[key(9)], times=1)
        op = rig.load(9, 8)
        await rig.settle()
        break_server(rig)
        await fail_loads(rig)
        assert rig.state == "down"
        assert rig.sink.outcomes(op) == (Outcome.failed("blip", retryable=True), Outcome.MISSING)


# Writes.


async def test_stores_that_fail_degrade_the_tier_and_loads_go_on() -> None:
    """Row 18: reported a block; the tier serves what it has, takes no stores, and still deletes."""
    async with opened() as rig:
        rig.store(9)
        await rig.settle()
        rig.plan.outcomes("store", DENIED)
        rig.plan.hang("delete")
        for number in range(3):
            op = rig.store(number)
            await rig.settle()
            assert rig.sink.outcomes(op) == (DENIED,)
        assert rig.sink.states() == [UP, DEGRADED]
        refused, loaded, deleted = rig.store(3), rig.load(9), rig.delete(8)
        await rig.settle()
        rig.plan.release()
        await rig.settle()
        assert rig.sink.outcomes(refused) == (TIER_DEGRADED,)
        assert rig.sink.outcomes(loaded) == (OK,)
        assert rig.sink.outcomes(deleted) == (Outcome.MISSING,)


async def test_degraded_tier_offers_itself_again_and_the_first_store_decides() -> None:
    """Row 18: it recovers when there is room."""
    async with opened() as rig:
        rig.plan.outcomes("store", DENIED)
        for number in range(3):
            rig.store(number)
            await rig.settle()
        await rig.clock.advance(0.5)
        assert rig.sink.states() == [UP, DEGRADED, UP]
        assert rig.driver.health()["mem"]["write"]["breaker"] == "half_open"
        tried, waiting = rig.store(4), rig.store(5)
        await rig.settle()
        assert rig.sink.outcomes(tried) == (DENIED,)
        assert rig.sink.outcomes(waiting) == (TIER_DEGRADED,)
        assert rig.sink.states() == [UP, DEGRADED, UP, DEGRADED]
        rig.plan.heal()
        await rig.clock.advance(0.999)
        assert rig.state == "degraded"
        await rig.clock.advance(0.001)
        ops = [rig.store(n) for n in range(6)]
        await rig.settle()
        assert [rig.sink.outcomes(op) for op in ops] == [(OK,)] * 6
        assert rig.driver.health()["mem"]["write"]["breaker"] == "closed"


async def test_half_open_lets_one_store_through_at_a_time() -> None:
    async with opened() as rig:
        rig.plan.outcomes("store", DENIED, times=3)
        for number in range(3):
            rig.store(number)
            await rig.settle()
        await rig.clock.advance(0.5)
        rig.plan.hang("store")
        ops = [rig.store(n) for n in range(4)]
        await rig.settle()
        assert rig.plan.hung("store") == 1
        rig.plan.release()
        await rig.settle()
        assert [rig.sink.outcomes(op) for op in ops] == [(OK,)] * 4


async def test_hung_stores_degrade_the_tier_while_they_hang() -> None:
    """Rows 11, 12: even one hung place is noticed; what waits behind it is let go, so its slots are free."""
    async with opened(spec=dataclasses.replace(SPEC, ops_max=1)) as rig:
        rig.plan.hang("store", cancellable=False)
        hung, waiting = rig.store(0), rig.store(1)
        await rig.hung("store")
        await rig.clock.advance(2.9)
        assert rig.state == "up"
        await rig.clock.advance(0.1)
        assert rig.state == "degraded"
        assert rig.sink.outcomes(waiting) == (TIER_DEGRADED,)
        assert rig.sink.outcomes(hung) is None
        assert rig.driver.counters()["mem"]["timeouts"] == 1
        # No place, no trial.
        await rig.clock.advance(60.0)
        assert rig.state == "degraded"
        rig.plan.release()
        await rig.clock.advance(0.001)
        assert rig.sink.outcomes(hung) == (OK,)
        assert rig.state == "up"


async def test_reads_that_come_back_do_not_bring_back_writes_that_hang() -> None:
    """Row 9."""
    async with opened(spec=dataclasses.replace(SPEC, ops_max=1)) as rig:
        rig.plan.hang("store", cancellable=False)
        rig.store(0)
        await rig.clock.advance(5.0)
        rig.plan.fail_calls("load", lambda: BackendError("refused"), times=3)
        await fail_loads(rig)
        assert rig.sink.states() == [UP, DEGRADED, DOWN]
        await rig.clock.advance(0.5)
        assert rig.sink.states() == [UP, DEGRADED, DOWN, DEGRADED]
        rig.plan.release()
        await rig.clock.advance(0.001)
        assert rig.state == "up"


async def test_dead_server_comes_back_whole() -> None:
    """Row 10: reads and writes both failed; after the restart the tier is UP in one step, and stores work."""
    async with opened() as rig:
        break_server(rig)
        for number in range(3):
            rig.store(number)
            await rig.settle()
        await fail_loads(rig)
        assert rig.sink.states() == [UP, DEGRADED, DOWN]
        rig.plan.heal()
        await rig.clock.advance(0.5)
        assert rig.sink.states() == [UP, DEGRADED, DOWN, UP]
        op = rig.store(0)
        await rig.settle()
        assert rig.sink.outcomes(op) == (OK,)
        assert rig.driver.health()["mem"]["write"]["breaker"] == "closed"


async def test_one_log_line_a_change_of_state(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="tiering.driver")
    async with opened() as rig:
        rig.plan.outcomes("store", DENIED)
        for number in range(3):
            rig.store(number)
            await rig.settle()
        for _ in range(5):
            # Trials of a disk that stays full.
            await rig.clock.advance(5.0)
            rig.store(0)
            await rig.settle()
        break_server(rig)
        await fail_loads(rig, 8)
        await rig.clock.advance(20.0)
        lines = [record.message for record in caplog.records if record.name == "tiering.driver"]
        assert [line.split(":")[0] for line in lines] == ["tier mem is degraded", "tier mem is down"]
        assert "EIO" in lines[0]
        assert "connection refused" in lines[1]


async def test_trial_answer_of_the_wrong_shape_is_a_failure() -> None:
    answers: dict[str, object] = {"load": None}

    def broken(_: object) -> object:
        raise BackendError("refused")

    backend = ScriptedBackend({"load": broken, "contains": lambda _: answers["contains"]})
    answers["contains"] = []
    async with opened(make=lambda: backend) as rig:
        await fail_loads(rig)
        await rig.clock.advance(0.5)
        assert rig.state == "down"
        answers["contains"] = [OK]
        await rig.clock.advance(1.0)
        assert rig.state == "up"


async def test_trial_that_dies_is_noticed_and_tried_again() -> None:
    """Row 34."""
    deaths = [SystemExit(1)]

    def answer(items: list[bytes]) -> list[Outcome]:
        if deaths:
            raise deaths.pop()
        return [OK] * len(items)

    def broken(_: object) -> object:
        raise BackendError("refused")

    async with opened(make=lambda: ScriptedBackend({"load": broken, "contains": answer})) as rig:
        await fail_loads(rig)
        await rig.clock.advance(0.5)
        assert (rig.state, rig.kinds()) == ("down", ["worker_died"])
        assert rig.driver.health()["mem"]["dead_tasks"] == 1
        await rig.clock.advance(1.0)
        assert rig.state == "up"


async def test_tiers_do_not_share_their_fate() -> None:
    """Row 11: one dead tier, one that works."""
    rig = Rig()
    good = ScriptedBackend({})
    rig.driver.add_tier(LaneSpec("far"), lambda: good)
    await rig.driver.open(NAMESPACE)
    break_server(rig)
    await fail_loads(rig)
    assert rig.sink.states("far") == [UP]
    assert rig.sink.states("mem") == [UP, DOWN]
    assert await rig.close() == []
