"""Generated layouts and jobs against a model that copies a page at a time."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory.transfer.rig import Part, model, pages_of, random_bytes, slots_of, spec
from tiering.memory.arena import Arena, PoolShape
from tiering.memory.transfer.blocks import DeviceBlocks, Placement
from tiering.memory.transfer.factory import open_engines
from tiering.memory.transfer.plan import flat, plan
from tiering.memory.transfer.spec import LOAD, STORE


@st.composite
def tensors(draw: st.DrawFn, num_blocks: int) -> tuple[torch.Tensor, ...]:
    """One group's pages: of one storage or several, side by side or layer by layer, with gaps or without."""
    page = st.integers(1, 40)
    count = draw(st.integers(1, 4))
    how = draw(st.sampled_from(["apart", "layers", "side by side", "padded", "backwards"]))
    size = draw(page)
    if how == "layers":
        return tuple(torch.empty(count, num_blocks, size, dtype=torch.uint8))
    if how == "side by side":
        whole = torch.empty(num_blocks, count, size, dtype=torch.uint8)
        return tuple(whole[:, number] for number in range(count))
    if how == "padded":
        whole = torch.empty(num_blocks, count, size + draw(page), dtype=torch.uint8)
        return tuple(whole[:, number, :size] for number in range(count))
    if how == "backwards":
        return tuple(torch.empty(count, num_blocks, size, dtype=torch.uint8))[::-1]
    return tuple(torch.empty(num_blocks, draw(page), dtype=torch.uint8) for _ in range(count))


@st.composite
def numbers(draw: st.DrawFn, available: int, wanted: int) -> tuple[int, ...]:
    """``wanted`` distinct numbers below ``available``: a run, or in any order."""
    if draw(st.booleans()):
        start = draw(st.integers(0, available - wanted))
        return tuple(range(start, start + wanted))
    return tuple(draw(st.permutations(range(available)))[:wanted])


@st.composite
def part(draw: st.DrawFn, num_blocks: int, slots: int, per_slot: int) -> Part:
    first = draw(st.integers(0, per_slot - 1))
    count = draw(st.integers(0, min(num_blocks, slots * per_slot - first)))
    if not count:
        return Part(first=first)
    return Part(draw(numbers(num_blocks, count)), draw(numbers(slots, math.ceil((first + count) / per_slot))), first)


@settings(max_examples=80)
@given(st.data())
def test_any_job_copies_what_the_model_copies(data: st.DataObject) -> None:
    per_slot = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3), label="blocks_per_slot"))
    ranks = data.draw(st.integers(1, 3), label="ranks")
    rank = data.draw(st.integers(0, ranks - 1), label="rank")
    counts = [data.draw(st.integers(1, 9), label="num_blocks") for _ in per_slot]
    blocks = DeviceBlocks(tuple(data.draw(tensors(count)) for count in counts))
    pools = [PoolShape(data.draw(st.integers(1, 6), label="slots"), 4096) for _ in per_slot]
    placement = Placement(per_slot, ranks)
    arena = Arena(pools)
    for seed, tensor in enumerate(tensor for group in blocks.groups for tensor in group):
        random_bytes(tensor, seed)
    for pool in range(len(pools)):
        random_bytes(arena.tensor(pool), 100 + pool)
    engines = open_engines(arena, blocks, placement, rank)
    pages, slots = pages_of(blocks), slots_of(arena, len(pools))
    try:
        for job_id in range(data.draw(st.integers(1, 4), label="jobs")):
            store = data.draw(st.booleans(), label="store")
            parts = [
                data.draw(part(count, pool.slots, k)) for count, pool, k in zip(counts, pools, per_slot, strict=True)
            ]
            moved = model(parts, pages, slots, placement, rank, store=store)
            engine = engines[STORE if store else LOAD]
            engine.submit(job_id, spec(parts, store=store))
            engine.wait([job_id])
            (result,) = engine.poll()
            assert (result.success, result.error, result.bytes) == (True, "", moved)
        assert pages_of(blocks) == pages
        assert slots_of(arena, len(pools)) == slots
    finally:
        for engine in engines.values():
            engine.close()
        arena.close()


@settings(max_examples=80)
@given(st.data())
def test_contiguous_ranges_copy_what_the_model_copies(data: st.DataObject) -> None:
    """What a CUDA engine gives to the driver: the same bytes as flat ranges, none of which leaves its slot."""
    per_slot = data.draw(st.integers(1, 4), label="blocks_per_slot")
    count, slot_count = data.draw(st.integers(1, 9), label="num_blocks"), data.draw(st.integers(1, 6), label="slots")
    blocks, placement = DeviceBlocks((data.draw(tensors(count)),)), Placement((per_slot,))
    for seed, tensor in enumerate(blocks.groups[0]):
        random_bytes(tensor, seed)
    arena = Arena([PoolShape(slot_count, 4096)])
    shapes = placement.shapes(arena, blocks, 0, join_slots=False)
    one = data.draw(part(count, slot_count, per_slot))
    want = slots_of(arena, 1)
    moved = model([one], pages_of(blocks), want, placement, 0, store=True)
    planned = plan(spec([one], store=True), STORE, shapes)
    storages = [torch.empty(0, dtype=torch.uint8).set_(storage).numpy() for storage in blocks.storages()]
    pool = arena.array(0).reshape(-1)
    total = 0
    for runs in planned.runs:
        for at, to, size in zip(*flat(runs), strict=True):
            assert to // 4096 == (to + size - 1) // 4096
            pool[to : to + size] = storages[runs.strip.storage][at : at + size]
            total += int(size)
    assert total == planned.bytes == moved
    assert slots_of(arena, 1) == want
    del pool
    arena.close()
