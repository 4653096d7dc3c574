from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from backends.memory import MemoryBackend, MemoryConfig
from tiering.api import HEADER_BYTES, Backend, BackendError, ClosedError, Namespace, OutcomeCode
from tiering.errors import ShapeError
from tiering.testing import BackendTests, FaultPlan, FaultyBackend
from tiering.types import Group, KVLayout

OK, REFUSED = OutcomeCode.OK, OutcomeCode.REFUSED


class TestMemory(BackendTests):
    corrupt_supported = True

    def make_backend(self, tmp_path: Path) -> Backend:
        self.memory = MemoryBackend(MemoryConfig(type="memory", capacity_bytes="128MiB"))
        return self.memory

    def corrupt(self, tmp_path: Path, key: bytes, edit: Callable[[bytes], bytes]) -> bool:
        block = self.memory.blocks.get(key)
        if block is None:
            return False
        image = edit(block.header + block.payload.tobytes())
        block.header, block.payload = image[:HEADER_BYTES], np.frombuffer(image[HEADER_BYTES:], np.uint8)
        return True


class TestMemoryBehindFaults(TestMemory):
    """A fake is verified by the same suite: without faults the wrapper is the backend."""

    def make_backend(self, tmp_path: Path) -> Backend:
        return FaultyBackend(super().make_backend(tmp_path), FaultPlan())


class TestMemoryBehindLateness(TestMemory):
    """Slow calls overlap more; the rules hold all the same."""

    def make_backend(self, tmp_path: Path) -> Backend:
        plan = FaultPlan(seed=5)
        for op in ("contains", "load", "store", "delete"):
            plan.latency(op, 0.002, rate=0.3)
        return FaultyBackend(super().make_backend(tmp_path), plan)


SMALL, LARGE = 4096, 1 << 20
STORED_SMALL, STORED_LARGE = SMALL + 128, LARGE + 128


@asynccontextmanager
async def opened(capacity_bytes: int) -> AsyncIterator[MemoryBackend]:
    backend = MemoryBackend(MemoryConfig(capacity_bytes=capacity_bytes, name="ram"))
    layout = KVLayout([Group("full", 16, SMALL), Group("full", 16, LARGE)], model="memory")
    await backend.open(Namespace.of(layout, epoch="0"))
    try:
        yield backend
    finally:
        await backend.aclose(5)


async def store(backend: MemoryBackend, *keys: bytes, size: int = SMALL) -> list[OutcomeCode]:
    outcomes = await backend.store([(key, memoryview(bytes(size))) for key in keys])
    return [outcome.code for outcome in outcomes]


async def live_bytes(backend: MemoryBackend) -> int:
    usage = await backend.usage()
    assert usage.live_bytes <= usage.allocated_bytes <= backend.config.capacity_bytes
    return usage.live_bytes


async def test_a_full_tier_refuses_by_block_and_recovers() -> None:
    """row 18: the head that fits is stored, nothing leaks, and there is room again after a delete."""
    async with opened(3 * STORED_SMALL) as backend:
        assert await store(backend, b"a", b"b") == [OK, OK]
        assert await store(backend, b"b", b"c", b"d", b"c", b"e") == [OK, OK, REFUSED, OK, REFUSED]
        assert await live_bytes(backend) == 3 * STORED_SMALL
        assert await store(backend, b"a", b"b", b"c") == [OK] * 3, "present blocks need no room"
        await backend.delete([b"a"])
        assert await store(backend, b"d", b"e") == [OK, REFUSED]
        assert await live_bytes(backend) == 3 * STORED_SMALL


async def test_one_byte_short_of_room_is_no_room() -> None:
    async with opened(STORED_SMALL - 1) as backend:
        assert await store(backend, b"a") == [REFUSED]
        assert await live_bytes(backend) == 0


async def test_overlapping_stores_never_pass_the_capacity() -> None:
    async with opened(2 * STORED_LARGE + STORED_SMALL) as backend:
        stores = [asyncio.create_task(store(backend, b"%d" % n, size=LARGE)) for n in range(8)]
        while not all(task.done() for task in stores):
            await live_bytes(backend)
            await asyncio.sleep(0)
        assert sorted(code.name for task in stores for code in task.result()) == ["OK"] * 2 + ["REFUSED"] * 6
        assert await live_bytes(backend) == 2 * STORED_LARGE


class HeldExecutor:
    """The loop's default executor with its one thread held, so that nothing copies before ``release``."""

    def __init__(self) -> None:
        self.held = threading.Event()
        executor = ThreadPoolExecutor(1)
        executor.submit(self.held.wait)
        asyncio.get_running_loop().set_default_executor(executor)

    def release(self) -> None:
        self.held.set()


async def test_large_copies_leave_the_loop_free_and_small_ones_need_no_thread() -> None:
    async with opened(8 * STORED_LARGE) as backend:
        executor = HeldExecutor()
        large = asyncio.create_task(store(backend, b"large", size=LARGE))
        try:
            assert await store(backend, b"small") == [OK]
            assert (await backend.load([(b"small", memoryview(bytearray(SMALL)))]))[0].ok
            assert not (await backend.contains([b"large"]))[0].ok
            assert not large.done()
        finally:
            executor.release()
        assert await large == [OK]
        assert (await backend.contains([b"large"]))[0].ok


async def test_a_cancelled_store_gives_its_room_back() -> None:
    async with opened(STORED_LARGE) as backend:
        executor = HeldExecutor()
        cancelled = asyncio.create_task(store(backend, b"a", size=LARGE))
        await asyncio.sleep(0)
        assert await store(backend, b"b", size=LARGE) == [REFUSED]
        cancelled.cancel()
        await asyncio.wait((cancelled,))
        executor.release()
        assert await store(backend, b"b", size=LARGE) == [OK]
        assert await live_bytes(backend) == STORED_LARGE


async def test_silent_thread_death_is_the_callers_error_and_leaks_nothing() -> None:
    """row 34: what is raised in the thread arrives in the call; later calls go on."""
    async with opened(STORED_LARGE) as backend:
        for _ in range(3):
            with pytest.raises(ShapeError, match="37 bytes"):
                await store(backend, b"k" * 37, size=LARGE)
        assert await store(backend, b"k", size=LARGE) == [OK]


async def test_aclose_gives_up_at_its_deadline_and_can_be_repeated() -> None:
    async with opened(STORED_LARGE) as backend:
        executor = HeldExecutor()
        held = asyncio.create_task(store(backend, b"a", size=LARGE))
        await asyncio.sleep(0)
        with pytest.raises(BackendError, match=r"ram\.aclose: 1 calls still run 0\.01 s"):
            await backend.aclose(0.01)
        with pytest.raises(ClosedError, match="ram: contains after aclose"):
            await backend.contains([b"a"])
        executor.release()
        assert await held == [OK]
        await backend.aclose(5)
        assert not backend.blocks


async def test_calls_before_open_and_a_second_open_are_named() -> None:
    backend = MemoryBackend(MemoryConfig(capacity_bytes="1MiB"))
    with pytest.raises(BackendError, match=r"memory\.load: load before open"):
        await backend.load([])
    async with opened(STORED_SMALL) as backend:
        assert backend.config.name == "ram"
        with pytest.raises(BackendError, match="second time"):
            await backend.open(Namespace.of(KVLayout.uniform(model="m", tokens_per_block=1, block_bytes=1), epoch="0"))


async def test_the_scan_lists_blocks_in_the_order_of_their_stores() -> None:
    async with opened(4 * STORED_SMALL) as backend:
        await store(backend, b"b", b"a", b"c")
        batches = [batch async for batch in backend.scan()]
        assert [[(entry.handle, entry.stored_bytes) for entry in batch] for batch in batches] == [
            [(b"b", STORED_SMALL), (b"a", STORED_SMALL), (b"c", STORED_SMALL)]
        ]


def test_the_configuration_takes_units_and_wants_a_capacity() -> None:
    config = MemoryConfig.model_validate({"type": "memory", "capacity": "1.5KiB"})
    assert (config.capacity_bytes, config.type) == (1536, "memory")
    for bad in ({"type": "memory"}, {"type": "memory", "capacity": 0}, {"type": "memory", "capacity": 1, "pth": ""}):
        with pytest.raises(ValidationError):
            MemoryConfig.model_validate(bad)
