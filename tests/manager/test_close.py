"""The end of a manager: orderly, under load, half-way, and after its I/O thread or its control state broke."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.manager.world import (
    LAYOUT,
    PATIENCE_S,
    blank,
    config,
    ended,
    eventually,
    faulty,
    is_blank,
    keys_of,
    pushed_out,
    rows,
    turns,
)
from tiering import (
    BackendError,
    ClosedError,
    KVLayout,
    TieringConfig,
    TieringOffloadingManager,
)
from tiering.runtime.clock import Clock
from tiering.testing import VirtualClock

_made: list[TieringOffloadingManager] = []


def made(settings: TieringConfig, layout: KVLayout, clock: Clock | None = None) -> TieringOffloadingManager:
    """A manager that is closed even if the test fails."""
    _made.append(TieringOffloadingManager(settings, layout, clock=clock))
    return _made[-1]


@pytest.fixture(autouse=True)
def closed_whatever_happens() -> Iterator[None]:
    yield
    while _made:
        manager = _made.pop()
        manager.begin_close(deadline_s=1.0, flush=False).result(PATIENCE_S)
        manager.end_close()


# -- close ------------------------------------------------------------------------------------------------------------


async def test_close_ends_every_call_under_way() -> None:
    """row 8: none of them could go on by itself; each returns what it has, soon, and the close with them."""
    tier, plan = faulty("far", deadline="10m", queue_bytes=4096)
    keys, many = keys_of(2), keys_of(9, salt=b"many")
    manager = made(config(4, tier, flush_on_close=0), LAYOUT)
    await manager.open()
    await pushed_out(manager, keys, 4)
    plan.hang("load")
    plan.hang("store")
    loading = asyncio.create_task(manager.load(keys, blank(2), deadline_s=600))
    fetching = asyncio.create_task(manager.prefetch(keys, deadline_s=600))
    storing = asyncio.create_task(manager.store(many, rows(many), deadline_s=600))
    flushing = asyncio.create_task(manager.flush(deadline_s=600))
    matching = asyncio.create_task(manager.match(keys_of(1, salt=b"none"), deadline_s=600))
    await asyncio.wrap_future(plan.when_hung("load"))
    await asyncio.wrap_future(plan.when_hung("store"))
    closing = asyncio.create_task(manager.aclose(deadline_s=600))
    assert await ended(loading) == 0
    assert await ended(fetching) == 0
    report = await ended(storing)
    assert report.stored + report.present + report.refused == 9
    assert report.refused > 0
    await ended(matching)
    assert not closing.done()
    plan.release()
    await ended(flushing)
    assert await ended(closing) == []
    assert not manager.organs.arena.quarantined


async def test_close_twice_at_once_and_again_gives_one_answer() -> None:
    tier, plan = faulty("far")
    manager = made(config(4, tier, flush_on_close=0), LAYOUT)
    await manager.open()
    plan.hang("store", cancellable=False)
    await manager.store(keys_of(1), rows(keys_of(1)))
    await asyncio.wrap_future(plan.when_hung("store"))
    first = asyncio.create_task(manager.aclose(deadline_s=0.3))
    second = asyncio.create_task(manager.aclose(deadline_s=600))
    assert await ended(first) == await ended(second) == await ended(manager.aclose()) == ["far"]
    assert manager.organs.arena.quarantined
    plan.release()


async def test_close_cancelled_finishes_first() -> None:
    tier, plan = faulty("far")
    manager = made(config(4, tier, flush_on_close=0), LAYOUT)
    await manager.open()
    plan.hang("aclose")
    closing = asyncio.create_task(manager.aclose(deadline_s=600))
    await asyncio.wrap_future(plan.when_hung("aclose"))
    for _ in range(3):
        closing.cancel()
        await turns()
    assert not closing.done()
    plan.release()
    with pytest.raises(asyncio.CancelledError):
        await ended(closing)
    assert not any(t.name.startswith("tiering-io") for t in threading.enumerate())


def test_close_does_not_need_the_loop_that_began_it() -> None:
    """The end of ``asyncio.run`` cancels whatever runs on the loop; the close is not among it."""
    tier, plan = faulty("far")
    manager = made(config(4, tier, flush_on_close=0), LAYOUT)

    async def leave() -> None:
        await manager.open()
        plan.hang("aclose")
        manager.begin_close(deadline_s=PATIENCE_S)
        await asyncio.wrap_future(plan.when_hung("aclose"))

    asyncio.run(leave())
    plan.release()
    assert manager.sync.close() == []


async def test_a_task_that_is_torn_down_with_its_loop_closes_its_manager() -> None:
    def main() -> TieringOffloadingManager:
        manager = made(config(4), LAYOUT)

        async def service() -> None:
            async with manager:
                await asyncio.sleep(600)

        async def run() -> None:
            task = asyncio.create_task(service(), name="service")
            await turns(3)
            del task

        asyncio.run(run())
        return manager

    manager = await asyncio.to_thread(main)
    with pytest.raises(ClosedError):
        _ = manager.parts


# -- the I/O thread ---------------------------------------------------------------------------------------------------


def _die() -> None:
    raise SystemExit("injected")


async def _dead(manager: TieringOffloadingManager) -> None:
    manager.parts.io.call_soon(_die)

    async def dead() -> bool:
        return manager.parts.notices.get("io_thread_died") == 1

    await eventually(dead)


async def test_silent_thread_death_of_the_io_thread_is_seen_and_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """row 34: health turns red, it is logged and counted; CPU hits go on, the rest are misses, and a close ends."""
    tier, _ = faulty("far")
    keys, hot, more = keys_of(4), keys_of(2, salt=b"hot"), keys_of(2, salt=b"more")
    manager = made(config(8, tier), LAYOUT)
    await manager.open()
    await pushed_out(manager, keys, 8)
    await manager.store(hot, rows(hot))
    await manager.flush()
    assert manager.stats()["healthy"]
    await _dead(manager)
    stats = manager.stats()
    assert (stats["healthy"], stats["io_thread_alive"], stats["notices"]["io_thread_died"]) == (False, False, 1)
    assert "I/O thread died" in caplog.text
    out = blank(2)
    assert await ended(manager.load(hot, out)) == 2
    assert np.array_equal(out, rows(hot))
    assert await ended(manager.load(keys, blank(4))) == 0
    assert (await ended(manager.match(keys))).blocks == 0
    assert (await ended(manager.store(more, rows(more)))).stored == 2
    assert (await ended(manager.flush())).acknowledged == 0
    with pytest.raises(ClosedError):
        await ended(manager.usage())
    await ended(manager.reset("weights-2"))
    assert await ended(manager.load(hot, blank(2))) == 0
    assert await ended(manager.aclose(deadline_s=600)) == ["far"]
    with pytest.raises(ClosedError):
        await manager.match(keys)


async def test_silent_thread_death_ends_calls_under_way() -> None:
    """row 34: the answers that they wait for will never come: not even the end of the thread ends these reads."""
    tier, plan = faulty("far", deadline="10m")
    keys, many = keys_of(2), keys_of(9, salt=b"many")
    manager = made(config(4, tier), LAYOUT)
    await manager.open()
    await pushed_out(manager, keys, 4)
    plan.hang("load", cancellable=False)
    plan.hang("store", cancellable=False)
    loading = asyncio.create_task(manager.load(keys, blank(2), deadline_s=600))
    await asyncio.wrap_future(plan.when_hung("load"))
    storing = asyncio.create_task(manager.store(many, rows(many), deadline_s=600))
    await asyncio.wrap_future(plan.when_hung("store"))
    flushing = asyncio.create_task(manager.flush(deadline_s=600))
    await turns()
    await _dead(manager)
    assert await ended(loading) == 0
    assert (await ended(storing)).refused > 0
    await ended(flushing)
    await ended(manager.reset("weights-2", deadline_s=600))
    assert (await manager.match(keys)).blocks == 0
    await ended(manager.aclose())


async def test_silent_thread_death_is_seen_without_any_tier_too() -> None:
    """row 34: nothing else would turn red."""
    manager = made(config(4), LAYOUT)
    await manager.open()
    await _dead(manager)
    assert not manager.stats()["healthy"]
    await ended(manager.aclose())


async def test_no_deadline_a_blocked_io_loop_does_not_block_a_close() -> None:
    """row 8: a backend that breaks its contract and blocks the loop: misses meanwhile, and a close that ends."""
    tier, _ = faulty("far", shared=True, deadline="50ms")
    keys = keys_of(2)
    manager = made(config(4, tier), LAYOUT)
    await manager.open()
    let_go, blocked = threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        let_go.wait(PATIENCE_S)

    manager.parts.io.call_soon(block)
    assert await asyncio.to_thread(blocked.wait, PATIENCE_S)
    assert (await ended(manager.match(keys))).blocks == 0
    assert await ended(manager.load(keys, blank(2), deadline_s=0.1)) == 0
    assert await ended(manager.aclose(deadline_s=0.2, flush=False)) == ["far"]
    assert manager.organs.arena.quarantined
    let_go.set()


# -- the fuse ---------------------------------------------------------------------------------------------------------

BOGUS = """
from tiering.policies.lru import LRUPolicy

class Bogus(LRUPolicy):
    def touch(self, path):
        assert path[0] != b"defect", "never seen"
        super().touch(path)
"""


def _install_policy(site: Path) -> None:
    """What pip leaves behind of a plug-in: a module and a distribution's metadata."""
    info = site / "bogus_policy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bogus-policy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tiering.policies]\nbogus = bogus_policy:Bogus\n")
    (site / "bogus_policy.py").write_text(BOGUS)


async def test_a_contradiction_costs_the_cache_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A policy plug-in breaks in the middle of a step: everybody who waits or calls gets a miss or a refusal."""
    _install_policy(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    clock = VirtualClock()
    tier, plan = faulty("far", policy="lru")
    keys, more = keys_of(4), keys_of(2, salt=b"more")
    manager = made(config(4, tier, primary={"policy": "bogus"}), LAYOUT, clock)
    await manager.open()
    plan.hang("store")
    fill = manager.sync.plan_store(keys[:1])
    loading = asyncio.create_task(manager.load(keys, blank(4), deadline_s=600))
    await manager.store(keys, rows(keys))
    await asyncio.wrap_future(plan.when_hung("store"))
    flushing = asyncio.create_task(manager.flush(deadline_s=600))
    storing = asyncio.create_task(manager.store(more, rows(more), deadline_s=600))
    async with manager.holding(keys, rows(keys)):
        await turns(50)
        assert not any(task.done() for task in (loading, flushing, storing))
        # The clock stands still: they end by this, or never.
        manager.sync.touch([b"defect"])
        report = await ended(storing)
        assert report.refused == 2
        assert "internal contradiction" in report.outcomes[0].why
        await ended(flushing)
        assert await ended(loading) == 0
    stats = manager.stats()
    assert stats["fused"]
    assert not stats["healthy"]
    assert "never seen" in stats["fused_reason"]
    assert (await manager.match(keys)).blocks == 0
    out = blank(4)
    assert await manager.load(keys, out) == 0
    assert is_blank(out)
    assert await manager.prefetch(keys) == 0
    manager.sync.complete(fill.job, [])
    plan.release()
    await ended(manager.reset("weights-2"))
    assert len([r for r in caplog.records if "switched off" in r.getMessage()]) == 1
    await ended(manager.aclose())


async def test_a_tier_that_fails_to_close_is_given_up_and_no_error() -> None:
    tier, plan = faulty("far")
    manager = made(config(4, tier, flush_on_close=0), LAYOUT)
    await manager.open()
    plan.fail_calls("aclose", lambda: BackendError("injected"))
    assert await ended(manager.aclose()) == ["far"]
