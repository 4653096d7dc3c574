"""Faults of the tiers as a user of the manager meets them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.manager.world import (
    BLOCK_BYTES,
    LAYOUT,
    backend_of,
    blank,
    config,
    content,
    eventually,
    faulty,
    is_blank,
    keys_of,
    rows,
)
from tiering import BackendError, Outcome, TieringOffloadingManager
from tiering.testing import VirtualClock


async def _flushed(manager: TieringOffloadingManager, keys: list[bytes]) -> None:
    """Store the blocks and see them acknowledged by every tier."""
    await manager.store(keys, rows(keys))
    assert (await manager.flush()).lost == 0


async def _push_out(manager: TieringOffloadingManager, slots: int, salt: bytes = b"push") -> None:
    """Fill the primary tier with other blocks, so that the earlier ones are behind it only."""
    await _flushed(manager, keys_of(slots, salt=salt))


async def test_failed_demotion_is_offered_again() -> None:
    """row 5: a demotion that failed is owed, and a flush or a new offer makes it good."""
    tier, plan = faulty("far")
    keys = keys_of(4)
    async with TieringOffloadingManager(config(8, tier), LAYOUT) as manager:
        plan.outcomes("store", Outcome.failed("injected"), keys=[keys[2]], times=1)
        await manager.store(keys, rows(keys))
        await manager.flush()
        assert (await manager.flush()).lost == 0
        await _push_out(manager, 8)
        out = blank(4)
        assert await manager.load(keys, out) == 4
        assert np.array_equal(out, rows(keys))


async def test_no_fill_of_nearer_tiers() -> None:
    """row 6: what the far tier gave once, the near tier serves from then on."""
    near, near_plan = faulty("near")
    far, _ = faulty("far")
    keys = keys_of(4)
    async with TieringOffloadingManager(config(8, near, far), LAYOUT) as manager:
        near_plan.outcomes("store", Outcome.refused("not now"))
        await manager.store(keys, rows(keys))
        await manager.flush()
        near_plan.heal()
        await _push_out(manager, 8)
        assert await manager.load(keys, blank(4)) == 4
        assert backend_of(far).keys["load"] == 4
        await manager.flush()
        await _push_out(manager, 8, b"again")
        assert await manager.load(keys, blank(4)) == 4
        assert backend_of(far).keys["load"] == 4
        assert backend_of(near).keys["load"] == 4


@pytest.mark.parametrize("outcome", [Outcome.MISSING, Outcome.corrupt("injected"), Outcome.failed("injected")])
async def test_stale_verdict(outcome: Outcome) -> None:
    """rows 7, 13, 21: a block that the tier cannot give is a miss once, is not asked for again, and comes back when stored."""
    tier, plan = faulty("far")
    keys = keys_of(4)
    async with TieringOffloadingManager(config(8, tier), LAYOUT) as manager:
        await _flushed(manager, keys)
        await _push_out(manager, 8)
        plan.outcomes("load", outcome, keys=[keys[2]])
        out = blank(4)
        assert await manager.load(keys, out) == 2
        assert np.array_equal(out[:2], rows(keys[:2]))
        assert is_blank(out[2:])
        reads = backend_of(tier).keys["load"]
        assert await manager.load(keys, blank(4)) == 2
        assert backend_of(tier).keys["load"] == reads
        plan.heal()
        report = await manager.store(keys[2:], rows(keys[2:]), parent=keys[1])
        assert report.stored >= 1
        assert await manager.load(keys, out) == 4
        assert np.array_equal(out, rows(keys))


async def test_batch_poisoned_by_one() -> None:
    """row 23: one bad block costs itself; the good ones behind it are there for whoever needs just them."""
    tier, plan = faulty("far", batch_blocks_max=8)
    keys = keys_of(8)
    async with TieringOffloadingManager(config(8, tier), LAYOUT) as manager:
        await _flushed(manager, keys)
        await _push_out(manager, 8)
        plan.outcomes("load", Outcome.corrupt("injected"), keys=[keys[1]], times=1)
        assert await manager.load(keys, blank(8)) == 1
        assert (await manager.store(keys[1:2], rows(keys[1:2]), parent=keys[0])).stored == 1
        out = blank(8)
        assert await manager.load(keys, out) == 8
        assert np.array_equal(out, rows(keys))


async def test_no_deadline_a_hung_read_is_a_miss_and_late_bytes_land_nowhere() -> None:
    """row 8: past the deadline the load misses, CPU hits go on, and bytes that come late touch no reused slot."""
    clock = VirtualClock()
    tier, plan = faulty("far", deadline="2s")
    keys, hot = keys_of(3), keys_of(2, salt=b"hot")
    manager = TieringOffloadingManager(config(8, tier), LAYOUT, clock=clock)
    async with manager:
        await _flushed(manager, keys)
        await _push_out(manager, 8)
        await manager.store(hot, rows(hot))
        plan.hang("load", cancellable=False)
        waiting = asyncio.create_task(manager.load(keys, blank(3)))
        await asyncio.wrap_future(plan.when_hung("load"))
        assert await manager.load(hot, blank(2)) == 2
        await clock.advance(2.1)
        assert await waiting == 0
        # The request computes and stores its blocks while the late read still holds its slots.
        assert (await manager.store(keys, rows(keys))).stored == 3
        plan.release()
        out = blank(3)
        assert await manager.load(keys, out) == 3
        assert np.array_equal(out, rows(keys))


async def test_reset_and_close_are_bounded_by_their_deadline() -> None:
    """row 8: with a tier that never answers, reset and close still end."""
    clock = VirtualClock()
    tier, plan = faulty("far")
    keys = keys_of(2)
    manager = TieringOffloadingManager(config(4, tier), LAYOUT, clock=clock)
    await manager.open()
    plan.hang("store", cancellable=False)
    await manager.store(keys, rows(keys))
    await asyncio.wrap_future(plan.when_hung("store"))
    closing = asyncio.create_task(manager.aclose(deadline_s=5, flush=False))
    while not closing.done():
        await clock.advance(1.0)
        if clock.now() > 300:  # given up long since; let the thread below end
            plan.release()
    assert closing.result() == ["far"]


async def test_unbounded_queue_bytes_lent_to_a_hung_tier_are_capped() -> None:
    """rows 11, 12: a tier that hangs pins no more than its queue may, and the primary tier goes on storing."""
    tier, plan = faulty("far", queue_bytes=4 * BLOCK_BYTES)
    async with TieringOffloadingManager(config(16, tier, flush_on_close=0), LAYOUT) as manager:
        plan.hang("store")
        for chain in range(8):
            keys = keys_of(6, salt=bytes([chain]))
            await manager.store(keys, rows(keys), deadline_s=0)
            assert manager.stats()["tiers"]["far"]["lent_bytes"] <= 4 * BLOCK_BYTES
        stats = manager.stats()
        assert stats["primary"]["busy_slots"] <= 4
        assert stats["demote_deferred"] > 0
        plan.release()
        await manager.flush()
        assert manager.stats()["tiers"]["far"]["lent_bytes"] == 0


async def test_slow_tier_holds_no_slot_of_the_fast_one() -> None:
    """row 11: with the far tier hung, a chain longer than the primary still flows into the near one."""
    near, _ = faulty("near", blocks=128)
    far, far_plan = faulty("far", blocks=128, queue_bytes=2 * BLOCK_BYTES)
    keys = keys_of(32)
    async with TieringOffloadingManager(config(8, near, far, flush_on_close=0), LAYOUT) as manager:
        far_plan.hang("store")
        report = await manager.store(keys, rows(keys))
        assert report.stored == 32
        match = await manager.match(keys)
        assert match.blocks == 32
        assert manager.stats()["tiers"]["far"]["lent_bytes"] <= 2 * BLOCK_BYTES
        far_plan.release()


async def test_stale_weights_after_reset_every_tier_misses() -> None:
    """row 16: a new epoch misses on every tier; its own blocks hit."""
    tier, _ = faulty("far")
    keys = keys_of(4)
    async with TieringOffloadingManager(config(8, tier), LAYOUT) as manager:
        await _flushed(manager, keys)
        await manager.reset("weights-2")
        assert manager.epoch == "weights-2"
        assert (await manager.match(keys)).blocks == 0
        out = blank(4)
        assert await manager.load(keys, out) == 0
        assert is_blank(out)
        await _flushed(manager, keys)
        assert await manager.load(keys, out) == 4


async def test_enospc_is_reported_and_passes() -> None:
    """row 18: a full medium loses no pin and no accounting; with room again the owed blocks follow."""
    tier, plan = faulty("far")
    keys = keys_of(4)
    async with TieringOffloadingManager(config(8, tier), LAYOUT) as manager:
        plan.enospc(stores=4)
        await manager.store(keys, rows(keys))
        await manager.flush()
        stats = manager.stats()
        assert stats["demote_failures"] >= 4
        assert stats["primary"]["busy_slots"] == 0
        assert (await manager.flush()).lost == 0
        assert manager.stats()["tiers"]["far"]["parked_blocks"] == 0
        await _push_out(manager, 8)
        assert await manager.load(keys, blank(4)) == 4


async def test_check_then_pin_what_was_matched_may_vanish_but_never_lies() -> None:
    """row 24: a match promises nothing; a load leases in one step, so that what it gives is right or a miss."""
    keys = keys_of(4)
    async with TieringOffloadingManager(config(4), LAYOUT) as manager:
        await manager.store(keys, rows(keys))
        assert (await manager.match(keys)).blocks == 4
        other = keys_of(4, salt=b"other")

        async def churn() -> None:
            for i in range(20):
                chain = keys_of(4, salt=bytes([i]))
                await manager.store(chain, rows(chain))

        async def read() -> None:
            for _ in range(20):
                out = blank(4)
                n = await manager.load(keys, out)
                assert np.array_equal(out[:n], rows(keys[:n]))
                assert is_blank(out[n:])
                await manager.store(keys, rows(keys))

        await asyncio.gather(churn(), read(), manager.store(other, rows(other)))
        assert manager.stats()["primary"]["leases"] == 0


async def test_reads_after_abort_are_cancelled_while_queued() -> None:
    """row 27: an aborted load's reads that have not begun never reach the tier."""
    tier, plan = faulty("far", ops_max=1, batch_blocks_max=1)
    keys = keys_of(8)
    async with TieringOffloadingManager(config(8, tier), LAYOUT) as manager:
        await _flushed(manager, keys)
        await _push_out(manager, 8)
        plan.hang("load")
        waiting = asyncio.create_task(manager.load(keys, blank(8)))
        await asyncio.wrap_future(plan.when_hung("load"))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        plan.release()
        await manager.flush()
        await _idle(manager)
        assert backend_of(tier).keys["load"] == 1
        assert manager.stats()["primary"]["busy_slots"] == 0


async def test_echo_promoted_blocks_are_not_stored_back() -> None:
    """row 30: a promotion causes no store in the tier that it came from."""
    tier, _ = faulty("far")
    keys = keys_of(4)
    async with TieringOffloadingManager(config(8, tier), LAYOUT) as manager:
        await _flushed(manager, keys)
        await _push_out(manager, 8)
        stores = backend_of(tier).keys["store"]
        assert await manager.load(keys, blank(4)) == 4
        await manager.flush()
        assert backend_of(tier).keys["store"] == stores


async def test_burst_drops_nothing_while_idle_blocks_exist() -> None:
    """row 29: eviction is on demand: a burst of ten times the slots loses no block."""
    tier, _ = faulty("far", blocks=256)
    async with TieringOffloadingManager(config(8, tier), LAYOUT) as manager:
        chains = [keys_of(4, salt=bytes([i])) for i in range(20)]
        reports = await asyncio.gather(*(manager.store(chain, rows(chain)) for chain in chains))
        assert sum(report.stored for report in reports) == 80
        await manager.flush()
        assert [(await manager.match(chain)).blocks for chain in chains] == [4] * 20


async def test_dead_backend_call_does_not_kill_the_tier() -> None:
    """row 34: an exception that nobody expects ends that call, not the tier: it is counted and the next call works."""
    tier, plan = faulty("far")
    keys, more = keys_of(2), keys_of(2, salt=b"more")
    async with TieringOffloadingManager(config(8, tier), LAYOUT) as manager:
        plan.die("store")
        await manager.store(keys, rows(keys))
        await manager.flush()
        assert (await manager.flush()).lost == 0
        await _flushed(manager, more)
        assert manager.stats()["demote_failures"] >= 1
        assert manager.stats()["tiers"]["far"]["state"] == "up"


async def test_breaker_closes_again_after_the_tier_recovers() -> None:
    """rows 9, 34: errors take the tier out, its state says so, and it comes back by itself; what was owed then follows."""
    clock = VirtualClock()
    tier, plan = faulty("far")
    keys = keys_of(6)
    async with TieringOffloadingManager(config(8, tier), LAYOUT, clock=clock) as manager:
        plan.fail_calls("store", lambda: BackendError("injected"))
        for i in range(6):
            await manager.store(keys[i : i + 1], rows(keys[i : i + 1]), parent=keys[i - 1] if i else None)
            await manager.flush(deadline_s=1)
        assert manager.stats()["tiers"]["far"]["state"] == "degraded"
        assert not manager.stats()["healthy"]
        plan.heal()
        async with asyncio.timeout(30):
            while manager.stats()["tiers"]["far"]["state"] != "up":
                await clock.advance(1.0)
        assert (await manager.flush()).lost == 0
        assert manager.stats()["tiers"]["far"]["owed_blocks"] == 0
        assert manager.stats()["healthy"]


async def test_metrics_that_lie_invariants_between_counters() -> None:
    """row 35: queries are hits plus misses, hits are split by tier without rest, and usage equals what the tier holds."""
    tier, plan = faulty("far")
    keys = keys_of(8)
    async with TieringOffloadingManager(config(4, tier), LAYOUT) as manager:
        await _flushed(manager, keys)
        usage = await backend_of(tier).usage()
        assert usage is not None
        assert manager.stats()["tiers"]["far"]["used_bytes"] == usage.live_bytes == 8 * (BLOCK_BYTES + 128)
        plan.outcomes("load", Outcome.MISSING, keys=[keys[3]])
        for n in (2, 8, 8, 5):
            await manager.load(keys[:n], blank(n))
        plan.heal()
        await manager.flush()
        stats = manager.stats()
        assert stats["query_blocks"] == 2 + 8 + 8 + 5
        assert stats["query_blocks"] == stats["hit_blocks"] + stats["miss_blocks"]
        assert sum(stats["hit_blocks_by_tier"].values()) == stats["hit_blocks"]
        assert stats["open_loads"] == stats["open_stores"] == 0


async def _idle(manager: TieringOffloadingManager) -> None:
    async def no_op_open() -> bool:
        return not manager.stats()["open_ops"]

    await eventually(no_op_open)


def test_contents_differ_by_key() -> None:
    """The oracle itself: two keys never share bytes, so that a swapped block cannot go unnoticed."""
    assert not np.array_equal(content(b"a"), content(b"b"))
