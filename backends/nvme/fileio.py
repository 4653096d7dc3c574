"""The system calls of this backend, in one object so that a test can make any of them fail, and what loops over them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from backends.nvme.limits import PAGE_BYTES

_KEEP_SIZE: Final = 0x01
_PUNCH_HOLE: Final = 0x02
_NOT_SUPPORTED: Final = (errno.EOPNOTSUPP, errno.ENOSYS)

DESCRIPTORS_MAX: Final = 256


class FileIO:
    """Thin and stateless. Every method raises ``OSError`` as the system call does, and may be called from any thread."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fallocate = libc.fallocate
        self._fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        self._fallocate.restype = ctypes.c_int

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags, 0o644)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, length: int) -> bool:
        """Reserve space on the device without changing the file's size. False where the filesystem cannot."""
        return self._call_fallocate(fd, _KEEP_SIZE, offset, length)

    def punch(self, fd: int, offset: int, length: int) -> bool:
        """Give the range back to the filesystem; it reads as zeros from now on. False where the filesystem cannot."""
        return self._call_fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def stat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def replace(self, source: Path, target: Path) -> None:
        """Rename over ``target``, durably."""
        os.replace(source, target)
        directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _call_fallocate(self, fd: int, mode: int, offset: int, length: int) -> bool:
        while self._fallocate(fd, mode, offset, length) != 0:
            code = ctypes.get_errno()
            if code in _NOT_SUPPORTED:
                return False
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
        return True


def read_fully(io: FileIO, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill ``buffers`` from ``offset``; the bytes read, fewer only where the file ends."""
    done = io.preadv(fd, buffers, offset)
    total = sum(buffer.nbytes for buffer in buffers)
    while 0 < done < total:
        # Direct I/O goes on at a page boundary only; reading part of a page twice is harmless.
        restart = done // PAGE_BYTES * PAGE_BYTES
        count = io.preadv(fd, _skip(buffers, restart), offset + restart)
        if restart + count <= done:
            break
        done = restart + count
    return done


def write_fully(io: FileIO, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all of ``buffers`` at ``offset`` or raise ``OSError``; a part may have been written then."""
    done = io.pwritev(fd, buffers, offset)
    total = sum(buffer.nbytes for buffer in buffers)
    while done < total:
        restart = done // PAGE_BYTES * PAGE_BYTES
        count = io.pwritev(fd, _skip(buffers, restart), offset + restart)
        if restart + count <= done:
            raise OSError(errno.EIO, f"write stopped after {done} of {total} bytes")
        done = restart + count


def _skip(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    rest: list[memoryview] = []
    for buffer in buffers:
        if count >= buffer.nbytes:
            count -= buffer.nbytes
        else:
            rest.append(buffer[count:])
            count = 0
    return rest


class _Open:
    __slots__ = ("fd", "forgotten", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self.forgotten = False
        """Close at the last return: the name stands for another file, or for none, by now."""


class Descriptors:
    """Open files by path, about ``DESCRIPTORS_MAX`` of them, so that a block costs no ``open``. Thread-safe."""

    def __init__(self, io: FileIO) -> None:
        self._io = io
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[Path, bool], _Open] = OrderedDict()

    @contextlib.contextmanager
    def lend(self, path: Path, *, direct: bool) -> Iterator[int]:
        """A descriptor of the existing file ``path`` for the length of the block.

        Raises ``OSError``: a ``FileNotFoundError`` also where the file was removed while it was open here.
        """
        held = self._take(path, direct)
        try:
            if not self._io.stat(held.fd).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "the file was removed", str(path))
            yield held.fd
        finally:
            with self._lock:
                held.users -= 1
                if held.forgotten and not held.users:
                    self._io.close(held.fd)

    def forget(self, path: Path) -> None:
        """The file is gone; close it once nobody uses it."""
        with self._lock:
            for direct in (False, True):
                self._drop((path, direct))

    def close(self) -> None:
        """Close each as soon as nobody uses it."""
        with self._lock:
            for name in list(self._open):
                self._drop(name)

    def _take(self, path: Path, direct: bool) -> _Open:
        name = (path, direct)
        with self._lock:
            held = self._open.get(name)
            if held is None:
                held = _Open(self._io.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0)))
                self._open[name] = held
                if len(self._open) > DESCRIPTORS_MAX:
                    self._drop(next(iter(self._open)))
            else:
                self._open.move_to_end(name)
            held.users += 1
            return held

    def _drop(self, name: tuple[Path, bool]) -> None:
        held = self._open.pop(name, None)
        if held is not None:
            held.forgotten = True
            if not held.users:
                self._io.close(held.fd)
