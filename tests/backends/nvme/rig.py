"""Tools of these tests: aligned buffers, blocks of known bytes, and a reader of the files that shares no code with ours."""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
import struct
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from backends.nvme.backend import NvmeBackend
from backends.nvme.config import NvmeConfig
from backends.nvme.fileio import FileIO
from tiering.api import Namespace, Outcome, OutcomeCode, ScanEntry
from tiering.types import Group, KVLayout

Hook: TypeAlias = Callable[[str, Path], None]

MIB = 1 << 20
PAGE = 4096
SIZES = (4097, 1_000_000, MIB)
OK, MISSING, CORRUPT = OutcomeCode.OK, OutcomeCode.MISSING, OutcomeCode.CORRUPT
FAILED, REFUSED, CANCELLED = OutcomeCode.FAILED, OutcomeCode.REFUSED, OutcomeCode.CANCELLED


def namespace(*sizes: int, epoch: str = "0", model: str = "m") -> Namespace:
    return Namespace.of(KVLayout([Group("full", 16, size) for size in sizes or SIZES], model=model), epoch=epoch)


def padded(size: int) -> int:
    return (size + PAGE - 1) // PAGE * PAGE


def stored_bytes(size: int) -> int:
    """What a payload occupies, as the design says: a header page and whole pages."""
    return PAGE + padded(size)


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest() + b"\0\0\0\1"


def payload_of(key: bytes, size: int) -> bytes:
    """The bytes of a block; two keys differ in every page."""
    seed = hashlib.sha256(key).digest()
    return (seed * (size // len(seed) + 1))[:size]


def buffer(size: int) -> memoryview:
    """An aligned, zeroed view as the driver lends it."""
    return memoryview(mmap.mmap(-1, padded(size)))


def filled(key: bytes, size: int) -> memoryview:
    view = buffer(size)
    view[:size] = payload_of(key, size)
    return view


def config(path: Path, **fields: object) -> NvmeConfig:
    return NvmeConfig.model_validate({"type": "nvme", "path": path, "capacity": "64MiB", **fields})


@asynccontextmanager
async def opened(
    path: Path, spoken: Namespace | None = None, *, io: FileIO | None = None, **fields: object
) -> AsyncIterator[NvmeBackend]:
    backend = NvmeBackend(config(path, **fields), io=io)
    try:
        await backend.open(spoken or namespace())
        yield backend
    finally:
        await backend.aclose(10)


class Gate:
    """A hook that holds calls of ``op`` on files with ``suffix`` while it is closed."""

    def __init__(self, op: str, suffix: str) -> None:
        self._op = op
        self._suffix = suffix
        self._free = threading.Event()
        self._free.set()
        self._arrived = threading.Semaphore(0)

    def __call__(self, op: str, path: Path) -> None:
        if op == self._op and path.suffix == self._suffix and not self._free.is_set():
            self._arrived.release()
            self._free.wait()

    def close(self) -> None:
        self._free.clear()

    def open(self) -> None:
        self._free.set()

    async def reached(self) -> None:
        """Returns when one more call is being held."""
        await asyncio.to_thread(self._arrived.acquire)


class HookedIO(FileIO):
    """Real I/O with a look-in: ``before`` may raise ``OSError`` or wait, ``after`` may measure. Called from any thread."""

    def __init__(self, before: Hook | None = None, after: Hook | None = None) -> None:
        super().__init__()
        self._before = before
        self._after = after
        self._paths: dict[int, Path] = {}
        self.direct: set[int] = set()
        """Descriptors opened with O_DIRECT."""

    @contextmanager
    def _around(self, op: str, path: Path) -> Iterator[None]:
        if self._before:
            self._before(op, path)
        yield
        if self._after:
            self._after(op, path)

    def open(self, path: Path, flags: int) -> int:
        with self._around("open_direct" if flags & os.O_DIRECT else "open", path):
            fd = super().open(path, flags)
            self._paths[fd] = path
            (self.direct.add if flags & os.O_DIRECT else self.direct.discard)(fd)
            return fd

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._around("read_direct" if fd in self.direct else "read", self._paths[fd]):
            return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._around("write_direct" if fd in self.direct else "write", self._paths[fd]):
            return super().pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, length: int) -> bool:
        with self._around("allocate", self._paths[fd]):
            return super().allocate(fd, offset, length)

    def punch(self, fd: int, offset: int, length: int) -> bool:
        with self._around("punch", self._paths[fd]):
            return super().punch(fd, offset, length)

    def fdatasync(self, fd: int) -> None:
        with self._around("sync", self._paths[fd]):
            super().fdatasync(fd)

    def replace(self, source: Path, target: Path) -> None:
        with self._around("replace", source):
            super().replace(source, target)

    def unlink(self, path: Path) -> None:
        with self._around("unlink", path):
            super().unlink(path)


def codes(outcomes: Iterable[Outcome]) -> list[OutcomeCode]:
    return [outcome.code for outcome in outcomes]


async def store(backend: NvmeBackend, keys: Sequence[bytes], size: int = 4097) -> list[OutcomeCode]:
    return codes(await backend.store([(key, filled(key, size)) for key in keys]))


async def load(backend: NvmeBackend, keys: Sequence[bytes], size: int = 4097) -> list[OutcomeCode]:
    """Outcomes; whatever is OK was compared with the true bytes."""
    views = [buffer(size) for _ in keys]
    outcomes = await backend.load(list(zip(keys, views, strict=True)))
    for key, view, outcome in zip(keys, views, outcomes, strict=True):
        if outcome.ok:
            assert view[:size] == payload_of(key, size), f"wrong bytes served for {key.hex()}"
            assert not any(view[size:]), "padding is not zero"
    return codes(outcomes)


async def scanned(backend: NvmeBackend) -> list[ScanEntry]:
    return [entry async for part in backend.scan() for entry in part]


def disk_bytes(path: Path) -> int:
    """What ``du`` counts: every file and directory at and below ``path``."""
    total = 0
    for directory, _, files in os.walk(path):
        for name in (".", *files):
            try:
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


@dataclass(frozen=True)
class Found:
    """A slot whose header page names a block."""

    file: Path
    offset: int
    length: int
    generation: int
    digest: bytes
    key: bytes

    def read(self) -> bytes:
        with self.file.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.length)

    def write(self, image: bytes) -> None:
        with self.file.open("r+b") as file:
            file.seek(self.offset)
            file.write(image[: self.length].ljust(self.length, b"\0"))


def slots_on_disk(root: Path) -> list[Found]:
    """Every slot of the owner's directory with a header page, live or not, read by offsets that the format fixes."""
    found = []
    for file in sorted((root / "segments").glob("*.seg")):
        length = int(file.name.split("-")[0])
        with file.open("rb") as raw:
            for offset in range(0, file.stat().st_size, length):
                raw.seek(offset)
                page = raw.read(PAGE)
                if page[:8] == b"KVTBLOCK":
                    (key_bytes,) = struct.unpack_from("<I", page, 12)
                    (generation,) = struct.unpack_from("<Q", page, 144)
                    found.append(Found(file, offset, length, generation, page[32:64], page[64 : 64 + key_bytes]))
    return found


def slot_of(root: Path, key: bytes) -> Found:
    """Where the block ``key`` was stored last."""
    return max((one for one in slots_on_disk(root) if one.key == key), key=lambda one: one.generation)


def record(
    kind: int, *, key: bytes = b"", segment: int = 0, slot: int = 0, generation: int = 0, namespace: int = 0
) -> bytes:
    """An index record, by the format's own rules."""
    body = struct.pack("<BBBxHHIQ36s36s", kind, len(key), 0, namespace, slot, segment, generation, key, b"")
    return struct.pack("<I", zlib.crc32(body)) + body
