"""Open, reopen, close: in bounded time, whatever hangs, whenever it is cancelled."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest

from tests.runtime.driver_rig import BLOCK_BYTES, NAMESPACE, SPEC, Rig, ScriptedBackend, key, opened
from tiering.api import Backend, BackendCapabilities, BackendError, Namespace, Outcome, ScanEntry
from tiering.core.commands import FlushDone, Probe, SlotsFreed
from tiering.core.events import TierChanged, TierScanned
from tiering.errors import ClosedError, ConfigError
from tiering.runtime.driver import LaneSpec
from tiering.types import KVLayout, TierState

OK = Outcome.OK
NEXT = Namespace.of(KVLayout.uniform(model="m", tokens_per_block=4, block_bytes=BLOCK_BYTES), epoch="1")
OPENING, UP, DOWN = TierState.OPENING, TierState.UP, TierState.DOWN
CLOSING, CLOSED, ABANDONED = TierState.CLOSING, TierState.CLOSED, TierState.ABANDONED


def others() -> list[str]:
    """Names of the tasks beside the test's own."""
    return sorted(task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task())


class ScanningBackend(ScriptedBackend):
    """Exclusive, with ``count`` blocks on its medium; the scan raises after ``fail_after`` batches."""

    def __init__(self, count: int, fail_after: int | None = None) -> None:
        super().__init__({})
        self.capabilities = BackendCapabilities(persistent=True, shared=False, exclusive=True, can_scan=True)
        self.count = count
        self.fail_after = fail_after

    async def scan(self) -> AsyncIterator[list[ScanEntry]]:
        for batch, start in enumerate(range(0, self.count, 1000)):
            if batch == self.fail_after:
                raise BackendError("bad index page")
            yield [ScanEntry(key(n), 300) for n in range(start, min(start + 1000, self.count))]
            await asyncio.sleep(0)


# Open.


async def test_everything_scanned_is_reported_before_up_in_bounded_parts() -> None:
    async with opened(make=lambda: ScanningBackend(5000)) as rig:
        scans = [event for event in rig.sink.events if isinstance(event, TierScanned)]
        assert [len(event.entries) for event in scans] == [2048, 2048, 904]
        assert rig.sink.scanned() == [key(n) for n in range(5000)]
        assert rig.sink.events[-1] == TierChanged(100.0, "mem", UP)


async def test_scan_that_fails_half_way_leaves_no_trace_and_is_tried_again() -> None:
    """Row 19: nothing is accounted twice."""
    made = iter([ScanningBackend(3000, fail_after=2), ScanningBackend(3000)])
    rig = Rig(make=lambda: next(made))
    result = await rig.driver.open(NAMESPACE)
    assert isinstance(result["mem"], BackendError)
    assert rig.sink.events == [TierChanged(100.0, "mem", DOWN)]
    await rig.clock.advance(0.5)
    assert rig.sink.scanned() == [key(n) for n in range(3000)]
    assert rig.sink.states() == [DOWN, UP]
    assert await rig.close() == []


@pytest.mark.parametrize(
    "error", [ConfigError("tiers[0].path: not writable"), BackendError("refused"), OSError("boom")]
)
async def test_failed_open_is_told_and_the_tier_is_down_until_a_new_backend_opens(error: Exception) -> None:
    """Row 10: a server that is not there yet at the start is no reason to stay without it."""
    rig = Rig()
    rig.plan.fail_calls("open", lambda: error, times=2)
    assert await rig.driver.open(NAMESPACE) == {"mem": error}
    assert rig.state == "down"
    assert str(error) in rig.driver.health()["mem"]["reason"]
    await rig.clock.advance(0.5)
    assert rig.state == "down"
    await rig.clock.advance(1.0)
    assert rig.sink.states() == [DOWN, UP]
    # Each try had a backend of its own, and the failed ones were closed.
    assert [backend.calls["aclose"] for backend in rig.made] == [1, 1, 0]
    op = rig.store(0)
    await rig.settle()
    assert rig.sink.outcomes(op) == (OK,)
    assert await rig.close() == []


async def test_factory_that_fails_is_like_an_open_that_fails() -> None:
    def make() -> Backend:
        raise ConfigError("tiers[0].type: no such backend")

    rig = Rig(make=make)
    result = await rig.driver.open(NAMESPACE)
    assert isinstance(result["mem"], ConfigError)
    assert await rig.close() == []


async def test_hung_open_is_given_up_at_its_deadline_and_does_not_hold_the_others() -> None:
    """Row 8."""
    rig = Rig(spec=dataclasses.replace(SPEC, open_deadline_s=3.0))
    far = ScriptedBackend({})
    rig.driver.add_tier(LaneSpec("far"), lambda: far)
    rig.plan.hang("open", cancellable=False)
    opening = asyncio.ensure_future(rig.driver.open(NAMESPACE))
    await rig.hung("open")
    assert rig.sink.states("far") == [UP]
    await rig.clock.advance(2.9)
    assert not opening.done()
    await rig.clock.advance(0.1)
    result = await opening
    assert isinstance(result["mem"], BackendError)
    assert "3 s" in str(result["mem"])
    # It opens after all: too late, so it is closed, and a new one takes its place.
    await rig.clock.advance(10.0)
    assert len(rig.made) == 1
    rig.plan.release()
    await rig.settle()
    await rig.clock.advance(0.001)
    assert [backend.calls["aclose"] for backend in rig.made] == [1, 0]
    assert rig.sink.states() == [DOWN, UP]
    assert await rig.close() == []


async def test_commands_submitted_before_open_wait_for_it_and_the_gates_own_are_passed_over() -> None:
    rig = Rig()
    rig.driver.submit([])
    rig.driver.submit([SlotsFreed(), FlushDone(1, 0, {})])
    op = rig.load(0)
    assert rig.sink.events == []
    await rig.driver.open(NAMESPACE)
    await rig.settle()
    assert rig.sink.outcomes(op) == (Outcome.failed("tier opening"),)
    assert await rig.close() == []


async def test_names_are_unique_and_a_driver_opens_once() -> None:
    rig = Rig()
    with pytest.raises(ValueError, match="two tiers are named 'mem'"):
        rig.driver.add_tier(SPEC, rig.make)
    await rig.driver.open(NAMESPACE)
    with pytest.raises(ClosedError):
        await rig.driver.open(NAMESPACE)
    assert await rig.close() == []
    with pytest.raises(ClosedError):
        await rig.driver.reopen(NAMESPACE, 1.0)


async def test_every_task_has_a_name_that_tells_whose_it_is() -> None:
    async with opened() as rig:
        rig.plan.hang("load")
        rig.plan.hang("store")
        rig.load(0)
        rig.store(0)
        await rig.settle()
        assert others() == ["tiering-alarms", "tiering-driver", "tiering-mem-load-1", "tiering-mem-store-2"]
    assert others() == []


# Close.


async def test_close_cancels_what_waits_and_lets_land_what_runs() -> None:
    rig = Rig()
    await rig.driver.open(NAMESPACE)
    rig.plan.latency("store", 1.0, times=2)
    rig.plan.hang("load")
    running = [rig.store(0), rig.store(1), rig.load(0), rig.load(1)]
    waiting = [rig.store(2), rig.load(2), rig.probe(2), rig.delete(2)]
    await rig.settle()
    closing = asyncio.ensure_future(rig.driver.aclose(4.0))
    await rig.settle()
    assert [rig.sink.outcomes(op) for op in waiting] == [(Outcome.CANCELLED,)] * 4
    assert rig.sink.states() == [UP, CLOSING]
    late = rig.load(3)
    await rig.settle()
    assert rig.sink.outcomes(late) == (Outcome.CANCELLED,)
    await rig.clock.advance(1.0)
    assert [rig.sink.outcomes(op) for op in running[:2]] == [(OK,)] * 2
    # The loads' own deadline.
    assert [rig.sink.outcomes(op) for op in running[2:]] == [(Outcome.failed("deadline"),)] * 2
    assert await closing == []
    assert rig.sink.states() == [UP, CLOSING, CLOSED]
    after = rig.load(3)
    await rig.settle()
    assert rig.sink.outcomes(after) == (Outcome.CANCELLED,)
    assert others() == []


async def test_close_cancels_what_still_runs_near_its_deadline() -> None:
    rig = Rig(spec=dataclasses.replace(SPEC, deadline_s=60.0))
    await rig.driver.open(NAMESPACE)
    rig.plan.hang("store")
    op = rig.store(0)
    await rig.hung("store")
    closing = asyncio.ensure_future(rig.driver.aclose(4.0))
    await rig.clock.advance(2.9)
    assert rig.sink.outcomes(op) is None
    await rig.clock.advance(0.1)
    assert rig.sink.outcomes(op) == (Outcome.CANCELLED,)
    assert await closing == []
    assert others() == []


async def test_hung_call_at_close_leaves_the_tier_abandoned_in_bounded_time() -> None:
    """Row 8: its operation never finishes, so its slots are never used again; the other tiers close."""
    rig = Rig()
    rig.driver.add_tier(LaneSpec("far"), lambda: ScriptedBackend({}))
    await rig.driver.open(NAMESPACE)
    rig.plan.hang("store", cancellable=False)
    hung = rig.store(0)
    await rig.hung("store")
    closing = asyncio.ensure_future(rig.driver.aclose(4.0))
    await rig.settle()
    assert rig.sink.states("far") == [UP, CLOSING, CLOSED]
    await rig.clock.advance(3.9)
    assert not closing.done()
    await rig.clock.advance(0.1)
    assert await closing == ["mem"]
    assert await rig.driver.aclose(1.0) == ["mem"]
    health = rig.driver.health()["mem"]
    assert health["state"] == "abandoned"
    assert health["reason"] == "hung at close; 1 operations never returned"
    rig.plan.release()
    await rig.clock.advance(10.0)
    assert rig.sink.outcomes(hung) is None
    assert rig.sink.states() == [UP, CLOSING, ABANDONED]
    assert others() == []


async def test_backend_whose_close_hangs_is_abandoned_too() -> None:
    rig = Rig()
    await rig.driver.open(NAMESPACE)
    rig.plan.hang("aclose", cancellable=False)
    closing = asyncio.ensure_future(rig.driver.aclose(2.0))
    await rig.hung("aclose")
    await rig.clock.advance(2.0)
    assert await closing == ["mem"]
    rig.plan.release()
    await rig.settle()
    assert others() == []


async def test_backend_whose_close_raises_is_reported() -> None:
    def broken(_: object) -> object:
        raise KeyError("aclose")

    rig = Rig(make=lambda: ScriptedBackend({"aclose": broken}))
    await rig.driver.open(NAMESPACE)
    assert await rig.driver.aclose(1.0) == []
    assert rig.kinds() == ["backend_defect"]
    assert rig.state == "closed"


async def test_close_while_a_trial_hangs_and_while_the_tier_is_down() -> None:
    """Rows 8, 9."""
    rig = Rig()
    rig.plan.fail_calls("open", lambda: BackendError("refused"), times=1)
    await rig.driver.open(NAMESPACE)
    rig.plan.hang("open", cancellable=False)
    await rig.clock.advance(0.5)
    assert rig.plan.hung("open") == 1
    closing = asyncio.ensure_future(rig.driver.aclose(2.0))
    await rig.clock.advance(2.0)
    assert await closing == ["mem"]
    rig.plan.heal()
    await rig.settle()
    assert rig.made[-1].calls["aclose"] == 1
    assert others() == []


async def test_close_is_idempotent_joins_and_works_without_open() -> None:
    rig = Rig()
    assert await rig.driver.aclose(1.0) == []
    with pytest.raises(ClosedError):
        await rig.driver.open(NAMESPACE)
    rig = Rig()
    await rig.driver.open(NAMESPACE)
    assert await asyncio.gather(*(rig.driver.aclose(1.0) for _ in range(3))) == [[], [], []]
    assert await rig.driver.aclose(1.0) == []
    assert rig.backend.calls["aclose"] == 1


# Reopen, for a reset.


async def test_reopen_serves_the_new_namespace_and_lets_nothing_of_the_old_past_the_switch() -> None:
    """Row 16: after the core's reset comes no verdict, scan or command of the backends before it."""
    opened_for: list[Namespace] = []

    class Recording(ScanningBackend):
        async def open(self, namespace: Namespace) -> None:
            opened_for.append(namespace)

    rig = Rig(make=lambda: Recording(3))
    await rig.driver.open(NAMESPACE)
    events_at_switch: list[int] = []

    def switch() -> None:
        assert rig.state == "opening"
        # A command of before the reset that the loop has not seen yet.
        rig.driver.submit([Probe(7000, "mem", (key(0),))])
        events_at_switch.append(len(rig.sink.events))

    assert await rig.driver.reopen(NEXT, 5.0, switch) == {"mem": None}
    assert opened_for == [NAMESPACE, NEXT]
    after = rig.sink.events[events_at_switch[0] :]
    assert [type(event).__name__ for event in after] == ["OpFinished", "TierScanned", "TierChanged"]
    assert rig.sink.outcomes(7000) == (Outcome.failed("tier opening"),)
    assert rig.sink.states() == [UP, OPENING, UP]
    assert await rig.close() == []


async def test_reopen_during_an_unfinished_scan_drops_it() -> None:
    """Row 16."""
    rig = Rig(make=lambda: ScanningBackend(20_000))
    opening = asyncio.ensure_future(rig.driver.open(NAMESPACE))
    seen = asyncio.Event()
    rig.sink.on_event = lambda event: seen.set() if isinstance(event, TierScanned) else None
    await seen.wait()
    mark: list[int] = []
    result = await rig.driver.reopen(NEXT, 5.0, lambda: mark.append(len(rig.sink.events)))
    assert result == {"mem": None}
    assert isinstance((await opening)["mem"], ClosedError)
    assert len(rig.sink.events[: mark[0]]) < 10
    entries = [
        e.handle for event in rig.sink.events[mark[0] :] if isinstance(event, TierScanned) for e in event.entries
    ]
    assert entries == [key(n) for n in range(20_000)]
    assert await rig.close() == []


async def test_scan_that_goes_on_in_spite_of_its_cancellation_is_not_reported_behind_the_switch() -> None:
    """Row 16."""
    release = asyncio.Event()

    class Stubborn(ScanningBackend):
        async def scan(self) -> AsyncIterator[list[ScanEntry]]:
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue
            yield [ScanEntry(b"stale", 300)]

    made = iter([Stubborn(0), ScanningBackend(1)])
    rig = Rig(make=lambda: next(made))
    opening = asyncio.ensure_future(rig.driver.open(NAMESPACE))
    await rig.settle()
    reopening = asyncio.ensure_future(rig.driver.reopen(NEXT, 5.0))
    await rig.settle()
    release.set()
    assert await reopening == {"mem": None}
    assert isinstance((await opening)["mem"], ClosedError)
    assert rig.sink.scanned() == [key(0)]
    assert await rig.close() == []


async def test_of_two_reopens_that_wait_only_the_later_one_opens() -> None:
    """Row 16."""
    served: list[Namespace] = []

    class Recording(ScriptedBackend):
        async def open(self, namespace: Namespace) -> None:
            served.append(namespace)

    release = asyncio.Event()

    class Slow(Recording):
        async def aclose(self, deadline_s: float) -> None:
            await release.wait()

    made = iter([Slow({}), Recording({})])
    rig = Rig(make=lambda: next(made))
    await rig.driver.open(NAMESPACE)
    third = dataclasses.replace(NEXT, digest=b"3" * 32)
    first = asyncio.ensure_future(rig.driver.reopen(NEXT, 5.0))
    await rig.settle()
    second = asyncio.ensure_future(rig.driver.reopen(third, 5.0))
    await rig.settle()
    release.set()
    assert isinstance((await first)["mem"], ClosedError)
    assert await second == {"mem": None}
    assert served == [NAMESPACE, third]
    assert await rig.close() == []


async def test_reopen_ends_what_waits_and_what_runs() -> None:
    rig = Rig()
    await rig.driver.open(NAMESPACE)
    rig.plan.hang("store")
    running, waiting = [rig.store(0), rig.store(1)], rig.store(2)
    await rig.hung("store", 2)
    reopening = asyncio.ensure_future(rig.driver.reopen(NEXT, 4.0))
    await rig.settle()
    assert rig.sink.outcomes(waiting) == (Outcome.failed("tier opening"),)
    await rig.clock.advance(3.0)
    assert await reopening == {"mem": None}
    assert [rig.sink.outcomes(op) for op in running] == [(Outcome.CANCELLED,)] * 2
    rig.plan.release()
    op = rig.store(0)
    await rig.settle()
    assert rig.sink.outcomes(op) == (OK,)
    assert await rig.close() == []


async def test_hung_backend_is_abandoned_by_a_reopen_and_the_others_go_on() -> None:
    """Row 8: a reset is bounded."""
    rig = Rig()
    rig.driver.add_tier(LaneSpec("far"), lambda: ScriptedBackend({}))
    await rig.driver.open(NAMESPACE)
    rig.plan.hang("load", cancellable=False)
    hung = rig.load(0)
    await rig.hung("load")
    reopening = asyncio.ensure_future(rig.driver.reopen(NEXT, 2.0))
    await rig.clock.advance(2.0)
    result = await reopening
    assert result["far"] is None
    assert isinstance(result["mem"], BackendError | TimeoutError)
    await rig.settle()
    assert rig.sink.states() == [UP, OPENING, ABANDONED]
    assert rig.sink.states("far") == [UP, OPENING, UP]
    # Commands that still come are answered; the hung one is not, even when it lands.
    late = rig.probe(0)
    rig.plan.release()
    await rig.settle()
    assert rig.sink.outcomes(late) == (Outcome.CANCELLED,)
    assert rig.sink.outcomes(hung) is None
    assert isinstance((await rig.driver.reopen(NEXT, 2.0))["mem"], ClosedError)
    assert await rig.close() == ["mem"]
    await rig.settle()
    assert others() == []


async def test_reopen_returns_in_time_and_a_slow_open_goes_on() -> None:
    rig = Rig()
    await rig.driver.open(NAMESPACE)
    rig.plan.latency("open", 3.0, times=1)
    reopening = asyncio.ensure_future(rig.driver.reopen(NEXT, 2.0))
    await rig.clock.advance(2.0)
    assert isinstance((await reopening)["mem"], TimeoutError)
    assert rig.state == "opening"
    await rig.clock.advance(1.0)
    assert rig.state == "up"
    assert await rig.close() == []


async def test_later_reopen_overtakes_and_close_overtakes_both() -> None:
    rig = Rig()
    await rig.driver.open(NAMESPACE)
    rig.plan.latency("open", 1.0)
    first = asyncio.ensure_future(rig.driver.reopen(NAMESPACE, 5.0))
    await rig.settle()
    second = asyncio.ensure_future(rig.driver.reopen(NEXT, 5.0))
    await rig.clock.advance(1.0)
    assert isinstance((await first)["mem"], ClosedError)
    assert await second == {"mem": None}
    rig.plan.hang("store")
    rig.store(0)
    await rig.hung("store")
    third = asyncio.ensure_future(rig.driver.reopen(NAMESPACE, 4.0))
    await rig.settle()
    assert await rig.close(2.0) == []
    assert isinstance((await third)["mem"], ClosedError)
    assert rig.sink.states()[-2:] == [CLOSING, CLOSED]
    assert others() == []
