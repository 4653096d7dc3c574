"""The synchronous face, as a scheduler uses it: a plain thread without any event loop."""

from __future__ import annotations

import asyncio
import functools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.manager.world import BLOCK_BYTES, LAYOUT, backend_of, blank, config, content, faulty, keys_of, rows
from tiering import ClosedError, KVLayout, Outcome, PrefixMatch, ShapeError, TieringOffloadingManager, block_keys
from tiering.core.invariants import check

PATIENCE_S = 20.0


def until(condition: Callable[[], Any], limit_s: float = PATIENCE_S) -> Any:
    """Ask again until the answer is true, as a scheduler does in its steps; that answer."""
    end_s = time.monotonic() + limit_s
    while not (answer := condition()):
        assert time.monotonic() < end_s, "it never came"
    return answer


@pytest.fixture
def opened() -> Iterator[Callable[..., TieringOffloadingManager]]:
    managers = []

    def open_(*args: Any, **more: Any) -> TieringOffloadingManager:
        manager = TieringOffloadingManager(config(*args, **more), LAYOUT)
        managers.append(manager)
        manager.sync.open()
        return manager

    yield open_
    for manager in managers:
        manager.sync.close()


def store(manager: TieringOffloadingManager, keys: list[bytes], parent: bytes | None = None) -> int:
    """What an engine's worker does with a plan; blocks stored."""
    plan = manager.sync.plan_store(keys, parent=parent)
    for grant in plan.grants:
        manager.sync.slot_view(grant.slot)[:] = content(grant.key).tobytes()
    if plan.job:
        manager.sync.complete(plan.job, [Outcome.OK] * len(plan.grants))
    return len(plan.grants)


def read(manager: TieringOffloadingManager, keys: list[bytes], slots: tuple[int, ...]) -> None:
    for key, slot in zip(keys, slots, strict=False):
        assert bytes(manager.sync.slot_view(slot)) == content(key).tobytes()


Open = Callable[..., TieringOffloadingManager]


def test_store_look_load_and_release_without_a_loop(opened: Open) -> None:
    manager, keys = opened(4), keys_of(4)
    assert manager.sync.lookup(keys) == PrefixMatch(0, 0, 0, {})
    assert store(manager, keys) == 4
    assert manager.sync.lookup(keys) == PrefixMatch(4, 16, 4, {"primary": 4})
    plan = manager.sync.plan_load(keys)
    assert plan.done
    assert len(plan.slots) == 4
    assert manager.stats()["primary"]["leases"] == 4
    read(manager, keys, plan.slots)
    manager.sync.release(plan.job)
    assert manager.stats()["primary"]["leases"] == 0
    assert store(manager, keys) == 0


def test_a_plan_that_fails_leaves_nothing(opened: Open) -> None:
    manager, keys = opened(4), keys_of(3)
    plan = manager.sync.plan_store(keys)
    manager.sync.complete(plan.job, [Outcome.OK, Outcome.failed("copy"), Outcome.OK])
    match = manager.sync.lookup(keys)
    assert match is not None
    assert match.blocks == 1
    assert store(manager, keys) == 1
    manager.sync.complete(plan.job, [Outcome.OK] * 3)
    assert manager.stats()["unknown_completions"] == 1


def test_a_promotion_is_told_once_by_poll(opened: Open) -> None:
    tier, plan_of_tier = faulty("far")
    manager, keys, push = opened(4, tier), keys_of(4), keys_of(4, salt=b"push")
    store(manager, keys)
    until(lambda: manager.stats()["demoted_blocks"] == 4)
    store(manager, push)
    until(lambda: manager.stats()["demoted_blocks"] == 8)
    plan_of_tier.hang("load")
    plan = manager.sync.plan_load(keys)
    assert (plan.done, plan.slots) == (False, ())
    assert manager.sync.poll() == []
    plan_of_tier.release()
    [(job, slots)] = until(manager.sync.poll)
    assert (job, len(slots)) == (plan.job, 4)
    read(manager, keys, slots)
    assert manager.sync.poll() == []
    manager.sync.release(job)
    assert manager.stats()["primary"]["leases"] == 0


def test_reads_after_abort_a_load_given_up_is_never_told(opened: Open) -> None:
    """row 27: released while its read hangs: no answer comes for it, and its slots come back."""
    tier, plan_of_tier = faulty("far")
    manager, keys = opened(4, tier, flush_on_close=0), keys_of(4)
    store(manager, keys)
    until(lambda: manager.stats()["demoted_blocks"] == 4)
    store(manager, keys_of(4, salt=b"push"))
    until(lambda: manager.stats()["demoted_blocks"] == 8)
    plan_of_tier.hang("load")
    plan = manager.sync.plan_load(keys)
    plan_of_tier.when_hung("load").result(PATIENCE_S)
    manager.sync.release(plan.job)
    plan_of_tier.release()
    until(lambda: manager.stats()["primary"]["busy_slots"] == 0)
    assert manager.sync.poll() == []


def test_a_lookup_says_ask_again_while_a_shared_tier_is_asked(opened: Open) -> None:
    tier, plan_of_tier = faulty("far", shared=True)
    manager, keys = opened(4, tier), keys_of(4)
    plan_of_tier.hang("contains")
    assert manager.sync.lookup(keys) is None
    plan_of_tier.when_hung("contains").result(PATIENCE_S)
    assert manager.sync.lookup(keys) is None
    plan_of_tier.release()
    assert until(lambda: manager.sync.lookup(keys)).blocks == 0
    assert backend_of(tier).calls["contains"] == 1


def test_no_deadline_a_lookup_that_hangs_is_a_miss_after_the_tiers_deadline(opened: Open) -> None:
    """row 8: the tier never answers; the scheduler, who asks again and again, gets its miss."""
    tier, plan_of_tier = faulty("far", shared=True, deadline="50ms")
    manager, keys = opened(4, tier, flush_on_close=0), keys_of(2)
    plan_of_tier.hang("contains")
    assert until(lambda: manager.sync.lookup(keys)).blocks == 0
    store(manager, keys)
    match = manager.sync.lookup(keys)
    assert match is not None
    assert match.blocks == 2
    plan_of_tier.release()


def test_stale_weights_a_load_that_waits_ends_empty_at_a_reset(opened: Open) -> None:
    """row 16: `poll` tells of it, with no slots of the old weights."""
    manager, keys = opened(4), keys_of(3)
    store(manager, keys[:2])
    fill = manager.sync.plan_store(keys)
    plan = manager.sync.plan_load(keys)
    assert not plan.done
    asyncio.run(manager.reset("weights-2"))
    assert manager.sync.poll() == [(plan.job, ())]
    manager.sync.complete(fill.job, [Outcome.OK])
    manager.sync.release(plan.job)
    match = manager.sync.lookup(keys)
    assert match is not None
    assert match.blocks == 0
    assert manager.stats()["primary"]["busy_slots"] == 0


def test_mistakes_of_the_caller_are_his_alone(opened: Open) -> None:
    """They name the place, change nothing, and do not switch the cache off for everybody."""
    manager, keys = opened(4), keys_of(2)
    store(manager, keys)
    sync: Any = manager.sync
    for call in (sync.lookup, sync.plan_store, sync.plan_load, sync.touch):
        for group in (1, -1):
            with pytest.raises(ShapeError, match="group"):
                call(keys, group=group)
        with pytest.raises(ShapeError, match=r"keys\[0\]"):
            call([["no key"]])
    with pytest.raises(ShapeError, match="parent"):
        sync.plan_store(keys, parent="text")
    with pytest.raises(ShapeError, match="group"):
        sync.slot_view(0, group=2)
    with pytest.raises(ShapeError, match="slot"):
        sync.slot_view(4)
    fill = sync.plan_store(keys_of(3))
    with pytest.raises(ShapeError, match=r"outcomes\[0\].*bool"):
        sync.complete(fill.job, [True])
    sync.complete(fill.job, [])
    assert not manager.stats()["fused"]
    assert sync.lookup(keys).blocks == 2
    assert manager.stats()["primary"]["busy_slots"] == 0


def test_long_lists_are_taken_in_parts() -> None:
    layout = KVLayout.uniform(model="test", tokens_per_block=1, block_bytes=16)
    keys = block_keys(list(range(5000)), layout)
    manager = TieringOffloadingManager(config(6000), layout)
    manager.sync.open()
    try:
        start = 0
        while start < len(keys):
            plan = manager.sync.plan_store(keys[start:], parent=keys[start - 1] if start else None)
            assert 0 < plan.stop <= 512
            manager.sync.complete(plan.job, [Outcome.OK] * len(plan.grants))
            start += plan.stop
        match = manager.sync.lookup(keys)
        assert match is not None
        assert match.blocks == 5000
        manager.sync.touch(keys)
        plan_load = manager.sync.plan_load(keys)
        assert len(plan_load.slots) == 2048
        manager.sync.release(plan_load.job)
    finally:
        manager.sync.close()


# -- open and close ---------------------------------------------------------------------------------------------------


def test_before_open_and_after_close() -> None:
    manager, keys = TieringOffloadingManager(config(4), LAYOUT), keys_of(2)
    with pytest.raises(ClosedError, match="not open"):
        manager.sync.lookup(keys)
    manager.sync.open()
    assert manager.sync.close() == []
    assert manager.sync.close() == []
    for call in (manager.sync.lookup, manager.sync.plan_store, manager.sync.plan_load, manager.sync.touch):
        with pytest.raises(ClosedError):
            call(keys)
    with pytest.raises(ClosedError):
        manager.sync.slot_view(0)
    with pytest.raises(ClosedError, match="once"):
        manager.sync.open()


async def test_open_in_a_thread_with_a_loop_is_refused_with_a_remedy() -> None:
    manager = TieringOffloadingManager(config(4), LAYOUT)
    with pytest.raises(RuntimeError, match=r"await manager\.open"):
        manager.sync.open()
    async with manager:
        assert (await manager.match(keys_of(1))).blocks == 0


def test_abort_and_finish_what_is_out_comes_back_during_and_after_a_close() -> None:
    """row 25: a close waits for transfers; their reports never raise, and a report to a closed manager is no error."""
    manager, keys = TieringOffloadingManager(config(4), LAYOUT), keys_of(3)
    manager.sync.open()
    store(manager, keys[:2])
    fill = manager.sync.plan_store(keys)
    view = manager.sync.slot_view(fill.grants[0].slot)
    lease = manager.sync.plan_load(keys[:2])
    closing = manager.begin_close(deadline_s=PATIENCE_S)
    with pytest.raises(ClosedError):
        manager.sync.plan_load(keys)
    assert not closing.done()
    view[:] = bytes(BLOCK_BYTES)
    view.release()
    manager.sync.complete(fill.job, [Outcome.OK])
    assert not closing.done()
    manager.sync.release(lease.job)
    assert closing.result(PATIENCE_S) == []
    assert not manager.organs.arena.quarantined
    manager.sync.complete(fill.job, [Outcome.OK])
    manager.sync.release(lease.job)
    assert manager.sync.poll() == []


def test_a_close_does_not_unmap_what_a_transfer_still_holds() -> None:
    """Past the deadline it ends all the same, and the memory stays mapped for the life of the process."""
    manager = TieringOffloadingManager(config(4), LAYOUT)
    manager.sync.open()
    plan = manager.sync.plan_store(keys_of(1))
    address = np.frombuffer(manager.sync.slot_view(plan.grants[0].slot), np.uint8)
    assert manager.begin_close(deadline_s=0.05).result(PATIENCE_S) == []
    assert manager.organs.arena.quarantined
    address[:] = 7  # a DMA that nobody could stop
    assert address.sum() == 7 * BLOCK_BYTES


def test_a_close_from_a_thread_ends_an_async_call_of_a_loop() -> None:
    """row 8: the call waits for a tier that never answers; it returns, with a miss, long before its deadline."""
    tier, plan_of_tier = faulty("far", deadline="10m")
    manager = TieringOffloadingManager(config(4, tier, flush_on_close=0), LAYOUT)
    keys = keys_of(4)

    async def fill_and_load() -> int:
        await manager.open()
        await manager.store(keys, rows(keys))
        await manager.flush()
        push = keys_of(4, salt=b"push")
        await manager.store(push, rows(push))
        await manager.flush()
        plan_of_tier.hang("load")
        return await manager.load(keys, blank(4), deadline_s=600)

    with ThreadPoolExecutor(1) as engine:
        loading = engine.submit(asyncio.run, fill_and_load())
        plan_of_tier.when_hung("load").result(PATIENCE_S)
        closing = manager.begin_close(deadline_s=0.5)
        assert loading.result(PATIENCE_S) == 0
        assert closing.result(PATIENCE_S) == []


# -- threads ----------------------------------------------------------------------------------------------------------


def test_check_then_pin_many_threads_at_once(opened: Open) -> None:
    """rows 24, 25: threads that store, load, read and abort as they like: no wrong byte, nothing is left leased."""
    tier, _ = faulty("far", blocks=24, batch_blocks_max=2)
    manager = opened(8, tier)
    chains = [keys_of(5, salt=bytes([i])) for i in range(5)]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(60):
                keys = rng.choice(chains)[: rng.randint(1, 5)]
                if rng.random() < 0.5:
                    store(manager, keys)
                    continue
                plan = manager.sync.plan_load(keys)
                slots = plan.slots
                if not plan.done and rng.random() < 0.7:
                    [(_, slots)] = until(functools.partial(ended, plan.job))
                read(manager, keys, slots)
                manager.sync.release(plan.job)
        except BaseException as error:
            failures.append(error)

    def ended(job: int) -> list[tuple[int, tuple[int, ...]]]:
        manager.sync.poll()  # it may tell this thread of another one's job
        return manager.parts.gate.ended([job])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    until(lambda: manager.stats()["open_ops"] == 0)
    stats = manager.stats()
    assert not stats["fused"]
    assert stats["primary"]["leases"] == stats["primary"]["busy_slots"] == 0
    assert stats["open_loads"] == stats["open_stores"] == 0
    check(manager.parts.core.world)
