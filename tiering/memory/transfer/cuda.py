"""Transfer engines on CUDA: torch's streams and events, and one batched copy a job where the driver has it.

With ROCm, whose ``hipMemcpyBatchAsync`` takes no attributes and is missing or unfinished in part of the versions around,
and with CUDA before 12.8, each contiguous range is a copy of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tiering.errors import ShapeError
from tiering.memory.arena import Arena
from tiering.memory.transfer.blocks import DeviceBlocks, Placement
from tiering.memory.transfer.device import CopyError, Move
from tiering.memory.transfer.driver import (
    SOURCE_IN_ANY_ORDER,
    SOURCE_IN_STREAM_ORDER,
    BatchCopy,
    find_batch_copy,
)
from tiering.memory.transfer.engine import QueuedEngine
from tiering.memory.transfer.plan import flat
from tiering.memory.transfer.spec import STORE, TransferType

_MS_PER_S: Final = 1000.0

_cuda: Any = torch.cuda
"""torch types some of it only."""


class CudaEvent:
    def __init__(self) -> None:
        self.event = _cuda.Event(enable_timing=True)

    def done(self) -> bool:
        with _named("cudaEventQuery"):
            return bool(self.event.query())

    def wait(self) -> None:
        with _named("cudaEventSynchronize"):
            self.event.synchronize()


class CudaStream:
    """One of torch's streams, on the device of the blocks."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._stream = _cuda.Stream(device.device)
        self._fence = _cuda.Event()
        """Recorded anew for each job: a wait counts from when it was queued."""

    def follow_caller(self) -> None:
        with _named("cudaEventRecord"):
            self._fence.record(torch.cuda.current_stream(self._device.device))
            self._stream.wait_event(self._fence)

    def follow(self, event: CudaEvent) -> None:
        with _named("cudaStreamWaitEvent"):
            self._stream.wait_event(event.event)

    def record(self, event: CudaEvent) -> None:
        with _named("cudaEventRecord"):
            event.event.record(self._stream)

    def copy(self, move: Move) -> None:
        # Makes the device current too, with its context.
        with torch.cuda.stream(self._stream):
            if self._device.batch is not None:
                self._copy_batch(move, self._device.batch)
            else:
                self._copy_each(move)

    def _copy_batch(self, move: Move, batch: BatchCopy) -> None:
        on_device, in_slots, sizes = self._device.addresses(move)
        if self._device.store:
            batch(in_slots, on_device, sizes, self._stream.cuda_stream)
        else:
            batch(on_device, in_slots, sizes, self._stream.cuda_stream)

    def _copy_each(self, move: Move) -> None:
        with _named("cudaMemcpyAsync"):
            for runs in move.plan.runs:
                storage = self._device.storages[runs.strip.storage]
                pool = torch.from_numpy(move.pools[runs.group]).view(-1)
                for at, to, size in zip(*(numbers.tolist() for numbers in flat(runs)), strict=True):
                    here, there = storage[at : at + size], pool[to : to + size]
                    if self._device.store:
                        there.copy_(here, non_blocking=True)
                    else:
                        here.copy_(there, non_blocking=True)


class CudaDevice:
    """What an engine of one direction uses of a CUDA device."""

    def __init__(self, direction: TransferType, blocks: DeviceBlocks) -> None:
        self.store = direction == STORE
        self.device = blocks.device
        self.storages = [
            torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage) for storage in blocks.storages()
        ]
        # A load's slots are leased and long filled: their bytes may be read early. A store's blocks were perhaps written
        # by the kernel just before.
        order = SOURCE_IN_STREAM_ORDER if self.store else SOURCE_IN_ANY_ORDER
        with torch.cuda.device(self.device):
            self.batch: BatchCopy | None = find_batch_copy(self.device, order)

    def stream(self) -> CudaStream:
        with _named("cudaStreamCreate"):
            return CudaStream(self)

    def event(self) -> CudaEvent:
        return CudaEvent()

    def elapsed_s(self, start: CudaEvent, end: CudaEvent) -> float:
        with _named("cudaEventElapsedTime"):
            return float(start.event.elapsed_time(end.event)) / _MS_PER_S

    def close(self) -> None:
        self.storages.clear()

    def addresses(self, move: Move) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Of each copy: where on the device, where in the slots, and how many bytes."""
        on_device, in_slots, sizes = [], [], []
        for runs in move.plan.runs:
            at, to, size = flat(runs)
            on_device.append(at + self.storages[runs.strip.storage].data_ptr())
            in_slots.append(to + move.pools[runs.group].ctypes.data)
            sizes.append(size)
        first, second, third = (np.concatenate(part).astype(np.uint64) for part in (on_device, in_slots, sizes))
        return first, second, third


class CudaTransferEngine(QueuedEngine[CudaEvent]):
    """A ``TransferEngine`` between blocks on a CUDA device and the arena.

    ``submit`` returns at once if the arena is pinned; from or to pageable memory CUDA copies parts of it within the call.
    Close it before the arena is unpinned.
    """

    def __init__(
        self, direction: TransferType, arena: Arena, blocks: DeviceBlocks, placement: Placement, rank: int = 0
    ) -> None:
        """Raises ``ShapeError`` if the parts do not fit each other, ``ClosedError`` if the arena is closed."""
        if blocks.device.type != "cuda":
            raise ShapeError(f"CudaTransferEngine copies CUDA tensors; these blocks are on {blocks.device}")
        # CUDA refuses a copy that reaches from one registered piece into the next; pieces are whole slots.
        shapes = placement.shapes(arena, blocks, rank, join_slots=False)
        super().__init__(direction, arena, shapes, CudaDevice(direction, blocks))


@contextmanager
def _named(call: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # all of torch's, whatever the version calls them
        raise CopyError(f"{call}: {error}") from error
