"""Calls that overlap, on one key and on one slot, and calls that are cancelled."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.backends.nvme import rig
from tests.backends.nvme.rig import MISSING, OK, Gate, HookedIO, key_of, stored_bytes
from tiering.errors import ClosedError


async def test_concurrent_writers_of_one_key_write_once(tmp_path: Path) -> None:
    """row 22: sixteen stores of one block at a time, and repeats within a batch: all OK, one write."""
    writes = 0

    def count(op: str, path: Path) -> None:
        nonlocal writes
        writes += path.suffix == ".seg" and op == "write_direct"

    key = key_of(1)
    async with rig.opened(tmp_path, io=HookedIO(count)) as backend:
        results = await asyncio.gather(*(rig.store(backend, [key, key]) for _ in range(16)))
        assert results == [[OK, OK]] * 16
        assert await rig.store(backend, [key]) == [OK]
        assert writes == 1
        assert (await backend.usage()).live_bytes == stored_bytes(4097)


async def test_concurrent_writers_share_the_outcome_of_the_one_that_writes(tmp_path: Path) -> None:
    """row 22: a store that finds its key being written waits for it, and says OK only then."""
    gate = Gate("write_direct", ".seg")
    key = key_of(1)
    async with rig.opened(tmp_path, io=HookedIO(gate)) as backend:
        gate.close()
        first = asyncio.create_task(rig.store(backend, [key]))
        await gate.reached()
        second = asyncio.create_task(rig.store(backend, [key_of(2), key]))
        await gate.reached()  # the second one's other block
        assert rig.codes(await backend.contains([key])) == [MISSING]
        assert await rig.load(backend, [key]) == [MISSING]
        assert not second.done()
        gate.open()
        assert await first == [OK]
        assert await second == [OK, OK]


async def test_slot_is_not_reused_while_it_is_read(tmp_path: Path) -> None:
    """A load is held in the kernel; its block is deleted, and everything is stored over. The load gets the old bytes."""
    gate = Gate("read_direct", ".seg")
    size = rig.MIB
    async with rig.opened(tmp_path, io=HookedIO(gate), capacity="6MiB") as backend:
        slots = (6 * rig.MIB - backend.capabilities.overhead_bytes) // stored_bytes(size)
        old = [key_of(n) for n in range(slots)]
        assert await rig.store(backend, old, size) == [OK] * slots
        gate.close()
        loading = asyncio.create_task(rig.load(backend, [old[0]], size))
        await gate.reached()
        assert rig.codes(await backend.delete(old)) == [OK] * slots
        new = [key_of(100 + n) for n in range(slots)]
        stored = await rig.store(backend, new, size)
        assert stored == [OK] * (slots - 1) + [rig.REFUSED]
        gate.open()
        assert await loading == [OK]
        assert await rig.store(backend, new, size) == [OK] * slots
        assert await rig.load(backend, new, size) == [OK] * slots


@pytest.mark.parametrize("op", ["store", "load"])
async def test_cancelled_call_waits_for_its_threads_and_skips_the_rest(tmp_path: Path, op: str) -> None:
    """Rule 7: a call with a run in the kernel and others queued behind it returns when the first has, and no later."""
    gate = Gate("write_direct" if op == "store" else "read_direct", ".seg")
    reached: list[str] = []
    size = 1_000_000

    def hook(what: str, path: Path) -> None:
        if path.suffix == ".seg" and what.endswith("_direct") and what != "open_direct":
            reached.append(what)
        gate(what, path)

    keys = [key_of(n) for n in range(8)]
    async with rig.opened(tmp_path, io=HookedIO(hook), capacity="24MiB", threads=1) as backend:
        if op == "load":
            # Alternating with others, so that no two of them are neighbours.
            every = [key_of(n // 2 if n % 2 else 1000 + n) for n in range(16)]
            await rig.store(backend, every, size)
        else:
            # Every other slot of a tier that cannot grow.
            await rig.store(backend, spread := [key_of(2000 + n) for n in range(16)], size)
            await backend.delete(spread[::2])
        reached.clear()
        gate.close()
        call = asyncio.create_task(getattr(rig, op)(backend, keys, size))
        await gate.reached()
        for _ in range(3):
            call.cancel()
            done, _ = await asyncio.wait([call], timeout=0.01)
            assert not done
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert len(reached) == 1
        # What was written is there, what was not is no part of anything; all slots are accounted for.
        if op == "store":
            assert sorted(await rig.load(backend, keys, size), key=repr) == [MISSING] * 7 + [OK]
        assert await rig.store(backend, keys, size) == [OK] * 8
        assert await rig.load(backend, keys, size) == [OK] * 8


async def test_many_callers_at_once(tmp_path: Path) -> None:
    """row 22: stores, loads, deletes, touches, scans and usage of the same few keys, all at once."""
    keys = [key_of(n) for n in range(12)]
    async with rig.opened(tmp_path, capacity="16MiB") as backend:

        async def churn(worker: int) -> None:
            for turn in range(25):
                some = keys[(worker + turn) % 12 :][:4]
                assert set(await rig.store(backend, some)) == {OK}
                backend.touch(some)
                assert set(await rig.load(backend, keys)) <= {OK, MISSING}
                if turn % 3 == 0:
                    await backend.delete(some[1:3])
                if turn % 5 == 0:
                    listed = await rig.scanned(backend)
                    assert len({entry.handle for entry in listed}) == len(listed)
                    await backend.usage()

        await asyncio.gather(*(churn(n) for n in range(6)))
        assert backend.counters()["corrupt"] == 0
        live = await rig.scanned(backend)
        assert (await backend.usage()).live_bytes == len(live) * stored_bytes(4097)
        await backend.delete([entry.handle for entry in live])
        # No slot leaked: the whole tier can be filled.
        fits = (16 * rig.MIB - backend.capabilities.overhead_bytes) // stored_bytes(rig.MIB)
        assert await rig.store(backend, [key_of(500 + n) for n in range(fits)], rig.MIB) == [OK] * fits


async def test_a_batch_of_neighbours_is_one_call(tmp_path: Path) -> None:
    """A fresh batch gets slots side by side, written and read by one system call a chunk."""
    calls: list[str] = []

    def count(op: str, path: Path) -> None:
        if path.suffix == ".seg" and op in ("write_direct", "read_direct"):
            calls.append(op)

    keys = [key_of(n) for n in range(16)]
    async with rig.opened(tmp_path, io=HookedIO(count), threads=2) as backend:
        assert await rig.store(backend, keys) == [OK] * 16
        assert await rig.load(backend, keys[::-1]) == [OK] * 16
        assert calls == ["write_direct", "read_direct"]
        calls.clear()
        large = [key_of(100 + n) for n in range(8)]
        assert await rig.store(backend, large, rig.MIB) == [OK] * 8
        assert await rig.load(backend, large, rig.MIB) == [OK] * 8
        assert sorted(calls) == ["read_direct"] * 2 + ["write_direct"] * 2


async def test_closing_amid_a_scan(tmp_path: Path) -> None:
    async with rig.opened(tmp_path) as backend:
        await rig.store(backend, [key_of(n) for n in range(3)])
        scan = backend.scan()
        await anext(scan)
    with pytest.raises(ClosedError):
        await anext(scan)
    for call in (backend.usage(), backend.delete([]), backend.contains([])):
        with pytest.raises(ClosedError):
            await call
    with pytest.raises(ClosedError):
        backend.touch([])
    with pytest.raises(ClosedError):
        backend.link({})
    with pytest.raises(ClosedError):
        await backend.open(rig.namespace())
