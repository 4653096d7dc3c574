"""The stand-in on a machine without CUDA: the same streams and events, carried out by one thread in the order queued."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tiering.errors import ShapeError
from tiering.memory.arena import Arena, Rows
from tiering.memory.transfer.blocks import DeviceBlocks, Placement
from tiering.memory.transfer.device import CopyError, Move
from tiering.memory.transfer.engine import QueuedEngine
from tiering.memory.transfer.plan import Runs
from tiering.memory.transfer.spec import STORE, TransferType

log = logging.getLogger("tiering.transfer")

HELD_BYTES_MAX: Final = 64 << 10
"""Up to here a contiguous range is copied without letting go of the GIL: it takes some 8 us, and getting the GIL back
from a busy thread takes up to 5 ms, a switch interval. Larger and strided copies let go of it."""

EXIT_STOP_S: Final = 2.0
"""How long an interpreter that exits waits for the thread of an engine that nobody closed."""


class CpuEvent:
    """A point in the thread's queue."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self._error = ""
        self.passed_s = 0.0

    def done(self) -> bool:
        if not self._passed.is_set():
            return False
        if self._error:
            raise CopyError(self._error)
        return True

    def wait(self) -> None:
        self._passed.wait()
        self.done()

    def renew(self) -> None:
        self._passed.clear()
        self._error = ""

    def pass_(self, error: str) -> None:
        self.passed_s = time.perf_counter()
        self._error = error
        self._passed.set()


class CpuDevice:
    """One daemon thread that copies; it ends with ``close``, or with the interpreter.

    All its streams are one queue, so an event that a stream follows has always been passed before: ``follow`` has
    nothing to do. A caller's writes are there when it submits: neither has ``follow_caller``.
    If the thread dies, whatever was queued or is queued later ends with an error that says so, after one log line.
    """

    def __init__(self, direction: TransferType, blocks: DeviceBlocks) -> None:
        self._store = direction == STORE
        self._name = f"tiering-transfer-{direction[0].value}-{direction[1].value}"
        self._storages = [_bytes_of(storage) for storage in blocks.storages()]
        self._ops: deque[CpuEvent | Move] = deque()
        """The head is taken off after it was carried out: a thread that dies in between loses nothing."""
        self._changed = threading.Condition()
        """Guards what follows, and the deque."""
        self._stopping = False
        self._death = ""
        self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
        self._thread.start()
        atexit.register(self._stop, EXIT_STOP_S)

    def stream(self) -> CpuDevice:
        return self

    def event(self) -> CpuEvent:
        return CpuEvent()

    def elapsed_s(self, start: CpuEvent, end: CpuEvent) -> float:
        return end.passed_s - start.passed_s

    def follow_caller(self) -> None:
        return

    def follow(self, event: CpuEvent) -> None:
        return

    def record(self, event: CpuEvent) -> None:
        event.renew()
        self._put(event)

    def copy(self, move: Move) -> None:
        self._put(move)

    def close(self) -> None:
        self._stop(None)
        # The engine's blocks are its own again.
        self._storages.clear()

    def _put(self, op: CpuEvent | Move) -> None:
        with self._changed:
            if not self._death:
                self._ops.append(op)
                self._changed.notify()
            elif isinstance(op, CpuEvent):
                op.pass_(self._death)

    def _stop(self, deadline_s: float | None) -> None:
        atexit.unregister(self._stop)
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(deadline_s)

    def _main(self) -> None:
        try:
            self._run()
        except BaseException as error:  # whatever ends a thread: nobody else would hear of it
            self._die(error)

    def _run(self) -> None:
        error = ""
        while True:
            with self._changed:
                while not self._ops and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    # The engine has waited for its jobs. Without it, at the interpreter's exit, nobody wants them.
                    return
                op = self._ops[0]
            if isinstance(op, CpuEvent):
                op.pass_(error)
                error = ""
            else:
                error = self._carry_out(op) or error
            # Forgets the move, and with it the arena's memory, before it waits for the next.
            del op
            with self._changed:
                self._ops.popleft()

    def _die(self, error: BaseException) -> None:
        with self._changed:
            self._death = f"the thread {self._name} died of {error!r}; open the engines anew"
            left, self._ops = self._ops, deque()
        log.error("%s; every copy it had, or gets, fails", self._death, exc_info=error)
        for op in left:
            if isinstance(op, CpuEvent):
                op.pass_(self._death)

    def _carry_out(self, move: Move) -> str:
        try:
            for runs in move.plan.runs:
                self._copy(runs, self._storages[runs.strip.storage], move.pools[runs.group].reshape(-1))
        except Exception as error:
            return f"{self._name}: {type(error).__name__}: {error}"
        return ""

    def _copy(self, runs: Runs, device: Rows, pool: Rows) -> None:
        strip = runs.strip
        device_strides = (strip.block_stride, strip.row_stride, 1)
        pool_strides = (runs.pitch, strip.row_bytes, 1)
        device_bytes, pool_bytes = device.data, pool.data
        contiguous = strip.rows == 1 and strip.row_bytes <= HELD_BYTES_MAX
        for at, to, blocks in zip(
            runs.device_offsets.tolist(), runs.slot_offsets.tolist(), runs.blocks.tolist(), strict=True
        ):
            if contiguous and blocks == 1:
                here, there = device_bytes[at : at + strip.row_bytes], pool_bytes[to : to + strip.row_bytes]
                if self._store:
                    there[:] = here
                else:
                    here[:] = there
                continue
            shape = (blocks, strip.rows, strip.row_bytes)
            # numpy checks that the whole lies inside the buffer.
            one: npt.NDArray[Any] = np.ndarray(shape, np.uint8, device, at, device_strides)
            other: npt.NDArray[Any] = np.ndarray(shape, np.uint8, pool, to, pool_strides)
            np.copyto(other, one) if self._store else np.copyto(one, other)


class CpuTransferEngine(QueuedEngine[CpuEvent]):
    """A ``TransferEngine`` between CPU tensors and the arena, on a thread of its own. One copy a byte."""

    def __init__(
        self, direction: TransferType, arena: Arena, blocks: DeviceBlocks, placement: Placement, rank: int = 0
    ) -> None:
        """Raises ``ShapeError`` if the parts do not fit each other, ``ClosedError`` if the arena is closed."""
        if blocks.device.type != "cpu":
            raise ShapeError(f"CpuTransferEngine copies CPU tensors; these blocks are on {blocks.device}")
        shapes = placement.shapes(arena, blocks, rank, join_slots=True)
        super().__init__(direction, arena, shapes, CpuDevice(direction, blocks))


def _bytes_of(storage: torch.UntypedStorage) -> Rows:
    array: Rows = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return array
