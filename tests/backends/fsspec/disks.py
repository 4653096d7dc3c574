"""Sync fsspec filesystems as a third party would write them, with a medium that goes wrong."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any, ClassVar

from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem


class Disk(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A disk that fails its writes with ``write_errno``, or its reads by raising ``read_error``, or holds them at a gate."""

    protocol = "kvtestdisk"
    write_errno: ClassVar[int] = 0
    read_error: ClassVar[Exception | None] = None
    gate: ClassVar[threading.Event | None] = None
    waiting: ClassVar[threading.Semaphore] = threading.Semaphore(0)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("kvtestdisk://"))

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Any:
        if "w" in mode and self.write_errno:
            raise OSError(self.write_errno, os.strerror(self.write_errno))
        if "r" in mode:
            if self.read_error is not None:
                raise self.read_error
            if self.gate is not None:
                self.waiting.release()
                self.gate.wait()
        return super()._open(path, mode, block_size, **kwargs)


FULL, BROKEN, READ_ONLY = errno.ENOSPC, errno.EIO, errno.EROFS


class CopiesOnly(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """It has no rename of its own."""

    protocol = "kvtestcopies"
