"""Engines of both directions on CPU tensors: what lands where, in which order, and how a job may end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.memory.transfer.rig import Part, load, model, pages_of, random_bytes, slots_of, store
from tiering.errors import ClosedError, ShapeError, TieringError
from tiering.memory.arena import Arena, PoolShape
from tiering.memory.transfer.blocks import DeviceBlocks, Placement
from tiering.memory.transfer.cpu import CpuTransferEngine
from tiering.memory.transfer.factory import open_engines
from tiering.memory.transfer.spec import (
    LOAD,
    STORE,
    BlockSpan,
    Medium,
    TransferEngine,
    TransferResult,
    TransferSpec,
    TransferType,
)

PLACEMENT = Placement((1, 4, 3))


class World:
    """Three groups: two layers in one storage; three uneven tensors, four to a slot; one recurrent state, three."""

    def __init__(self) -> None:
        self.arena = Arena([PoolShape(12, 4096), PoolShape(6, 8192), PoolShape(5, 4096)])
        layers = random_bytes(torch.empty(2, 16, 512, dtype=torch.uint8), 1)
        uneven = [random_bytes(torch.empty(20, size, dtype=torch.uint8), size) for size in (700, 96, 33)]
        state = random_bytes(torch.empty(9, 1200, dtype=torch.uint8), 5)[:, :1000]
        self.blocks = DeviceBlocks(((layers[0], layers[1]), tuple(uneven), (state,)))
        self.engines = open_engines(self.arena, self.blocks, PLACEMENT)

    def run(self, type_: TransferType, *specs: TransferSpec) -> list[TransferResult]:
        engine = self.engines[type_]
        for job_id, one in enumerate(specs):
            engine.submit(job_id, one)
        engine.wait(range(len(specs)))
        return engine.poll()

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self.arena.close()
        assert not self.arena.quarantined


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


FULL = (
    Part((3, 4, 5, 9), (0, 1, 2, 11)),
    Part((7, 8, 9, 10, 2, 0, 19, 18), (5, 0)),
    Part((8, 1, 0), (4,)),
)
PARTIAL = (
    Part((0, 1), (3, 7)),
    Part((11, 12, 13, 1, 15, 16, 17), (2, 1, 4), first=3),  # the last of one slot, all of the next, two of a third
    Part((5,), (0,), first=1),
)


@pytest.mark.parametrize("parts", [FULL, PARTIAL], ids=["whole slots", "parts of slots"])
def test_a_store_fills_the_slots_and_nothing_else(world: World, parts: tuple[Part, ...]) -> None:
    for pool in range(3):
        world.arena.array(pool)[:] = 0xEE
    slots, pages = slots_of(world.arena, 3), pages_of(world.blocks)
    moved = model(parts, pages, slots, PLACEMENT, 0, store=True)
    (result,) = world.run(STORE, store(*parts))
    assert slots_of(world.arena, 3) == slots
    assert pages_of(world.blocks) == pages
    assert (result.job_id, result.success, result.error, result.type) == (0, True, "", STORE)
    assert result.bytes == moved
    assert result.seconds > 0


@pytest.mark.parametrize("parts", [FULL, PARTIAL], ids=["whole slots", "parts of slots"])
def test_a_load_fills_the_blocks_and_nothing_else(world: World, parts: tuple[Part, ...]) -> None:
    for pool in range(3):
        random_bytes(world.arena.tensor(pool), 40 + pool)
    slots, pages = slots_of(world.arena, 3), pages_of(world.blocks)
    moved = model(parts, pages, slots, PLACEMENT, 0, store=False)
    (result,) = world.run(LOAD, load(*parts))
    assert pages_of(world.blocks) == pages
    assert slots_of(world.arena, 3) == slots
    assert (result.success, result.bytes, result.type) == (True, moved, LOAD)


def test_the_gap_between_pages_is_not_touched(world: World) -> None:
    state = world.blocks.groups[2][0]
    whole = torch.as_strided(state, (9, 1200 - 1), (1200, 1))
    gaps = whole[:8, 1000:].clone()
    world.arena.array(2)[:] = 0
    world.run(LOAD, load(Part(), Part(), Part(tuple(range(9)), (0, 1, 2))))
    assert not state.any()
    assert torch.equal(whole[:8, 1000:], gaps)


def test_jobs_of_one_direction_land_and_are_told_in_order(world: World) -> None:
    """The same slot, again and again: the last store wins, whatever the sizes."""
    specs = [
        store(Part((block,), (3,)), Part(tuple(range(4 * (block % 3))), tuple(range(block % 3))), Part())
        for block in range(16)
    ]
    results = world.run(STORE, *specs)
    assert [result.job_id for result in results] == list(range(16))
    assert all(result.success for result in results)
    last = b"".join(bytes(tensor[15].tolist()) for tensor in world.blocks.groups[0])
    assert world.arena.array(0)[3, : len(last)].tobytes() == last


def test_empty_jobs_complete_in_their_turn(world: World) -> None:
    empty, full = store(Part(), Part(), Part()), store(Part((1,), (1,)), Part(), Part())
    results = world.run(STORE, empty, full, empty, empty, full, empty)
    assert [(r.job_id, r.success, r.bytes) for r in results] == [
        (0, True, 0), (1, True, 1024), (2, True, 0), (3, True, 0), (4, True, 1024), (5, True, 0)
    ]  # fmt: skip
    assert world.engines[STORE].poll() == []


def test_two_ranks_fill_one_slot() -> None:
    """row 33: each rank's part of a slot is its own; a whole block is both."""
    arena = Arena([PoolShape(3, 4096)], shared=True)
    mapped = Arena.attach(arena.fd, [PoolShape(3, 4096)])
    placement = Placement((2,), ranks=2)
    tensors = [random_bytes(torch.empty(4, 1000, dtype=torch.uint8), rank) for rank in range(2)]
    for rank, (own, tensor) in enumerate(zip((arena, mapped), tensors, strict=True)):
        engine = CpuTransferEngine(STORE, own, DeviceBlocks(((tensor,),)), placement, rank)
        engine.submit(1, store(Part((3, 1), (2,))))
        engine.close()
        assert [(result.success, result.bytes) for result in engine.poll()] == [(True, 2000)]
    want = [bytes(tensors[rank][block].tolist()) for rank in range(2) for block in (3, 1)]
    assert arena.array(0)[2].tobytes() == b"".join(want) + bytes(96)
    assert not arena.array(0)[:2].any()
    mapped.close()
    arena.close()


def _gpu(ids: tuple[Any, ...], sizes: tuple[int, ...], indices: tuple[Any, ...] = (0, 0, 0)) -> BlockSpan:
    return BlockSpan(Medium.GPU, ids, sizes, indices)


def _cpu(ids: tuple[Any, ...], sizes: tuple[int, ...], indices: tuple[Any, ...] = (0, 0, 0)) -> BlockSpan:
    return BlockSpan(Medium.CPU, ids, sizes, indices)


MALFORMED = {
    "block past the end": (TransferSpec(_gpu((16,), (1, 0, 0)), _cpu((0,), (1, 0, 0))), "GPU blocks of group 0: 16"),
    "negative block": (TransferSpec(_gpu((-1,), (1, 0, 0)), _cpu((0,), (1, 0, 0))), "-1 to -1"),
    "slot past the end": (TransferSpec(_gpu((0,), (0, 0, 1)), _cpu((5,), (0, 0, 1))), "slots of group 2: 5"),
    "negative slot": (TransferSpec(_gpu((0,), (1, 0, 0)), _cpu((-2,), (1, 0, 0))), "-2 to -2"),
    "huge number": (TransferSpec(_gpu((1 << 80,), (1, 0, 0)), _cpu((0,), (1, 0, 0))), "64 bits"),
    "no number": (TransferSpec(_gpu(("a",), (1, 0, 0)), _cpu((0,), (1, 0, 0))), "not whole numbers"),
    "a fraction": (TransferSpec(_gpu((0.5,), (1, 0, 0)), _cpu((0,), (1, 0, 0))), "not whole numbers"),
    "too few slots": (TransferSpec(_gpu((0, 1), (2, 0, 0)), _cpu((0,), (1, 0, 0))), "fill 2 slots of 1; the spec names 1"),
    "too many slots": (TransferSpec(_gpu((0,), (0, 1, 0)), _cpu((0, 1), (0, 2, 0))), "fill 1 slots of 4; the spec names 2"),
    "slots without blocks": (TransferSpec(_gpu((), (0, 0, 0)), _cpu((0,), (1, 0, 0))), "fill 0 slots"),
    "index past the slot": (TransferSpec(_gpu((0,), (0, 1, 0), (0, 4, 0)), _cpu((0,), (0, 1, 0))), "it is from 0 to 3"),
    "negative index": (TransferSpec(_gpu((0,), (0, 1, 0), (0, -1, 0)), _cpu((0,), (0, 1, 0))), "block_indices is -1"),
    "index no number": (TransferSpec(_gpu((0,), (0, 1, 0), (0, None, 0)), _cpu((0,), (0, 1, 0))), "block_indices is None"),
    "index of a slot": (TransferSpec(_gpu((0,), (1, 0, 0)), _cpu((0,), (1, 0, 0), (1, 0, 0))), "it must be 0"),
    "slot twice": (TransferSpec(_gpu((0, 1), (2, 0, 0)), _cpu((4, 4), (2, 0, 0))), "a slot is named twice"),
    "groups missing": (TransferSpec(_gpu((0,), (1,), (0,)), _cpu((0,), (1,), (0,))), "1 groups; there are 3"),
    "groups differ": (TransferSpec(_gpu((0,), (1, 0, 0)), _cpu((0,), (1, 0), (0, 0))), "cpu span has 2 groups"),
    "wrong way": (load(Part((0,), (0,)), Part(), Part()), "the spec is cpu -> gpu; this engine copies gpu -> cpu"),
    "same medium": (TransferSpec(_gpu((0,), (1, 0, 0)), _gpu((0,), (1, 0, 0))), "the spec is gpu -> gpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_spec_is_a_failed_result_and_copies_nothing(world: World, name: str) -> None:
    wrong, why = MALFORMED[name]
    good = store(Part((1,), (1,)), Part(), Part())
    slots = slots_of(world.arena, 3)
    model([Part((1,), (1,))], pages_of(world.blocks)[:1], slots[:1], PLACEMENT, 0, store=True)
    results = world.run(STORE, good, wrong, good)
    assert [(result.job_id, result.success, result.bytes) for result in results] == [
        (0, True, 1024), (1, False, 0), (2, True, 1024)
    ]  # fmt: skip
    assert why in results[1].error
    assert slots_of(world.arena, 3) == slots


def test_a_block_loaded_twice_is_malformed(world: World) -> None:
    (result,) = world.run(LOAD, load(Part((3, 3), (0, 1)), Part(), Part()))
    assert not result.success
    assert "a GPU block is named twice" in result.error
    # Storing one block to two slots is no mistake.
    assert world.run(STORE, store(Part((3, 3), (0, 1)), Part(), Part()))[0].success


def test_spans_that_contradict_themselves_cannot_be_made() -> None:
    with pytest.raises(ShapeError, match="add up to 2"):
        BlockSpan(Medium.GPU, (1,), (2,), (0,))
    with pytest.raises(ShapeError, match="block_indices 2"):
        BlockSpan(Medium.GPU, (1,), (1,), (0, 0))


def test_wait_waits_for_these_and_poll_tells_them(world: World) -> None:
    engine = world.engines[STORE]
    for job_id in range(10):
        engine.submit(job_id, store(Part((job_id,), (job_id,)), Part(), Part()))
    engine.wait({3, 1})
    told = engine.poll()
    assert [result.job_id for result in told[:4]] == [0, 1, 2, 3]
    with pytest.raises(KeyError, match="3"):
        engine.wait([3])
    with pytest.raises(KeyError, match="99"):
        engine.wait([9, 99])
    engine.wait([])
    engine.wait([job_id for job_id in range(10) if job_id not in {result.job_id for result in told}])
    assert [result.job_id for result in told + engine.poll()] == list(range(10))


def test_an_id_is_used_once_until_it_is_told(world: World) -> None:
    engine, job = world.engines[STORE], store(Part((1,), (1,)), Part(), Part())
    engine.submit(7, job)
    with pytest.raises(TieringError, match=r"job 7 .* under way"):
        engine.submit(7, job)
    engine.wait([7])
    assert [result.job_id for result in engine.poll()] == [7]
    engine.submit(7, job)
    engine.wait([7])
    assert [result.success for result in engine.poll()] == [True]


def test_blocks_may_be_given_away_after_the_wait(world: World) -> None:
    """row 26: the stored bytes are the old ones, of all jobs queued before the one that was waited for."""
    engine, layers = world.engines[STORE], world.blocks.groups[0]
    old = [b"".join(bytes(layer[block].tolist()) for layer in layers) for block in range(12)]
    for block in range(12):
        engine.submit(block, store(Part((block,), (block,)), Part(), Part()))
    engine.wait([11])
    for layer in layers:
        layer.fill_(0xAA)
    assert [world.arena.array(0)[slot, :1024].tobytes() for slot in range(12)] == old


def test_a_closed_arena_fails_later_jobs_and_spares_those_in_flight(world: World) -> None:
    engine, job = world.engines[STORE], store(Part(tuple(range(12)), tuple(range(12))), Part(), Part())
    rows = world.arena.array(0)
    engine.submit(1, job)
    world.arena.close()
    engine.submit(2, job)
    engine.wait([1, 2])
    results = engine.poll()
    assert [(result.job_id, result.success) for result in results] == [(1, True), (2, False)]
    assert "arena is closed" in results[1].error
    assert rows[4, :512].tobytes() == bytes(world.blocks.groups[0][0][4].tolist())


def test_results_are_plain_values(world: World) -> None:
    (result,) = world.run(STORE, store(Part((1,), (1,)), Part(), Part()))
    assert dataclasses.asdict(result) == {
        "job_id": 0, "success": True, "bytes": 1024, "seconds": result.seconds, "type": STORE, "error": ""
    }  # fmt: skip
    assert world.engines[STORE].type == STORE


def test_close_waits_for_jobs_in_flight_and_poll_still_tells_them(world: World) -> None:
    engine: TransferEngine = world.engines[STORE]
    wrong = store(Part((99,), (0,)), Part(), Part())
    for job_id in range(30):
        engine.submit(job_id, wrong if job_id == 20 else store(Part((job_id % 16,), (job_id % 12,)), Part(), Part()))
    engine.close()
    engine.close()
    with pytest.raises(ClosedError):
        engine.submit(31, wrong)
    engine.wait(range(30))
    assert [(result.job_id, result.success) for result in engine.poll()] == [(n, n != 20) for n in range(30)]
    assert engine.poll() == []
    with pytest.raises(KeyError):
        engine.wait([3])


def test_engines_are_refused_for_what_they_cannot_copy(world: World) -> None:
    elsewhere = DeviceBlocks(((torch.zeros(4, 8, dtype=torch.uint8, device="meta"),),))
    with pytest.raises(ShapeError, match="no transfer engine for blocks on meta"):
        open_engines(world.arena, elsewhere, Placement((1,)))
    with pytest.raises(ShapeError, match="these blocks are on meta"):
        CpuTransferEngine(STORE, world.arena, elsewhere, Placement((1,)))
