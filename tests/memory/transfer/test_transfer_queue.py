"""The queue over a device whose every step the test decides: order, pools, and what its errors become."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.memory.transfer.rig import Part, store
from tiering.errors import ClosedError
from tiering.memory.arena import Arena, PoolShape
from tiering.memory.transfer.blocks import DeviceBlocks, Placement
from tiering.memory.transfer.device import CopyError, Move
from tiering.memory.transfer.engine import STREAMS_MAX, QueuedEngine
from tiering.memory.transfer.spec import STORE

JOB = store(Part((1,), (1,)))


class StepEvent:
    def __init__(self, name: int) -> None:
        self.name = name
        self.passed = False
        self.error = ""
        self.waits = 0

    def done(self) -> bool:
        if self.error:
            raise CopyError(self.error)
        return self.passed

    def wait(self) -> None:
        self.waits += 1
        self.passed = True
        self.done()


class StepDevice:
    """Streams and events that only write down what they are given. ``fails`` names calls that fail."""

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.events: list[StepEvent] = []
        self.streams = 0
        self.fails: set[str] = set()
        self.closed = 0

    def stream(self) -> StepStream:
        self.check("stream")
        self.streams += 1
        return StepStream(self, self.streams)

    def event(self) -> StepEvent:
        self.events.append(StepEvent(len(self.events)))
        return self.events[-1]

    def elapsed_s(self, start: StepEvent, end: StepEvent) -> float:
        self.check("elapsed")
        return 0.25

    def close(self) -> None:
        self.closed += 1

    def check(self, call: str) -> None:
        if call in self.fails:
            raise CopyError(f"{call} refused")


class StepStream:
    def __init__(self, device: StepDevice, name: int) -> None:
        self._device, self._name = device, name

    def follow_caller(self) -> None:
        self._write("follow_caller")

    def follow(self, event: StepEvent) -> None:
        self._write("follow", event.name)

    def record(self, event: StepEvent) -> None:
        event.passed, event.error = False, ""
        self._write("record", event.name)

    def copy(self, move: Move) -> None:
        self._write("copy", move.plan.bytes)

    def _write(self, call: str, *what: object) -> None:
        self._device.check(call)
        self._device.log.append((self._name, call, *what))


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena([PoolShape(4, 4096)])
    yield made
    made.close()
    assert not made.quarantined


@pytest.fixture
def device() -> StepDevice:
    return StepDevice()


@pytest.fixture
def engine(arena: Arena, device: StepDevice) -> Iterator[QueuedEngine[StepEvent]]:
    blocks = DeviceBlocks(((torch.zeros(4, 100, dtype=torch.uint8),),))
    made = QueuedEngine(STORE, arena, Placement((1,)).shapes(arena, blocks, 0, join_slots=True), device)
    yield made
    made.close()
    assert device.closed == 1


def test_each_job_follows_the_caller_and_the_job_before_it(engine: QueuedEngine[StepEvent], device: StepDevice) -> None:
    """row 26: a copy begins after the kernels that wrote its blocks, and after the copies queued before it."""
    engine.submit(1, JOB)
    engine.submit(2, JOB)
    assert [entry[1:] for entry in device.log] == [
        ("follow_caller",), ("record", 0), ("copy", 100), ("record", 1),
        ("follow_caller",), ("follow", 1), ("record", 2), ("copy", 100), ("record", 3),
    ]  # fmt: skip


def test_only_the_head_is_looked_at(engine: QueuedEngine[StepEvent], device: StepDevice) -> None:
    engine.submit(1, JOB)
    engine.submit(2, JOB)
    engine.submit(3, store(Part()))
    device.events[3].passed = True
    assert engine.poll() == []
    device.events[1].passed = True
    assert [(result.job_id, result.seconds) for result in engine.poll()] == [(1, 0.25), (2, 0.25), (3, 0.0)]
    assert [event.waits for event in device.events] == [0, 0, 0, 0]


def test_streams_and_events_are_used_again(engine: QueuedEngine[StepEvent], device: StepDevice) -> None:
    for job_id in range(0, 100, 2):
        engine.submit(job_id, JOB)
        engine.submit(job_id + 1, JOB)
        engine.wait([job_id + 1])
        for event in device.events:
            event.passed = True
        assert [result.job_id for result in engine.poll()] == [job_id, job_id + 1]
    assert device.streams == STREAMS_MAX
    assert len(device.events) == 4
    # With nothing in flight there is nothing to follow.
    assert sum(entry[1] == "follow" for entry in device.log) == 50


@pytest.mark.parametrize("call", ["follow_caller", "copy"])
def test_a_refused_call_fails_the_job_once_what_was_queued_has_ended(
    engine: QueuedEngine[StepEvent], device: StepDevice, call: str
) -> None:
    device.fails = {call}
    engine.submit(1, JOB)
    device.fails = set()
    engine.submit(2, JOB)
    assert device.events[1].passed is False
    assert engine.poll() == []
    for event in device.events:
        event.passed = True
    first, second = engine.poll()
    assert (first.job_id, first.success, first.bytes, first.error) == (1, False, 0, f"{call} refused")
    assert (second.job_id, second.success, second.bytes) == (2, True, 100)


@pytest.mark.parametrize("call", ["stream", "record"])
def test_a_device_that_takes_nothing_fails_the_job_at_once(
    engine: QueuedEngine[StepEvent], device: StepDevice, call: str
) -> None:
    device.fails = {call}
    engine.submit(1, JOB)
    engine.wait([1])
    (result,) = engine.poll()
    assert (result.success, result.error) == (False, f"{call} refused")
    device.fails = set()


def test_an_error_of_the_device_fails_every_job_it_meets(engine: QueuedEngine[StepEvent], device: StepDevice) -> None:
    for job_id in range(3):
        engine.submit(job_id, JOB)
    for event in device.events:
        event.error = "an illegal memory access was encountered"
    engine.wait([2])
    results = engine.poll()
    assert [(result.job_id, result.success, result.bytes) for result in results] == [(n, False, 0) for n in range(3)]
    assert {result.error for result in results} == {"an illegal memory access was encountered"}


def test_a_clock_that_fails_fails_the_job(engine: QueuedEngine[StepEvent], device: StepDevice) -> None:
    engine.submit(1, JOB)
    device.events[1].passed = True
    device.fails = {"elapsed"}
    assert [(result.success, result.error) for result in engine.poll()] == [(False, "elapsed refused")]


def test_wait_waits_on_the_youngest_alone(engine: QueuedEngine[StepEvent], device: StepDevice) -> None:
    for job_id in range(3):
        engine.submit(job_id, JOB)
    engine.submit(3, store(Part()))
    engine.wait([0, 3])
    assert [event.waits for event in device.events] == [0, 0, 0, 0, 0, 1]


def test_close_waits_for_all_and_closes_the_device(engine: QueuedEngine[StepEvent], device: StepDevice) -> None:
    for job_id in range(3):
        engine.submit(job_id, JOB)
    engine.close()
    assert device.closed == 1
    with pytest.raises(ClosedError):
        engine.submit(4, JOB)
    assert [result.success for result in engine.poll()] == [True, True, True]
