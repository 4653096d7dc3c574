"""The few CUDA calls that torch does not make for us, behind typed functions.

``cuMemcpyBatchAsync`` comes from cuda-bindings as an address, not as its Python function: that one takes lists of objects,
one a copy, and has another signature in each major version. The address that is asked for as of CUDA 12.8 has one
signature in every later driver too, takes plain arrays, and is called without the GIL.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tiering.errors import TieringError
from tiering.memory.transfer.device import CopyError

BATCH_SINCE: Final = 12080
"""CUDA 12.8, as the driver counts versions."""

SOURCE_IN_STREAM_ORDER: Final = 1
SOURCE_IN_ANY_ORDER: Final = 3
"""CU_MEMCPY_SRC_ACCESS_ORDER_*: in any order the source may be read before what the stream still waits for."""

_HOST_POINTERS_ATTRIBUTE: Final = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM."""

_SUCCESS: Final = 0
_REGISTER_PORTABLE: Final = 1
"""Pinned for every context of the process."""

_cuda: Any = torch.cuda
"""torch types some of it only."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. The hints are for managed memory alone and stay empty."""

    _fields_ = (
        ("source_order", ctypes.c_uint),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


_SIGNATURE: Final = ctypes.CFUNCTYPE(
    ctypes.c_uint,  # CUresult
    ctypes.c_void_p,  # destinations
    ctypes.c_void_p,  # sources
    ctypes.c_void_p,  # sizes
    ctypes.c_size_t,  # their number
    ctypes.c_void_p,  # attributes
    ctypes.c_void_p,  # from which copy on each of them applies
    ctypes.c_size_t,  # their number
    ctypes.c_void_p,  # which copy failed, if one did
    ctypes.c_void_p,  # stream
)


class BatchCopy:
    """``cuMemcpyBatchAsync``: any number of copies in one call, which queues them all on a stream."""

    def __init__(self, address: int, source_order: int) -> None:
        """``address`` of the function with the signature of CUDA 12.8; ``source_order``: ``SOURCE_IN_...``."""
        self._function = _SIGNATURE(address)
        self._attributes = _Attributes(source_order=source_order)
        self._applies_from = ctypes.c_size_t(0)

    def __call__(
        self,
        destinations: npt.NDArray[np.uint64],
        sources: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        stream: int,
    ) -> None:
        """Addresses and bytes, arrays of one length, at least 1; the arrays are free on return. Raises ``CopyError``."""
        # Names, so that whatever is converted lives until the call returns.
        to, at, counts = (np.ascontiguousarray(numbers, np.uint64) for numbers in (destinations, sources, sizes))
        failed = ctypes.c_size_t(0)
        result: int = self._function(
            to.ctypes.data,
            at.ctypes.data,
            counts.ctypes.data,
            len(counts),
            ctypes.addressof(self._attributes),
            ctypes.addressof(self._applies_from),
            1,
            ctypes.addressof(failed),
            stream,
        )
        if result != _SUCCESS:
            which = f", at copy {failed.value}" if failed.value < len(sizes) else ""
            raise CopyError(f"cuMemcpyBatchAsync of {len(sizes)} copies: {_text_of(result)}{which}")


def find_batch_copy(device: torch.device, source_order: int) -> BatchCopy | None:
    """The batched copy for ``device`` (a tensor's, with an index), or None where there is none.

    That is with ROCm, without cuda-bindings, with a driver before CUDA 12.8, and on devices that do not know pinned
    memory by its host address. The device's context must be current in the calling thread.
    """
    driver = _bindings()
    if driver is None or torch.version.hip is not None:
        return None
    try:
        status, usable = driver.cuDeviceGetAttribute(
            driver.CUdevice_attribute(_HOST_POINTERS_ATTRIBUTE), driver.CUdevice(device.index)
        )
        if int(status) != _SUCCESS or not usable:
            return None
        status, address, _ = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", BATCH_SINCE, 0)
    except RuntimeError:
        # The bindings found no driver, or one that lacks the call that asks.
        return None
    return BatchCopy(int(address), source_order) if int(status) == _SUCCESS and address else None


class CudaRegistrar:
    """Pins and unpins ranges of memory for CUDA (with ROCm for HIP): a ``tiering.memory.pinning.Registrar``.

    Both calls block without the GIL. A failed registration leaves its error behind in the CUDA runtime, per thread, where
    the next kernel launch would trip over it: register from a thread that launches none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, size_bytes: int) -> None:
        """Pin; both are multiples of 4096. Raises ``TieringError`` with CUDA's reason."""
        with self._named("cudaHostRegister"):
            self._check(_cuda.cudart().cudaHostRegister(address, size_bytes, _REGISTER_PORTABLE))

    def unregister(self, address: int, size_bytes: int) -> None:
        """Unpin what ``register`` pinned, once the device has done all that it was given. Raises ``TieringError``."""
        with self._named("cudaHostUnregister"):
            torch.cuda.synchronize(self._device)
            self._check(_cuda.cudart().cudaHostUnregister(address))

    @contextmanager
    def _named(self, call: str) -> Iterator[None]:
        try:
            with torch.cuda.device(self._device):
                yield
        except RuntimeError as error:
            raise TieringError(f"{call} on {self._device}: {error}") from error

    def _check(self, result: Any) -> None:
        if int(result) != _SUCCESS:
            raise RuntimeError(f"{_cuda.cudart().cudaGetErrorString(result)} ({int(result)})")


def _text_of(result: int) -> str:
    driver = _bindings()
    unnamed = f"CUDA error {result}"
    if driver is None:
        return unnamed
    try:
        status, text = driver.cuGetErrorString(driver.CUresult(result))
    except (RuntimeError, ValueError):
        # No driver, or one with an error that the bindings do not know yet.
        return unnamed
    return f"{text.decode(errors='replace')} ({result})" if int(status) == _SUCCESS else unnamed


def _bindings() -> Any | None:
    """cuda-bindings, where it is installed: an optional dependency without type hints."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None
