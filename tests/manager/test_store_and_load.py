"""The API of a manager: stores, matches and loads that go well, and arguments that do not."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from tests.manager.world import (
    BLOCK_BYTES,
    LAYOUT,
    TOKENS,
    backend_of,
    blank,
    config,
    eventually,
    faulty,
    is_blank,
    keys_of,
    rows,
)
from tiering import (
    ClosedError,
    ConfigError,
    Group,
    KVLayout,
    OutcomeCode,
    ShapeError,
    TieringOffloadingManager,
    block_keys,
)


async def test_what_is_stored_is_matched_and_loaded() -> None:
    keys = keys_of(5)
    async with TieringOffloadingManager(config(8), LAYOUT) as manager:
        report = await manager.store(keys, rows(keys))
        assert (report.stored, report.present, report.refused) == (5, 0, 0)
        match = await manager.match(keys)
        assert (match.blocks, match.tokens, match.loadable_blocks) == (5, 5 * TOKENS, 5)
        assert match.by_tier == {"primary": 5}
        out = blank(5)
        assert await manager.load(keys, out) == 5
        assert np.array_equal(out, rows(keys))
        again = await manager.store(keys, rows(keys))
        assert (again.stored, again.present, again.refused) == (0, 5, 0)
        assert manager.stats()["primary"]["leases"] == 0


async def test_all_or_nothing_store_keeps_the_head_that_fits() -> None:
    """row 3: 5 blocks into 4 slots stores 4, the head."""
    keys = keys_of(5)
    async with TieringOffloadingManager(config(4), LAYOUT) as manager:
        report = await manager.store(keys, rows(keys))
        assert (report.stored, report.present, report.refused) == (4, 0, 1)
        assert [outcome.code for outcome in report.outcomes] == [OutcomeCode.OK] * 4 + [OutcomeCode.REFUSED]
        assert "slot" in report.outcomes[4].why
        out = blank(5)
        assert await manager.load(keys, out) == 4
        assert np.array_equal(out[:4], rows(keys[:4]))
        assert is_blank(out[4:])


async def test_a_chain_of_four_times_the_slots_flows_through() -> None:
    """A chain longer than the primary tier flows through it into the tier behind, and all of it is found."""
    slots = 8
    tier, _ = faulty("far", blocks=64)
    keys = keys_of(4 * slots)
    async with TieringOffloadingManager(config(slots, tier), LAYOUT) as manager:
        report = await manager.store(keys, rows(keys))
        assert report.stored == 4 * slots
        await manager.flush()
        match = await manager.match(keys)
        assert (match.blocks, match.loadable_blocks) == (4 * slots, slots)
        assert sum(match.by_tier.values()) == 4 * slots


async def test_self_thrash_a_long_prefix_yields_its_head_in_one_pass() -> None:
    """row 1: a prefix of four times the slots gives slots blocks, and no block is read twice or in vain."""
    slots = 8
    tier, _ = faulty("far", blocks=64)
    keys = keys_of(4 * slots)
    async with TieringOffloadingManager(config(slots, tier), LAYOUT) as manager:
        await manager.store(keys, rows(keys))
        await manager.flush()
        other = keys_of(slots, salt=b"other")
        await manager.store(other, rows(other))
        await manager.flush()
        before = backend_of(tier).keys["load"]
        out = blank(4 * slots)
        assert await manager.load(keys, out) == slots
        assert backend_of(tier).keys["load"] - before == slots
        assert np.array_equal(out[:slots], rows(keys[:slots]))
        assert is_blank(out[slots:])


async def test_a_reserve_is_left_to_stores() -> None:
    """row 2: promotions never take the slots that are kept for stores."""
    tier, plan = faulty("far")
    keys, other = keys_of(8), keys_of(2, salt=b"other")
    async with TieringOffloadingManager(config(8, tier, reserve="25%"), LAYOUT) as manager:
        await manager.store(keys, rows(keys))
        await manager.flush()
        filler = keys_of(8, salt=b"filler")
        await manager.store(filler, rows(filler))
        await manager.flush()
        assert (await manager.match(keys)).loadable_blocks == 6
        plan.hang("load")
        waiting = asyncio.create_task(manager.load(keys, blank(8)))
        await asyncio.wrap_future(plan.when_hung("load"))
        report = await manager.store(other, rows(other))
        assert report.stored == 2
        plan.release()
        assert await waiting == 6


async def test_promotion_for_waiting_requests_takes_no_slot() -> None:
    """row 2: a match of many requests, all of them in the far tier, starts no read and takes no slot."""
    tier, _ = faulty("far", blocks=256)
    chains = [keys_of(8, salt=bytes([i])) for i in range(16)]
    async with TieringOffloadingManager(config(8, tier), LAYOUT) as manager:
        for chain in chains:
            assert (await manager.store(chain, rows(chain))).stored == 8
        await manager.flush()
        loads, free = backend_of(tier).calls["load"], manager.stats()["primary"]["ready_blocks"]
        matches = await asyncio.gather(*(manager.match(chain) for chain in chains))
        assert [match.blocks for match in matches] == [8] * 16
        assert backend_of(tier).calls["load"] == loads
        assert manager.stats()["primary"]["ready_blocks"] == free


@pytest.mark.parametrize("kind", ["tensor", "typed tensor", "array", "bytes", "memoryview"])
async def test_sources_of_every_kind(kind: str) -> None:
    keys = keys_of(3)
    data = rows(keys)
    source = {
        "tensor": torch.from_numpy(data.copy()),
        "typed tensor": torch.from_numpy(data.copy()).view(torch.float16),
        "array": data,
        "bytes": data.tobytes(),
        "memoryview": memoryview(bytearray(data.tobytes())),
    }[kind]
    async with TieringOffloadingManager(config(4), LAYOUT) as manager:
        assert (await manager.store(keys, source)).stored == 3
        out = torch.zeros((3, BLOCK_BYTES), dtype=torch.uint8)
        assert await manager.load(keys, out) == 3
        assert np.array_equal(out.numpy(), data)


async def test_bad_arguments_name_the_place_and_touch_nothing() -> None:
    keys = keys_of(2)
    async with TieringOffloadingManager(config(4), LAYOUT) as manager:
        with pytest.raises(ShapeError, match="source"):
            await manager.store(keys, np.zeros((3, BLOCK_BYTES), np.uint8))
        with pytest.raises(ShapeError, match="source"):
            await manager.store(keys, np.zeros((2, BLOCK_BYTES + 1), np.uint8))
        with pytest.raises(ShapeError, match="out"):
            await manager.load(keys, bytes(2 * BLOCK_BYTES))
        with pytest.raises(ShapeError, match=r"keys\[1\].*1 to 36 bytes"):
            await manager.store([keys[0], b""], rows(keys))
        with pytest.raises(ShapeError, match=r"keys\[0\].*str"):
            await manager.match(["text"])  # type: ignore[list-item]
        with pytest.raises(ShapeError, match=r"parent\[0\]"):
            await manager.store(keys, rows(keys), parent=b"x" * 37)
        assert (await manager.match(keys)).blocks == 0


async def test_the_empty_run_is_legal() -> None:
    async with TieringOffloadingManager(config(4), LAYOUT) as manager:
        assert (await manager.store([], blank(0))).outcomes == ()
        assert (await manager.match([])).blocks == 0
        assert await manager.load([], blank(0)) == 0
        assert await manager.prefetch([]) == 0


async def test_an_orphan_is_refused() -> None:
    """A stated parent that is in no tier: its children could never be found."""
    keys = keys_of(3)
    async with TieringOffloadingManager(config(4), LAYOUT) as manager:
        report = await manager.store(keys[1:], rows(keys[1:]), parent=keys[0])
        assert report.refused == 2
        assert "orphan" in report.outcomes[0].why
        assert (await manager.store(keys[1:], rows(keys[1:]))).stored == 2


async def test_more_keys_than_one_hold_of_the_lock() -> None:
    layout = KVLayout.uniform(model="test", tokens_per_block=1, block_bytes=16)
    keys = block_keys(list(range(5000)), layout)
    data = np.arange(5000 * 16, dtype=np.uint64).view(np.uint8).reshape(-1, 16)[:5000]
    async with TieringOffloadingManager(config(6000), layout) as manager:
        assert (await manager.store(keys, data)).stored == 5000
        assert (await manager.match(keys)).blocks == 5000
        out = blank(5000, 16)
        assert await manager.load(keys, out) == 5000
        assert np.array_equal(out, data)


async def test_several_groups_are_cut_to_the_tokens_all_have() -> None:
    layout = KVLayout([Group("full", 4, 4096), Group("full", 8, 1000)], model="hybrid")
    tokens = list(range(32))
    keys = {0: block_keys(tokens, layout, group=0), 1: block_keys(tokens, layout, group=1)}
    data = {0: rows(keys[0]), 1: rows(keys[1], 1000)}
    async with TieringOffloadingManager(config(40), layout) as manager:
        report = await manager.store(keys, data)
        assert report.stored == 8 + 4
        assert (await manager.match(keys)).tokens == 32
        out = {0: blank(8), 1: blank(4, 1000)}
        assert await manager.load(keys, out) == {0: 8, 1: 4}
        assert np.array_equal(out[1], data[1])
        short = {0: keys[0][:5], 1: keys[1]}
        assert await manager.load(short, {0: blank(5), 1: blank(4, 1000)}) == {0: 4, 1: 2}
        with pytest.raises(ShapeError, match="mapping"):
            await manager.match(keys[0])


async def test_calls_before_open_and_after_close_say_so() -> None:
    manager = TieringOffloadingManager(config(4), LAYOUT)
    with pytest.raises(ClosedError, match="not open"):
        await manager.match([])
    await manager.open()
    await manager.aclose()
    await manager.aclose()
    with pytest.raises(ClosedError, match="closed"):
        await manager.match([])
    with pytest.raises(ClosedError, match="once"):
        await manager.open()


async def test_a_capacity_below_one_block_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"primary.capacity"):
        async with TieringOffloadingManager(
            config(4), KVLayout.uniform(model="m", tokens_per_block=1, block_bytes=1 << 20)
        ):
            pass


async def test_permanent_hole_is_restored_while_the_caller_holds_the_blocks() -> None:
    """row 4: `lru` evicts the head of a held chain; it is copied again, at the cost of a block that is worth less."""
    held, other = keys_of(3), keys_of(4, salt=b"other")
    primary = {"policy": "lru"}
    async with TieringOffloadingManager(config(6, primary=primary), LAYOUT) as manager:
        await manager.store(held, rows(held))
        async with manager.holding(held, rows(held)):
            await manager.store(other, rows(other))
            await _until(manager, held, 3)
            out = blank(3)
            assert await manager.load(held, out) == 3
            assert np.array_equal(out, rows(held))
            assert manager.stats()["restored_blocks"] == 1
        assert (await manager.match(other)).blocks == 3

    async with TieringOffloadingManager(config(6, primary=primary, restore={"enabled": False}), LAYOUT) as manager:
        await manager.store(held, rows(held))
        async with manager.holding(held, rows(held)):
            await manager.store(other, rows(other))
            assert (await manager.match(held)).blocks == 0


async def test_holding_fills_what_was_never_stored() -> None:
    held = keys_of(3)
    async with TieringOffloadingManager(config(4), LAYOUT) as manager, manager.holding(held, rows(held)):
        await _until(manager, held, 3)


async def _until(manager: TieringOffloadingManager, keys: list[bytes], blocks: int) -> None:
    async def there() -> bool:
        return (await manager.match(keys)).blocks >= blocks

    await eventually(there)
