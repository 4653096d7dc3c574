"""The engine's paged KV memory as the copies see it, and where its bytes lie in a slot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tiering.errors import ShapeError
from tiering.memory.arena import Arena
from tiering.memory.transfer.plan import GroupShape, Pages, strips_of


def as_pages(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` (``[num_blocks, ...]``, any dtype) as ``uint8 (num_blocks, page_bytes)``: an alias, no copy.

    Whatever the order of the inner dimensions in memory, block b must be one contiguous page; pages may lie any distance
    apart. Raises ``ShapeError`` with the reason if not: a cache that keeps keys and values as ``[2, num_blocks, ...]`` is
    two tensors, ``cache[0]`` and ``cache[1]``.
    """
    shape, strides = tuple(tensor.shape), tensor.stride() if tensor.layout is torch.strided else ()
    where = f"a {tensor.dtype} tensor {shape} with strides {strides}"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise ShapeError(f"{where} on {tensor.device} is not plain strided data")
    if not shape or not tensor.numel():
        raise ShapeError(f"{where} has no blocks; expected [num_blocks, ...]")
    dense = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides[1:], shape[1:], strict=True) if size > 1):
        if stride != dense:
            raise ShapeError(f"{where}: a block is not one contiguous page (a gap or an overlap at stride {stride})")
        dense *= size
    page_bytes = dense * tensor.element_size()
    stride_bytes = strides[0] * tensor.element_size() if shape[0] > 1 else page_bytes
    if stride_bytes < page_bytes:
        raise ShapeError(f"{where}: blocks of {page_bytes} bytes lie {stride_bytes} bytes apart, one upon the other")
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    offset_bytes = tensor.storage_offset() * tensor.element_size()
    return flat.set_(tensor.detach().untyped_storage(), offset_bytes, (shape[0], page_bytes), (stride_bytes, 1))


@dataclass(frozen=True, slots=True)
class DeviceBlocks:
    """The engine's blocks: for each group its page tensors, ``uint8 (num_blocks, page_bytes)``, all on one device.

    Block b of a group is the b-th row of each of its tensors (a layer each, or keys and values apart), in this order.
    The memory stays the engine's, is kept alive while this object is, and must not be resized. Raises ``ShapeError``.
    """

    groups: tuple[tuple[torch.Tensor, ...], ...]

    def __post_init__(self) -> None:
        if not self.groups or not all(self.groups):
            raise ShapeError("DeviceBlocks needs at least one group, and a tensor in each")
        for group, tensors in enumerate(self.groups):
            for number, pages in enumerate(tensors):
                self._check(pages, f"tensor {number} of group {group}", tensors[0])

    def _check(self, pages: torch.Tensor, name: str, first: torch.Tensor) -> None:
        if pages.dtype is not torch.uint8 or pages.ndim != 2 or not pages.numel():
            raise ShapeError(
                f"{name} is {pages.dtype} {tuple(pages.shape)}; expected uint8 (num_blocks, page_bytes): as_pages makes it"
            )
        if len(pages) != len(first):
            raise ShapeError(f"{name} has {len(pages)} blocks; the first tensor of its group has {len(first)}")
        if pages.device != self.device:
            raise ShapeError(f"{name} is on {pages.device}; the others are on {self.device}")
        as_pages(pages)

    @classmethod
    def of(cls, groups: Iterable[Iterable[torch.Tensor]]) -> DeviceBlocks:
        """From the engine's own tensors, each ``[num_blocks, ...]`` of any dtype: see ``as_pages``."""
        return cls(tuple(tuple(as_pages(tensor) for tensor in tensors) for tensors in groups))

    @property
    def device(self) -> torch.device:
        return self.groups[0][0].device

    def num_blocks(self, group: int) -> int:
        return len(self.groups[group][0])

    def block_bytes(self, group: int) -> int:
        """One GPU block of the group on this rank: the sum of its pages."""
        return sum(pages.shape[1] for pages in self.groups[group])

    def storages(self) -> list[torch.UntypedStorage]:
        """The distinct storages behind the tensors, in the order in which ``pages`` counts them."""
        found: dict[int, torch.UntypedStorage] = {}
        for storage in (tensor.untyped_storage() for tensors in self.groups for tensor in tensors):
            known = found.setdefault(storage.data_ptr(), storage)
            # Memory that torch did not allocate may be wrapped more than once, in different lengths.
            found[storage.data_ptr()] = max(known, storage, key=torch.UntypedStorage.nbytes)
        return list(found.values())

    def pages(self, group: int) -> list[Pages]:
        """Where each tensor of the group lies."""
        order = {storage.data_ptr(): index for index, storage in enumerate(self.storages())}
        return [
            Pages(
                order[pages.untyped_storage().data_ptr()],
                int(pages.storage_offset()),
                pages.stride(0) if len(pages) > 1 else pages.shape[1],
                pages.shape[1],
            )
            for pages in self.groups[group]
        ]


@dataclass(frozen=True, slots=True)
class Placement:
    """How slots are filled: group g has pool g of the arena, and its slot holds ``blocks_per_slot[g]`` GPU blocks.

    A slot's payload is one shard a rank, in order of rank; all ranks' blocks have the same size. A shard is block-major:
    the pages of the first GPU block in the order of the group's tensors, then those of the second, and so on, so that a
    part of a slot is one contiguous range a GPU block.
    """

    blocks_per_slot: tuple[int, ...]
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ShapeError(f"Placement.ranks is {self.ranks}; it must be at least 1")
        if not self.blocks_per_slot or min(self.blocks_per_slot) < 1:
            raise ShapeError(f"Placement.blocks_per_slot is {self.blocks_per_slot}; give a count of at least 1 a group")

    def shapes(self, arena: Arena, blocks: DeviceBlocks, rank: int, *, join_slots: bool) -> tuple[GroupShape, ...]:
        """What the planner needs, checked: ``ShapeError`` if the parts do not fit, ``ClosedError`` without an arena."""
        if not 0 <= rank < self.ranks:
            raise ShapeError(f"rank {rank}: there are {self.ranks} ranks, counted from 0")
        if len(blocks.groups) != len(self.blocks_per_slot):
            raise ShapeError(f"{len(blocks.groups)} groups of blocks; Placement knows {len(self.blocks_per_slot)}")
        return tuple(
            self._shape(arena, blocks, group, rank, join_slots=join_slots) for group in range(len(blocks.groups))
        )

    def _shape(self, arena: Arena, blocks: DeviceBlocks, group: int, rank: int, *, join_slots: bool) -> GroupShape:
        slots, slot_bytes = arena.array(group).shape
        per_slot, block_bytes = self.blocks_per_slot[group], blocks.block_bytes(group)
        shard_bytes = per_slot * block_bytes
        if self.ranks * shard_bytes > slot_bytes:
            raise ShapeError(
                f"group {group}: {self.ranks} ranks x {per_slot} GPU blocks of {block_bytes} bytes do not fit a slot of "
                f"{slot_bytes} bytes; the layout's block_bytes must be {self.ranks * shard_bytes}"
            )
        return GroupShape(
            num_blocks=blocks.num_blocks(group),
            blocks_per_slot=per_slot,
            block_bytes=block_bytes,
            slots=slots,
            slot_bytes=slot_bytes,
            shard_offset=rank * shard_bytes,
            strips=strips_of(blocks.pages(group)),
            join_slots=join_slots,
        )
