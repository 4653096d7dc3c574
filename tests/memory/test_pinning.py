"""Pinning in pieces, against the kernel's own locked memory: ``mlock`` under a limit that really refuses."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tiering.errors import ClosedError, ShapeError, TieringError
from tiering.memory.arena import Arena, PoolShape
from tiering.memory.pinning import ArenaPinning

MIB = 1 << 20
WAIT_S = 30.0
CAP_IPC_LOCK = 14
CAPABILITY_VERSION_3 = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


class MemoryLock:
    """A registrar that keeps ranges in memory: what CUDA does, without a device."""

    def register(self, address: int, size_bytes: int) -> None:
        self._call(libc.mlock, address, size_bytes)

    def unregister(self, address: int, size_bytes: int) -> None:
        self._call(libc.munlock, address, size_bytes)

    def _call(self, function: object, address: int, size_bytes: int) -> None:
        assert callable(function)
        if function(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Recorded(MemoryLock):
    """Keeps account of the ranges, and stops at one of them until it is told to go on."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.ranges: list[tuple[int, int]] = []
        self._stop_at = stop_at
        self.stopped, self.go_on = threading.Event(), threading.Event()

    def register(self, address: int, size_bytes: int) -> None:
        if len(self.ranges) == self._stop_at:
            self.stopped.set()
            assert self.go_on.wait(WAIT_S)
        self.ranges.append((address, size_bytes))

    def unregister(self, address: int, size_bytes: int) -> None:
        self.ranges.remove((address, size_bytes))


def locked_bytes() -> int:
    """What the kernel counts as locked by this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmLck:"))
    return int(line.split()[1]) * 1024


@contextmanager
def locking_limited_to(limit_bytes: int) -> Iterator[None]:
    """``ulimit -l``, for this thread and those it starts, also if it is root's: root is exempt by a capability."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    before = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == 0
    without = (ctypes.c_uint32 * 6)(*before)
    without[0] &= ~(1 << CAP_IPC_LOCK)
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit_bytes, limits[1]))
    assert libc.capset(header, without) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena([PoolShape(512, 4096), PoolShape(3, MIB)])
    yield made
    made.close()
    assert not made.quarantined


def test_pinned_in_pieces_and_unpinned_at_close(arena: Arena) -> None:
    before = locked_bytes()
    pinning = ArenaPinning(arena, MemoryLock(), piece_bytes=MIB)
    report = pinning.wait(WAIT_S)
    assert (report.state, report.pinned_bytes, report.error) == ("pinned", 5 * MIB, "")
    assert report.seconds > 0
    assert pinning.report == report
    assert locked_bytes() - before == 5 * MIB
    pinning.close()
    pinning.close()
    assert (pinning.report.state, pinning.report.pinned_bytes) == ("pageable", 0)
    assert locked_bytes() == before


def test_pinning_fails_and_all_of_it_is_pageable_again(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    """row 37: a piece that the system refuses takes back the pieces before it, with one warning that names the remedy."""
    arena.array(0)[:] = 7
    before = locked_bytes()
    limit = before + 3 * MIB + MIB // 2
    with locking_limited_to(limit), caplog.at_level(logging.WARNING, "tiering.memory"):
        pinning = ArenaPinning(arena, MemoryLock(), piece_bytes=MIB)
        report = pinning.wait(WAIT_S)
    assert (report.state, report.pinned_bytes) == ("pageable", 0)
    assert "piece 4 of 5 (1 MiB)" in report.error
    assert os.strerror(12) in report.error
    assert locked_bytes() == before
    assert (arena.array(0) == 7).all()
    (record,) = caplog.records
    text = record.getMessage()
    assert record.levelno == logging.WARNING
    assert report.error in text
    assert "after 3 MiB" in text
    assert f"(`ulimit -l`) is {limit / MIB:.2f}".rstrip("0").rstrip(".") in text
    assert "ulimit -l unlimited" in text
    assert "container's memory limit is" in text
    pinning.close()
    assert pinning.report.error == report.error


def test_pieces_are_whole_slots_and_cover_every_pool() -> None:
    arena = Arena([PoolShape(7, 3 * 4096), PoolShape(2, 40960)])
    registrar = Recorded()
    pinning = ArenaPinning(arena, registrar, piece_bytes=32 << 10)
    assert pinning.wait(WAIT_S).state == "pinned"
    first, second = (arena.array(pool).ctypes.data for pool in (0, 1))
    slot = 3 * 4096
    assert registrar.ranges == [
        (first, 2 * slot), (first + 2 * slot, 2 * slot), (first + 4 * slot, 2 * slot), (first + 6 * slot, slot),
        (second, 40960), (second + 40960, 40960),
    ]  # fmt: skip
    pinning.close()
    assert registrar.ranges == []
    arena.close()


def test_it_happens_in_the_background_and_close_stops_it(arena: Arena) -> None:
    registrar = Recorded(stop_at=2)
    pinning = ArenaPinning(arena, registrar, piece_bytes=MIB)
    assert registrar.stopped.wait(WAIT_S)
    report = pinning.wait(0)
    assert (report.state, report.pinned_bytes) == ("pinning", 2 * MIB)
    closing = threading.Thread(target=pinning.close)
    closing.start()
    registrar.go_on.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert registrar.ranges == []
    assert (pinning.report.state, pinning.report.pinned_bytes, pinning.report.error) == ("pageable", 0, "")


def test_the_arena_stays_mapped_until_it_is_unpinned(arena: Arena) -> None:
    pinning = ArenaPinning(arena, MemoryLock(), piece_bytes=MIB)
    pinning.wait(WAIT_S)
    arena.close()
    assert arena.quarantined
    pinning.close()
    arena.close()
    assert not arena.quarantined
    with pytest.raises(ClosedError):
        ArenaPinning(arena, MemoryLock())


def test_it_gives_up_past_the_deadline(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    before = locked_bytes()
    pinning = ArenaPinning(arena, MemoryLock(), piece_bytes=MIB, deadline_s=0)
    report = pinning.wait(WAIT_S)
    assert (report.state, report.pinned_bytes) == ("pageable", 0)
    assert "piece 1 of 5 (1 MiB) was not reached within 0 s" in report.error
    assert len(caplog.records) == 1
    assert locked_bytes() == before
    pinning.close()


class Refuses(Recorded):
    """Fails on the third piece, and refuses to unpin the first: with these errors."""

    def __init__(self, register: Exception, unregister: Exception | None = None) -> None:
        super().__init__()
        self._register, self.unregister_error = register, unregister

    def register(self, address: int, size_bytes: int) -> None:
        if len(self.ranges) == 2:
            raise self._register
        super().register(address, size_bytes)

    def unregister(self, address: int, size_bytes: int) -> None:
        if self.unregister_error is not None and (address, size_bytes) == self.ranges[0]:
            raise self.unregister_error
        super().unregister(address, size_bytes)


def test_what_cannot_be_unpinned_is_reported_and_tried_again(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    registrar = Refuses(TieringError("cudaHostRegister: out of memory"), TieringError("cudaHostUnregister: no"))
    pinning = ArenaPinning(arena, registrar, piece_bytes=MIB)
    report = pinning.wait(WAIT_S)
    assert (report.state, report.pinned_bytes) == ("pageable", MIB)
    assert (
        "piece 3 of 5 (1 MiB): cudaHostRegister: out of memory; and could not unpin: cudaHostUnregister: no"
        in report.error
    )
    pinning.close()
    assert pinning.report.pinned_bytes == MIB
    assert "stays pinned in part" in caplog.records[-1].getMessage()
    registrar.unregister_error = None
    pinning.close()
    assert pinning.report.pinned_bytes == 0
    assert registrar.ranges == []


def test_a_thread_that_dies_leaves_nothing_pinned(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    """row 34: reported, and rolled back as any other failure."""
    registrar = Refuses(RuntimeError("a defect"))
    pinning = ArenaPinning(arena, registrar, piece_bytes=MIB)
    report = pinning.wait(WAIT_S)
    assert (report.state, report.pinned_bytes) == ("pageable", 0)
    assert "the pinning thread died of RuntimeError('a defect')" in report.error
    assert registrar.ranges == []
    assert len(caplog.records) == 1
    pinning.close()


def test_shared_arenas_and_slots_in_use(arena: Arena) -> None:
    shared = Arena([PoolShape(64, 4096)], shared=True)
    mapped = Arena.attach(shared.fd, [PoolShape(64, 4096)])
    pinnings = [ArenaPinning(one, MemoryLock(), piece_bytes=65536) for one in (shared, mapped)]
    shared.fill(0, [5], np.full((1, 4096), 9, np.uint8))
    assert [pinning.wait(WAIT_S).state for pinning in pinnings] == ["pinned", "pinned"]
    assert (mapped.array(0)[5] == 9).all()
    for pinning in pinnings:
        pinning.close()
    mapped.close()
    shared.close()


def test_a_piece_has_at_least_a_byte(arena: Arena) -> None:
    with pytest.raises(ShapeError, match="piece_bytes is 0"):
        ArenaPinning(arena, MemoryLock(), piece_bytes=0)
