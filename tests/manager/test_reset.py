"""New weights: nothing of the old ones is given out or kept, whatever was under way."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.manager.world import (
    LAYOUT,
    PATIENCE_S,
    backend_of,
    blank,
    busy_copies,
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
    Outcome,
    OutcomeCode,
    TieringError,
    TieringOffloadingManager,
)
from tiering.core.events import Reset
from tiering.runtime.clock import SystemClock

# -- reset ------------------------------------------------------------------------------------------------------------


async def test_stale_weights_a_load_returns_no_old_block_once_a_reset_has() -> None:
    """row 16: the load had its slots and waited for its copy; the reset waits for it, and the next load misses."""
    keys = keys_of(4)
    async with opened(4) as manager:
        await manager.store(keys, rows(keys))
        order: list[str] = []

        async def load() -> int:
            n = await manager.load(keys, blank(4))
            order.append("load")
            return n

        async def reset() -> None:
            await manager.reset("weights-2")
            order.append("reset")
            assert await manager.load(keys, blank(4)) == 0

        with busy_copies(manager) as go_on:
            loading, resetting = asyncio.create_task(load()), asyncio.create_task(reset())

            async def switched() -> bool:
                return bool(manager.stats()["resets"])

            await eventually(switched)
            await turns(50)
            assert order == []
            go_on.set()
            await ended(loading)
            await ended(resetting)
        assert order == ["load", "reset"]


async def test_stale_weights_a_load_that_waits_for_a_tier_ends_empty_at_a_reset() -> None:
    """row 16: what it had leased by then is of the old weights, too."""
    tier, plan = faulty("far", batch_blocks_max=1)
    keys = keys_of(4)
    async with opened(4, tier) as manager:
        await pushed_out(manager, keys, 4)
        await manager.prefetch(keys[:2])
        plan.hang("load")
        out = blank(4)
        loading = asyncio.create_task(manager.load(keys, out))
        await asyncio.wrap_future(plan.when_hung("load"))
        resetting = asyncio.create_task(manager.reset("weights-2", deadline_s=1.0))
        assert await ended(loading) == 0
        assert is_blank(out)
        plan.release()
        await ended(resetting)
        assert (await manager.match(keys)).blocks == 0


async def test_stale_weights_a_store_that_waits_for_room_stores_nothing_after_a_reset() -> None:
    """row 16: its rows were computed with the old weights; the new epoch must never see them."""
    tier, plan = faulty("far", queue_bytes=2 * 4096)
    keys = keys_of(12)
    async with opened(4, tier) as manager:
        plan.hang("store")
        storing = asyncio.create_task(manager.store(keys, rows(keys)))
        await asyncio.wrap_future(plan.when_hung("store"))
        resetting = asyncio.create_task(manager.reset("weights-2", deadline_s=1.0))
        report = await ended(storing)
        assert (report.stored, report.present, report.refused) == (0, 0, 12)
        assert {(o.code, "reset" in o.why) for o in report.outcomes} == {(OutcomeCode.REFUSED, True)}
        plan.release()
        await ended(resetting)
        assert (await manager.match(keys)).blocks == 0
        assert await manager.load(keys, blank(12)) == 0


async def test_stale_weights_a_copy_under_way_lands_nowhere_after_a_reset() -> None:
    """row 16: granted before, copied after."""
    keys = keys_of(4)
    async with opened(4) as manager:
        with busy_copies(manager) as go_on:
            storing = asyncio.create_task(manager.store(keys, rows(keys)))
            await turns()
            await ended(manager.reset("weights-2"))
            go_on.set()
            assert (await ended(storing)).refused == 4
        assert (await manager.match(keys)).blocks == 0
        assert (await manager.store(keys, rows(keys))).stored == 4


@pytest.mark.parametrize("times", [0, 1, 2, 3, 5, 8, 13, 21])
async def test_reset_cancelled_is_carried_out_all_the_same(times: int) -> None:
    tier, _ = faulty("far")
    keys = keys_of(4)
    async with opened(4, tier) as manager:
        await manager.store(keys, rows(keys))
        await manager.flush()
        task = asyncio.create_task(manager.reset("weights-2"))
        await turns(1 + times)
        task.cancel()
        await asyncio.wait({task})

        async def back() -> bool:
            return bool(manager.stats()["resets"]) and manager.stats()["healthy"]

        await eventually(back)
        assert manager.epoch == "weights-2"
        assert (await manager.match(keys)).blocks == 0


async def test_resets_at_once_end_in_the_last_epoch() -> None:
    tier, _ = faulty("far")
    keys = keys_of(4)
    async with opened(4, tier) as manager:
        await asyncio.gather(manager.reset("weights-2"), manager.reset("weights-3"))
        assert manager.epoch == "weights-3"

        async def up() -> bool:
            return bool(manager.stats()["healthy"])

        await eventually(up)
        await manager.store(keys, rows(keys))
        assert (await manager.flush()).lost == 0
        assert backend_of(tier).calls["store"] > 0


async def test_close_while_it_resets() -> None:
    tier, plan = faulty("far")
    manager = TieringOffloadingManager(config(4, tier), LAYOUT)
    await manager.open()
    plan.hang("open")
    resetting = asyncio.create_task(manager.reset("weights-2"))
    await asyncio.wrap_future(plan.when_hung("open"))
    await ended(manager.aclose(deadline_s=5))
    await asyncio.wait({resetting}, timeout=PATIENCE_S)
    assert resetting.done()
    assert resetting.exception() is None or isinstance(resetting.exception(), TieringError)


async def test_stale_weights_calls_that_begin_while_it_resets_get_and_store_nothing() -> None:
    """row 16: until the reset has returned nobody can tell which weights the bytes of such a call are of."""
    tier, plan = faulty("far")
    keys, other = keys_of(2), keys_of(2, salt=b"other")
    async with opened(4, tier) as manager:
        await manager.store(keys, rows(keys))
        await manager.flush()
        plan.hang("open")
        resetting = asyncio.create_task(manager.reset("weights-2", deadline_s=600))
        await asyncio.wrap_future(plan.when_hung("open"))
        assert manager.stats()["resets"] == 1
        assert (await manager.store(other, rows(other))).refused == 2
        assert await manager.load(keys, blank(2)) == 0
        async with manager.holding(keys, rows(keys)):
            await turns()
            assert (await manager.match(keys)).blocks == 0
        plan.release()
        await ended(resetting)
        assert (await manager.match(other)).blocks == 0
        assert (await manager.store(other, rows(other))).stored == 2


class InterruptingClock(SystemClock):
    """Something happens in another thread just when a call reads the clock for the n-th time."""

    def __init__(self) -> None:
        self.event: Callable[[], None] | None = None
        self.readings_left = 0

    @property
    def pending(self) -> bool:
        return self.event is not None

    def now(self) -> float:
        if self.event is not None and threading.current_thread() is threading.main_thread():
            self.readings_left -= 1
            if self.readings_left < 0:
                event, self.event = self.event, None
                event()
        return super().now()


@pytest.mark.parametrize("readings", range(1, 8))
@pytest.mark.parametrize("call", ["store", "load", "prefetch", "holding"])
async def test_stale_weights_at_any_step_of_a_call(call: str, readings: int) -> None:
    """row 16: the core forgets the old weights between any two steps of the call that wants or brings their bytes.

    The first reading is the call's deadline: a call is about the weights in use just after it.
    """
    clock = InterruptingClock()
    keys = keys_of(3)
    async with opened(4, clock=clock) as manager:
        if call in ("load", "prefetch"):
            await manager.store(keys, rows(keys))
        out = blank(3)
        copied = False

        def forget() -> None:
            nonlocal copied
            copied = manager.parts.reads.count > 0 or not is_blank(out)
            manager.parts.gate.handle(Reset(0.0))

        clock.event, clock.readings_left = forget, readings
        match call:
            case "store":
                report = await manager.store(keys, rows(keys))
                assert report.refused == (0 if clock.pending else 3)
            case "load":
                n = await manager.load(keys, out)
                # A copy that had begun is one that a reset waits for.
                assert n == 0 or clock.pending or copied
                assert np.array_equal(out[:n], rows(keys[:n]))
                assert is_blank(out[n:])
            case "prefetch":
                await manager.prefetch(keys)
            case "holding":
                async with manager.holding(keys, rows(keys)):
                    await turns()
        if not clock.pending:
            assert (await manager.match(keys)).blocks == 0
        clock.event = None


@pytest.mark.parametrize("seed", range(4))
async def test_any_calls_resets_and_cancellations_at_once(seed: int) -> None:
    """rows 16, 25: each load gives the bytes of the weights in use when it began, or none; nothing is left behind."""
    rng = random.Random(seed)
    near, near_plan = faulty("near", blocks=12, batch_blocks_max=2)
    far, far_plan = faulty("far", blocks=40, queue_bytes=3 * 4096, shared=True)
    near_plan.outcomes("load", Outcome.corrupt("injected"), rate=0.05)
    far_plan.outcomes("store", Outcome.refused("injected"), rate=0.1)
    chains = [keys_of(7, salt=bytes([i])) for i in range(4)]
    weights = "0"
    lock = asyncio.Lock()

    def computed(keys: list[bytes], of: str) -> Any:
        return rows([key[:24] + of.encode() for key in keys])

    async with opened(8, near, far) as manager:

        async def call() -> None:
            nonlocal weights
            keys = rng.choice(chains)[: rng.randint(1, 7)]
            of = weights
            match rng.randrange(7):
                case 0 | 1:
                    await manager.store(keys, computed(keys, of), deadline_s=rng.choice((0, 20)))
                case 2 | 3:
                    out = blank(len(keys))
                    n = await manager.load(keys, out)
                    if n:
                        assert of == weights
                        assert np.array_equal(out[:n], computed(keys[:n], of))
                    assert is_blank(out[n:])
                case 4:
                    async with manager.holding(keys, computed(keys, of)):
                        await manager.match(keys)
                        await turns(rng.randrange(30))
                case 5:
                    await rng.choice((manager.flush, manager.usage, lambda: manager.prefetch(keys)))()
                case 6 if rng.random() < 0.3:
                    async with lock:
                        await manager.reset(f"w{rng.random()}")
                        weights = manager.epoch

        async def caller() -> None:
            for _ in range(25):
                task = asyncio.create_task(call())
                if rng.random() < 0.3:
                    await turns(rng.randrange(40))
                    if not lock.locked():
                        task.cancel()
                await asyncio.wait({task})
                if not task.cancelled():
                    task.result()

        async with asyncio.timeout(60):
            await asyncio.gather(*(caller() for _ in range(5)))
        near_plan.heal()
        far_plan.heal()
        await manager.flush()
        stats = manager.stats()
        assert min(stats["resets"], stats["stored_blocks"], stats["hit_blocks"]) > 0
