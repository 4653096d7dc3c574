"""Memory from the kernel: how much there is, mapped privately or as a memfd, in huge pages where they can be had."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tiering.errors import ConfigError
from tiering.support.units import format_bytes

_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14; the ``mmap`` module has no name for it."""


def sealed_memfd(size_bytes: int) -> int:
    """A descriptor of ``size_bytes`` of shared memory that no name leads to; the caller closes it."""
    fd = os.memfd_create("kvtiering-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        # A rank that could shrink it would kill the others with SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise _too_large(size_bytes, _reason(error)) from error
    return fd


def map_memory(size_bytes: int, fd: int | None = None) -> mmap.mmap:
    """``size_bytes`` of zeroed private memory, or of the memfd ``fd``. Raises ``ConfigError`` if they cannot be had."""
    try:
        if fd is None:
            return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED)
    except OSError as error:
        raise _too_large(size_bytes, _reason(error)) from error


def ask_for_huge_pages(mapping: mmap.mmap, first: npt.NDArray[np.uint8], *, fresh: bool) -> bool:
    """Ask before the first touch, touch, and look what came: madvise succeeds also where the kernel will not follow it."""
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        # A kernel without transparent huge pages.
        return False
    if fresh:
        first[0] = 0
    else:
        # Reading is enough in shared memory, which may hold another rank's blocks; private memory needs the write.
        first[:1].tobytes()
    return _huge_page_bytes(first.ctypes.data) > 0


def populate(piece: npt.NDArray[np.uint8]) -> int:
    """Make the kernel take the pages of ``piece``; 0 or an errno. Through ctypes, which lets go of the GIL."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    failed = libc.madvise(ctypes.c_void_p(piece.ctypes.data), ctypes.c_size_t(piece.nbytes), _MADV_POPULATE_WRITE)
    return ctypes.get_errno() if failed else 0


def refuse_more_than_available(wanted_bytes: int) -> None:
    """Raise ``ConfigError`` if the machine, or the container's limit, has not ``wanted_bytes`` of memory to give."""
    # mmap and memfd both promise memory that is not there; the promise is broken by the OOM killer, minutes later.
    available_bytes = _available_bytes()
    if available_bytes is not None and wanted_bytes > available_bytes:
        raise _too_large(wanted_bytes, "the machine or its container has not that much memory")


def _too_large(wanted_bytes: int, why: str) -> ConfigError:
    available_bytes = _available_bytes()
    available = "unknown" if available_bytes is None else f"{format_bytes(available_bytes)} ({available_bytes} bytes)"
    return ConfigError(
        f"primary.capacity: cannot map {format_bytes(wanted_bytes)} ({wanted_bytes} bytes): {why}; "
        f"available: {available}. Lower primary.capacity or free memory"
    )


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _available_bytes() -> int | None:
    """What the kernel thinks can be had without swapping, and no more than the container's limit; None: unknown."""
    found = [int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:")]
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        found.extend(int(line) for line in _lines(limit) if line.strip().isdecimal())
    return min(found, default=None)


def _huge_page_bytes(address: int) -> int:
    """Bytes in huge pages of the mapping that holds ``address``, from /proc/self/smaps."""
    inside = False
    total_bytes = 0
    for line in _lines("/proc/self/smaps"):
        name, *rest = line.split()
        if not name.endswith(":"):
            if inside:
                break
            first, last = (int(part, 16) for part in name.split("-"))
            inside = first <= address < last
        elif inside and name in ("AnonHugePages:", "ShmemPmdMapped:"):
            total_bytes += int(rest[0]) * 1024
    return total_bytes


def _lines(path: str) -> Iterator[str]:
    """The lines of a kernel file, lazily; none where the kernel has not got it."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            yield from file
    except OSError:
        return
