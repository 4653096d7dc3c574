"""Calls that are cancelled at each place where they wait: they end, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from tests.manager.world import (
    LAYOUT,
    blank,
    busy_copies,
    cancelled,
    clean,
    config,
    ended,
    eventually,
    faulty,
    is_blank,
    keys_of,
    opened,
    pushed_out,
    rows,
    turns,
)
from tiering import (
    ClosedError,
    ConfigError,
    Group,
    KVLayout,
    Outcome,
    ShapeError,
    TieringOffloadingManager,
    block_keys,
)
from tiering.testing import VirtualClock


def files_open() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- open -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [0, 1, 2, 5, 13, 50, 200])
async def test_open_cancelled_at_any_moment_leaves_nothing_open(times: int, tmp_path: Path) -> None:
    """Neither a thread (the fixture looks), nor a file, nor the lock of the directory: the next open gets it."""
    nvme = {"type": "nvme", "path": str(tmp_path), "capacity": "4MiB"}
    tier, _ = faulty("far")
    manager = TieringOffloadingManager(config(4, tier, nvme), LAYOUT)
    before = files_open()
    task = asyncio.create_task(manager.open())
    await turns(times)
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        await manager.aclose()
    assert files_open() == before
    with pytest.raises(ClosedError):
        await manager.match([])
    async with TieringOffloadingManager(config(4, nvme), LAYOUT) as again:
        assert (await again.store(keys_of(1), rows(keys_of(1)))).stored == 1


async def test_open_cancelled_while_a_tier_hangs() -> None:
    tier, plan = faulty("far")
    manager = TieringOffloadingManager(config(4, tier), LAYOUT)
    plan.hang("open")
    opening = asyncio.create_task(manager.open())
    await asyncio.wrap_future(plan.when_hung("open"))
    await cancelled(opening)
    with pytest.raises(ClosedError):
        await manager.open()


async def test_open_that_fails_half_way_closes_what_it_opened(tmp_path: Path) -> None:
    """A good tier, then one whose directory is in use: the first one's files are closed again."""
    good = {"type": "nvme", "name": "good", "path": str(tmp_path / "good"), "capacity": "4MiB"}
    used = {"type": "nvme", "name": "used", "path": str(tmp_path / "used"), "capacity": "4MiB"}
    async with TieringOffloadingManager(config(4, used), LAYOUT):
        before = files_open()
        with pytest.raises(ConfigError, match="used"):
            await TieringOffloadingManager(config(4, good, used), LAYOUT).open()
        assert files_open() == before
        async with TieringOffloadingManager(config(4, good), LAYOUT):
            pass


async def test_open_with_the_metrics_port_in_use_opens_no_tier() -> None:
    tier, _ = faulty("far")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        manager = TieringOffloadingManager(config(4, tier, metrics={"prometheus_port": port}), LAYOUT)
        with pytest.raises(ConfigError, match=f"metrics.*{port}"):
            await manager.open()
    assert manager.metrics_port is None
    with pytest.raises(ClosedError):
        manager.stats()


async def test_close_while_it_opens() -> None:
    """The open says so; there is no manager that is half of each."""
    tier, plan = faulty("far")
    manager = TieringOffloadingManager(config(4, tier, metrics={"prometheus_port": 0}), LAYOUT)
    plan.hang("open")
    opening = asyncio.create_task(manager.open())
    await asyncio.wrap_future(plan.when_hung("open"))
    assert await ended(manager.aclose()) == []
    with pytest.raises(ClosedError):
        await ended(opening)


async def test_close_before_open_is_final() -> None:
    manager = TieringOffloadingManager(config(4), LAYOUT)
    assert await manager.aclose() == []
    with pytest.raises(ClosedError):
        await manager.open()


# -- store ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [0, 1, 2, 3, 5, 8, 13, 21, 34])
async def test_store_cancelled_at_any_moment(times: int) -> None:
    """row 25: whatever was stored by then is whole, the rest is not there, and the buffer is the caller's at once."""
    tier, _ = faulty("far", queue_bytes=8192)
    keys = keys_of(12)
    async with opened(4, tier) as manager:
        source = rows(keys)
        task = asyncio.create_task(manager.store(keys, source))
        await turns(times)
        task.cancel()
        await asyncio.wait({task})
        source[:] = 0
        out = blank(12)
        n = await manager.load(keys, out)
        assert np.array_equal(out[:n], rows(keys[:n]))
        assert is_blank(out[n:])
        assert (await manager.store(keys, rows(keys))).refused == 0
        assert (await manager.match(keys)).blocks == 12


async def test_store_cancelled_while_its_copy_waits_gives_its_slots_back_at_once() -> None:
    keys = keys_of(4)
    async with opened(4) as manager:
        with busy_copies(manager):
            task = asyncio.create_task(manager.store(keys, rows(keys)))
            await turns()
            assert manager.stats()["open_stores"] == 1
            await cancelled(task)
            assert manager.stats()["primary"]["free_slots"] == 4
        assert (await manager.match(keys)).blocks == 0


async def test_store_cancelled_while_it_waits_for_room_keeps_its_head() -> None:
    tier, plan = faulty("far")
    keys = keys_of(6)
    async with opened(4, tier) as manager:
        plan.hang("store")
        task = asyncio.create_task(manager.store(keys, rows(keys)))
        await asyncio.wrap_future(plan.when_hung("store"))

        async def waits() -> bool:
            return len(manager.parts.freed) == 1

        await eventually(waits)
        await cancelled(task)
        assert (await manager.match(keys)).blocks == 4
        plan.release()


async def test_a_store_of_several_groups_checks_all_before_it_copies_any() -> None:
    layout = KVLayout([Group("full", 4, 4096), Group("full", 4, 1000)], model="hybrid")
    keys = {group: block_keys(list(range(8)), layout, group=group) for group in (0, 1)}
    data = {0: rows(keys[0]), 1: rows(keys[1], 1000)}
    async with opened(40, layout=layout) as manager:
        with pytest.raises(ShapeError, match="parent"):
            await manager.store(keys, data, parent={0: None, 1: b"x" * 40})
        with pytest.raises(ShapeError, match="group"):
            await manager.match({0: keys[0]})
        assert manager.stats()["stored_blocks"] == 0
    async with opened(4) as manager:
        with pytest.raises(ShapeError, match="group"):
            await manager.load({}, {})


# -- load, match, prefetch, flush ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [0, 1, 2, 3, 5, 8, 13, 21, 34])
@pytest.mark.parametrize("where", ["primary", "far"])
async def test_load_cancelled_at_any_moment(times: int, where: str) -> None:
    """row 25: no lease is left, and nothing writes to the buffer afterwards."""
    tier, _ = faulty("far", batch_blocks_max=1)
    keys = keys_of(4)
    async with opened(4, tier) as manager:
        await manager.store(keys, rows(keys))
        if where == "far":
            await pushed_out(manager, keys, 4)
        out = blank(4)
        task = asyncio.create_task(manager.load(keys, out))
        await turns(times)
        task.cancel()
        await asyncio.wait({task})
        out[:] = 0xEE
        await clean(manager)
        assert is_blank(out)
        assert await manager.load(keys, out) == 4
        assert np.array_equal(out, rows(keys))


@pytest.mark.parametrize("call", ["match", "load", "prefetch"])
async def test_calls_cancelled_while_a_tier_is_asked(call: str) -> None:
    tier, plan = faulty("far", shared=True)
    keys = keys_of(4)
    async with opened(4, tier) as manager:
        plan.hang("contains")
        arguments = (keys, blank(4)) if call == "load" else (keys,)
        task = asyncio.create_task(getattr(manager, call)(*arguments))
        await asyncio.wrap_future(plan.when_hung("contains"))
        await cancelled(task)
        plan.release()


async def test_flush_cancelled_leaves_no_job_behind() -> None:
    tier, plan = faulty("far")
    keys = keys_of(2)
    async with opened(4, tier) as manager:
        plan.hang("store")
        await manager.store(keys, rows(keys))
        task = asyncio.create_task(manager.flush())
        await asyncio.wrap_future(plan.when_hung("store"))
        await turns()
        await cancelled(task)
        assert not manager.parts.core.world.flushes
        plan.release()
        await manager.flush()


async def test_a_match_sees_a_fill_that_ends_while_it_waits() -> None:
    """Lost wake-up: the blocks are on their way into the primary tier; no tier has anything to report."""
    clock = VirtualClock()
    tier, _ = faulty("far", demote_when="never")
    keys = keys_of(2)
    async with opened(4, tier, clock=clock) as manager:
        plan = manager.sync.plan_store(keys)
        for grant in plan.grants:
            manager.sync.slot_view(grant.slot)[:] = rows([grant.key]).tobytes()
        matching = asyncio.create_task(manager.match(keys))
        loading = asyncio.create_task(manager.load(keys, blank(2)))
        await turns()
        assert not matching.done()
        manager.sync.complete(plan.job, [Outcome.OK] * 2)
        # The clock stands still: only the news of the fill can end them.
        assert (await ended(matching)).blocks == 2
        assert await ended(loading) == 2


# -- holding ----------------------------------------------------------------------------------------------------------


async def test_holding_lets_the_bodys_error_through() -> None:
    keys = keys_of(3)
    async with opened(4) as manager:
        with pytest.raises(KeyError, match="mine"):
            async with manager.holding(keys, rows(keys)):
                raise KeyError("mine")


async def test_holding_left_by_cancellation_waits_for_its_copy() -> None:
    """However often it is cancelled: while a thread may still read the caller's rows, it does not return."""
    keys = keys_of(3)
    async with opened(4) as manager:
        entered = asyncio.Event()

        async def hold() -> None:
            async with manager.holding(keys, rows(keys)):
                entered.set()
                await asyncio.sleep(600)

        with busy_copies(manager):
            task = asyncio.create_task(hold())
            await entered.wait()
            await turns()
            assert manager.stats()["open_stores"] == 1
            for _ in range(3):
                task.cancel()
                await turns(1)
            with pytest.raises(asyncio.CancelledError):
                await ended(task)
            assert manager.stats()["open_stores"] == manager.stats()["holds"] == 0


async def test_holding_left_by_cancellation_waits_for_a_copy_that_runs() -> None:
    """A copy long enough to be cancelled in the middle: whenever the hold is left, nothing reads the rows any more."""
    layout = KVLayout.uniform(model="test", tokens_per_block=4, block_bytes=64 << 20)
    keys = keys_of(1, layout=layout)
    source = np.ones((1, 64 << 20), np.uint8)
    async with opened(64 << 20 >> 12, layout=layout) as manager:
        entered = asyncio.Event()

        async def hold() -> None:
            async with manager.holding(keys, source):
                entered.set()
                await asyncio.sleep(600)

        task = asyncio.create_task(hold())
        await entered.wait()
        await eventually(lambda: copying(manager))
        while not task.done():
            task.cancel()
            await turns(1)
        assert manager.parts.calls.count == 0
        assert task.cancelled()


async def copying(manager: TieringOffloadingManager) -> bool:
    return manager.parts.calls.count > 0


async def test_holding_twice_and_nested() -> None:
    keys = keys_of(3)
    async with opened(4) as manager:
        async with manager.holding(keys, rows(keys)), manager.holding(keys[:2], rows(keys[:2])):

            async def there() -> bool:
                return (await manager.match(keys)).blocks == 3

            await eventually(there)
        out = blank(3)
        assert await manager.load(keys, out) == 3
        assert np.array_equal(out, rows(keys))


async def test_close_inside_a_hold_does_not_wait_for_it() -> None:
    keys = keys_of(3)
    manager = TieringOffloadingManager(config(4), LAYOUT)
    await manager.open()
    async with manager.holding(keys, rows(keys)):
        assert await ended(manager.aclose(deadline_s=600)) == []
        assert not manager.organs.arena.quarantined
    with pytest.raises(ClosedError):
        async with manager.holding(keys, rows(keys)):
            pass


async def test_stale_weights_a_hold_does_not_outlive_a_reset() -> None:
    """row 16: what the caller holds was computed with the old weights."""
    keys, other = keys_of(2), keys_of(2, salt=b"other")
    async with opened(4) as manager, manager.holding(keys, rows(keys)):
        await manager.reset("weights-2")
        await manager.store(other, rows(other))
        await manager.load(other, blank(2))
        await turns()
        assert (await manager.match(keys)).blocks == 0
