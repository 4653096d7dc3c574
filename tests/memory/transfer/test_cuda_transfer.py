"""The same engines on a CUDA device; skipped without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.memory.transfer.rig import WAIT_S, Part, load, model, pages_of, random_bytes, slots_of, store
from tiering.memory.arena import Arena, PoolShape
from tiering.memory.pinning import ArenaPinning
from tiering.memory.transfer.blocks import DeviceBlocks, Placement
from tiering.memory.transfer.cuda import CudaDevice, CudaTransferEngine
from tiering.memory.transfer.driver import SOURCE_IN_STREAM_ORDER, CudaRegistrar, find_batch_copy
from tiering.memory.transfer.engine import QueuedEngine
from tiering.memory.transfer.factory import open_engines
from tiering.memory.transfer.spec import LOAD, STORE

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLACEMENT = Placement((1, 4))
PARTS = (Part((3, 4, 5, 9), (0, 1, 2, 7)), Part((7, 8, 9, 10, 2, 0, 19), (5, 0), first=1))
BUSY_CYCLES = 50_000_000


@pytest.fixture(params=["pinned", "pageable"])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    made = Arena([PoolShape(8, 1 << 20), PoolShape(6, 8192)])
    pinning = None
    if request.param == "pinned":
        pinning = ArenaPinning(made, CudaRegistrar(torch.device("cuda:0")), piece_bytes=2 << 20)
        assert pinning.wait(WAIT_S).state == "pinned"
    yield made
    if pinning is not None:
        pinning.close()
    made.close()
    assert not made.quarantined


def _blocks() -> DeviceBlocks:
    layers = random_bytes(torch.empty(2, 16, 512 << 10, dtype=torch.uint8), 1).cuda()
    uneven = [random_bytes(torch.empty(20, size, dtype=torch.uint8), size).cuda() for size in (700, 96, 33)]
    return DeviceBlocks(((layers[0], layers[1]), tuple(uneven)))


def test_stores_and_loads_copy_what_the_model_copies(arena: Arena) -> None:
    blocks = _blocks()
    engines = open_engines(arena, blocks, PLACEMENT)
    assert all(isinstance(engine, CudaTransferEngine) for engine in engines.values())
    slots, pages = slots_of(arena, 2), pages_of(blocks)
    moved = model(PARTS, pages, slots, PLACEMENT, 0, store=True)
    engines[STORE].submit(1, store(*PARTS))
    engines[STORE].submit(2, store(Part(), Part()))
    engines[STORE].wait([2])
    results = engines[STORE].poll()
    assert [(r.job_id, r.success, r.error, r.bytes) for r in results] == [(1, True, "", moved), (2, True, "", 0)]
    assert results[0].seconds > 0
    assert slots_of(arena, 2) == slots
    back = (Part((0, 1), (1, 7)), Part((1, 2, 3, 4), (5, 0), first=3))
    model(back, pages, slots, PLACEMENT, 0, store=False)
    engines[LOAD].submit(1, load(*back))
    engines[LOAD].wait([1])
    assert [(r.success, r.error) for r in engines[LOAD].poll()] == [(True, "")]
    assert pages_of(blocks) == pages
    for engine in engines.values():
        engine.close()


def test_a_store_follows_the_kernel_that_writes_the_block(arena: Arena) -> None:
    """row 26: the copy is queued while the kernel before it has not even begun."""
    blocks = _blocks()
    engine = open_engines(arena, blocks, PLACEMENT)[STORE]
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    for layer in blocks.groups[0]:
        layer[3].fill_(0x5A)
    engine.submit(1, store(Part((3,), (4,)), Part()))
    engine.wait([1])
    assert [result.success for result in engine.poll()] == [True]
    assert (arena.array(0)[4] == 0x5A).all()
    engine.close()


def test_jobs_of_one_direction_keep_their_order(arena: Arena) -> None:
    blocks = _blocks()
    engine = open_engines(arena, blocks, PLACEMENT)[STORE]
    for block in range(16):
        engine.submit(block, store(Part((block,), (2,)), Part()))
    engine.wait([15])
    assert [(result.job_id, result.success) for result in engine.poll()] == [(n, True) for n in range(16)]
    assert arena.array(0)[2].tobytes() == b"".join(bytes(layer[15].tolist()) for layer in blocks.groups[0])
    engine.close()


def test_a_malformed_spec_copies_nothing(arena: Arena) -> None:
    engine = open_engines(arena, _blocks(), PLACEMENT)[STORE]
    engine.submit(1, store(Part((99,), (2,)), Part()))
    (result,) = engine.poll()
    assert not result.success
    assert not arena.array(0).any()
    engine.close()


def test_a_recent_driver_has_the_batched_copy() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    status, version = driver.cuDriverGetVersion()
    assert int(status) == 0
    if torch.version.hip is not None or version < 12080:
        pytest.skip("before CUDA 12.8")
    assert find_batch_copy(torch.device("cuda:0"), SOURCE_IN_STREAM_ORDER) is not None


def test_each_range_by_itself_where_there_is_no_batch(arena: Arena) -> None:
    """As with ROCm, or before CUDA 12.8."""
    blocks = _blocks()
    shapes = PLACEMENT.shapes(arena, blocks, 0, join_slots=False)
    device = CudaDevice(STORE, blocks)
    device.batch = None
    engine = QueuedEngine(STORE, arena, shapes, device)
    slots = slots_of(arena, 2)
    model(PARTS, pages_of(blocks), slots, PLACEMENT, 0, store=True)
    engine.submit(1, store(*PARTS))
    engine.close()
    assert [(result.success, result.error) for result in engine.poll()] == [(True, "")]
    assert slots_of(arena, 2) == slots
