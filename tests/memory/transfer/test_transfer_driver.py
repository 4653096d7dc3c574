"""The batched copy's calling convention, against a C function with the driver's signature that really copies."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from tiering.memory.transfer.device import CopyError
from tiering.memory.transfer.driver import SOURCE_IN_ANY_ORDER, SOURCE_IN_STREAM_ORDER, BatchCopy

# CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
#     CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, size_t *failIdx, CUstream hStream): CUDA 12.8.
NUMBERS = ctypes.POINTER(ctypes.c_uint64)
SIGNATURE = ctypes.CFUNCTYPE(
    ctypes.c_int, NUMBERS, NUMBERS, NUMBERS, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint32), NUMBERS, ctypes.c_uint64,
    NUMBERS, ctypes.c_uint64,
)  # fmt: skip
INVALID_VALUE = 1


class Driver:
    """A driver of main memory. It refuses copies of 0 bytes, as CUDA does."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[int], list[int], int]] = []
        self.function = SIGNATURE(self._copy)
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value or 0

    def _copy(
        self,
        dsts: Any,
        srcs: Any,
        sizes: Any,
        count: int,
        attrs: Any,
        starts: Any,
        num_attrs: int,
        failed: Any,
        stream: int,
    ) -> int:
        # srcAccessOrder, two locations of (type, id), flags: six words.
        self.calls.append((count, [attrs[n] for n in range(6)], [starts[n] for n in range(num_attrs)], stream))
        for n in range(count):
            if not sizes[n]:
                failed[0] = n
                return INVALID_VALUE
            ctypes.memmove(dsts[n], srcs[n], sizes[n])
        return 0


def test_one_call_copies_all_ranges() -> None:
    driver, source = Driver(), np.arange(256, dtype=np.uint8)
    target = np.zeros(256, np.uint8)
    batch = BatchCopy(driver.address, SOURCE_IN_ANY_ORDER)
    at, to, sizes = (np.array(values, np.uint64) for values in ([0, 100, 7], [200, 0, 64], [5, 50, 1]))
    batch(to + target.ctypes.data, at + source.ctypes.data, sizes, 0x1234)
    want = bytearray(256)
    want[200:205], want[0:50], want[64] = bytes(range(5)), bytes(range(100, 150)), 7
    assert target.tobytes() == bytes(want)
    assert driver.calls == [(3, [3, 0, 0, 0, 0, 0], [0], 0x1234)]
    BatchCopy(driver.address, SOURCE_IN_STREAM_ORDER)(to + target.ctypes.data, at + source.ctypes.data, sizes, 1)
    assert driver.calls[1][1] == [1, 0, 0, 0, 0, 0]


def test_a_refused_batch_names_the_copy() -> None:
    driver, memory = Driver(), np.zeros(64, np.uint8)
    address = np.full(3, memory.ctypes.data, np.uint64)
    with pytest.raises(CopyError, match=r"cuMemcpyBatchAsync of 3 copies: .*1.*, at copy 2"):
        BatchCopy(driver.address, 1)(address, address, np.array([1, 1, 0], np.uint64), 1)
