"""What an engine's tensors must be to be copied by the page, and where the pages go."""

from __future__ import annotations

import pytest
import torch

from tiering.errors import ClosedError, ShapeError
from tiering.memory.arena import Arena, PoolShape
from tiering.memory.transfer.blocks import DeviceBlocks, Placement, as_pages
from tiering.memory.transfer.plan import Pages, Strip, strips_of


def test_pages_alias_the_tensor() -> None:
    cache = torch.arange(3 * 2 * 4, dtype=torch.float32).reshape(3, 2, 4)
    pages = as_pages(cache)
    assert (pages.dtype, tuple(pages.shape)) == (torch.uint8, (3, 32))
    assert bytes(pages[2].tolist()) == cache[2].numpy().tobytes()
    pages[1] = 0
    assert not cache[1].any()
    assert cache[0].any()


def test_pages_may_lie_apart_and_their_inside_in_any_order() -> None:
    storage = torch.arange(2 * 3 * 4 * 5, dtype=torch.int16).reshape(2, 3, 4, 5)
    layer = storage[:, 1]
    assert as_pages(layer).stride() == (3 * 4 * 5 * 2, 1)
    assert bytes(as_pages(layer)[1].tolist()) == layer[1].contiguous().numpy().tobytes()
    turned = layer.permute(0, 2, 1)
    assert torch.equal(as_pages(turned), as_pages(layer))
    only = storage[:1, 1]
    assert tuple(as_pages(only).shape) == (1, 40)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(2, 7, 4)[:, :, :3], "not one contiguous page"),
        (torch.zeros(2, 7, 4)[:, ::2], "not one contiguous page"),
        (torch.zeros(2, 1, 4).expand(2, 3, 4), "not one contiguous page"),
        (torch.zeros(1, 4).expand(5, 4), "one upon the other"),
        (torch.zeros(7, 4).t(), "not one contiguous page"),
        (torch.zeros(()), "no blocks"),
        (torch.zeros(0, 4), "no blocks"),
        (torch.zeros(3, 4).to_sparse(), "not plain strided data"),
        (torch.zeros(3, 4, dtype=torch.complex64).conj(), "not plain strided data"),
    ],
)
def test_other_tensors_are_refused_with_the_reason(tensor: torch.Tensor, reason: str) -> None:
    with pytest.raises(ShapeError, match=reason):
        as_pages(tensor)


def test_blocks_are_checked() -> None:
    good = torch.zeros(4, 8, dtype=torch.uint8)
    blocks = DeviceBlocks(((good, torch.zeros(4, 16, dtype=torch.uint8)), (torch.zeros(9, 3, dtype=torch.uint8),)))
    assert [blocks.block_bytes(group) for group in (0, 1)] == [24, 3]
    assert [blocks.num_blocks(group) for group in (0, 1)] == [4, 9]
    with pytest.raises(ShapeError, match="at least one group"):
        DeviceBlocks(())
    with pytest.raises(ShapeError, match="tensor in each"):
        DeviceBlocks(((good,), ()))
    with pytest.raises(ShapeError, match=r"tensor 1 of group 0 has 3 blocks; the first tensor of its group has 4"):
        DeviceBlocks(((good, torch.zeros(3, 8, dtype=torch.uint8)),))
    with pytest.raises(ShapeError, match=r"float32.*as_pages"):
        DeviceBlocks(((torch.zeros(4, 8),),))
    with pytest.raises(ShapeError, match="is on meta; the others are on cpu"):
        DeviceBlocks(((good, torch.zeros(4, 8, dtype=torch.uint8, device="meta")),))
    with pytest.raises(ShapeError, match="contiguous page"):
        DeviceBlocks(((torch.zeros(4, 16, dtype=torch.uint8)[:, ::2],),))


def test_a_placement_that_does_not_fit_is_refused() -> None:
    arena = Arena([PoolShape(2, 4096)])
    blocks = DeviceBlocks(((torch.zeros(4, 1024, dtype=torch.uint8),),))
    (shape,) = Placement((2,), ranks=2).shapes(arena, blocks, 1, join_slots=True)
    assert (shape.slots, shape.slot_bytes, shape.block_bytes, shape.shard_offset) == (2, 4096, 1024, 2048)
    with pytest.raises(ShapeError, match=r"3 ranks x 2 GPU blocks of 1024 bytes .* must be 6144"):
        Placement((2,), ranks=3).shapes(arena, blocks, 0, join_slots=True)
    with pytest.raises(ShapeError, match="rank 2: there are 2 ranks"):
        Placement((2,), ranks=2).shapes(arena, blocks, 2, join_slots=True)
    with pytest.raises(ShapeError, match="1 groups of blocks; Placement knows 2"):
        Placement((2, 2)).shapes(arena, blocks, 0, join_slots=True)
    with pytest.raises(ShapeError, match="no pool 1"):
        Placement((1, 1)).shapes(arena, DeviceBlocks(blocks.groups * 2), 0, join_slots=True)
    for wrong in ((), (0,), (2, -1)):
        with pytest.raises(ShapeError, match="blocks_per_slot"):
            Placement(wrong)
    with pytest.raises(ShapeError, match="ranks is 0"):
        Placement((1,), ranks=0)
    arena.close()
    with pytest.raises(ClosedError):
        Placement((1,)).shapes(arena, blocks, 0, join_slots=True)


def test_pages_become_few_strips() -> None:
    # All layers in one storage, a layer after the other: one strip of four rows.
    layers = [Pages(0, layer * 1000, 100, 100) for layer in range(4)]
    assert strips_of(layers) == (Strip(0, 0, 100, 4, 1000, 100, 0),)
    # All layers of a block next to each other: one row of all bytes.
    assert strips_of([Pages(0, layer * 100, 400, 100) for layer in range(4)]) == (Strip(0, 0, 400, 1, 0, 400, 0),)
    # Other sizes, storages or distances start anew.
    mixed = [Pages(0, 0, 100, 100), Pages(1, 0, 100, 100), Pages(1, 1000, 100, 100), Pages(1, 5000, 100, 60)]
    assert strips_of(mixed) == (
        Strip(0, 0, 100, 1, 0, 100, 0),
        Strip(1, 0, 100, 2, 1000, 100, 100),
        Strip(1, 5000, 100, 1, 0, 60, 300),
    )
