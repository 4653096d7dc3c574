"""From a spec to byte ranges: pure arithmetic on numbers, no memory and no torch.

A block's pages are first brought into *strips*, once for an engine: pages that lie one behind the other become one row,
and rows of equal size at equal distances become one strip (all layers of an engine that keeps them in one storage). A job
is then a few three-dimensional copies, (blocks, rows, bytes) on both sides, however many pages it touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tiering.errors import ShapeError
from tiering.memory.transfer.spec import BlockSpan, Medium, TransferSpec, TransferType

Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pages:
    """Where the pages of one tensor lie: page b is ``bytes`` bytes at ``offset + b * stride`` of storage ``storage``."""

    storage: int
    offset: int
    stride: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Strip:
    """Rows of one block that one strided copy reaches.

    Row i of block b is ``row_bytes`` bytes at ``offset + b * block_stride + i * row_stride`` of storage ``storage``. In a
    slot the rows follow each other without a gap, from ``slot_offset`` of the block's bytes on.
    """

    storage: int
    offset: int
    block_stride: int
    rows: int
    row_stride: int
    row_bytes: int
    slot_offset: int


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One group on both media. All sizes in bytes but the counts."""

    num_blocks: int
    blocks_per_slot: int
    block_bytes: int
    """One GPU block on this rank: the sum of its pages."""
    slots: int
    slot_bytes: int
    shard_offset: int
    """Where this rank's part of a slot begins."""
    strips: tuple[Strip, ...]
    join_slots: bool
    """Whether one copy may reach from a slot into the next."""

    @property
    def pitch(self) -> int:
        """The distance in the pool of two GPU blocks that one strided copy may reach."""
        return self.slot_bytes if self.blocks_per_slot == 1 else self.block_bytes


@dataclass(frozen=True, slots=True)
class Runs:
    """Copies of one strip: run i moves ``blocks[i]`` GPU blocks, next to each other on both sides."""

    group: int
    strip: Strip
    pitch: int
    device_offsets: Numbers
    """Where the first block's first row lies in the strip's storage."""
    slot_offsets: Numbers
    """Where it lies in the group's pool."""
    blocks: Numbers


@dataclass(frozen=True, slots=True)
class CopyPlan:
    runs: tuple[Runs, ...]
    bytes: int
    """Payload bytes of the whole job."""


def strips_of(pages: Sequence[Pages]) -> tuple[Strip, ...]:
    """Cover a block's pages, in the order in which a slot holds them, with as few strips as can be had greedily."""
    strips: list[Strip] = []
    slot_offset = 0
    for row in _joined(pages):
        last = strips[-1] if strips else None
        if last is not None and (last.storage, last.block_stride, last.row_bytes) == (
            row.storage,
            row.stride,
            row.bytes,
        ):
            distance = row.offset - (last.offset + (last.rows - 1) * last.row_stride)
            if last.rows == 1 or distance == last.row_stride:
                strips[-1] = Strip(
                    last.storage, last.offset, last.block_stride, last.rows + 1, distance, row.bytes, last.slot_offset
                )
                slot_offset += row.bytes
                continue
        strips.append(Strip(row.storage, row.offset, row.stride, 1, 0, row.bytes, slot_offset))
        slot_offset += row.bytes
    return tuple(strips)


def _joined(pages: Sequence[Pages]) -> list[Pages]:
    """Pages that lie directly behind each other on the device, in every block, as one."""
    rows: list[Pages] = []
    for page in pages:
        last = rows[-1] if rows else None
        if (
            last is not None
            and (last.storage, last.stride) == (page.storage, page.stride)
            and page.offset == last.offset + last.bytes
        ):
            rows[-1] = Pages(last.storage, last.offset, last.stride, last.bytes + page.bytes)
        else:
            rows.append(page)
    return rows


def plan(spec: TransferSpec, direction: TransferType, groups: Sequence[GroupShape]) -> CopyPlan:
    """What to copy for ``spec``. Raises ``ShapeError`` that names what is wrong with it; then nothing may be copied."""
    if spec.type != direction:
        raise ShapeError(f"the spec is {_name(spec.type)}; this engine copies {_name(direction)}")
    gpu, cpu = (spec.source, spec.destination) if direction[0] is Medium.GPU else (spec.destination, spec.source)
    for span in (gpu, cpu):
        if len(span.group_sizes) != len(groups):
            raise ShapeError(
                f"the {span.medium.value} span has {len(span.group_sizes)} groups; there are {len(groups)} of them here"
            )
    runs: list[Runs] = []
    total_bytes = 0
    for group, shape in enumerate(groups):
        blocks, offsets = _places(group, shape, gpu, cpu, store=gpu is spec.source)
        if len(blocks):
            runs.extend(_runs(group, shape, blocks, offsets))
            total_bytes += len(blocks) * shape.block_bytes
    return CopyPlan(tuple(runs), total_bytes)


def flat(runs: Runs) -> tuple[Numbers, Numbers, Numbers]:
    """The same copies, each of one contiguous range: offsets in the storage, offsets in the pool, and their bytes."""
    strip = runs.strip
    if strip.rows == 1 and strip.block_stride == runs.pitch == strip.row_bytes:
        return runs.device_offsets, runs.slot_offsets, runs.blocks * strip.row_bytes
    first = np.repeat(np.cumsum(runs.blocks) - runs.blocks, runs.blocks)
    block = np.arange(int(runs.blocks.sum()), dtype=np.int64) - first
    row = np.arange(strip.rows, dtype=np.int64)
    device = (np.repeat(runs.device_offsets, runs.blocks) + block * strip.block_stride)[
        :, None
    ] + row * strip.row_stride
    slot = (np.repeat(runs.slot_offsets, runs.blocks) + block * runs.pitch)[:, None] + row * strip.row_bytes
    return device.reshape(-1), slot.reshape(-1), np.full(device.size, strip.row_bytes, np.int64)


def _places(group: int, shape: GroupShape, gpu: BlockSpan, cpu: BlockSpan, *, store: bool) -> tuple[Numbers, Numbers]:
    """The group's GPU blocks, and where in the pool each one's bytes lie. All of it checked."""
    blocks = _numbers(gpu.of_group(group), f"GPU blocks of group {group}", shape.num_blocks)
    slots = _numbers(cpu.of_group(group), f"slots of group {group}", shape.slots)
    first = gpu.block_indices[group]
    if not isinstance(first, int):
        raise ShapeError(f"group {group}: block_indices is {first!r}; expected a whole number")
    if cpu.block_indices[group] != 0:
        raise ShapeError(f"group {group}: block_indices of a CPU span is {cpu.block_indices[group]}; it must be 0")
    if len(blocks) and not 0 <= first < shape.blocks_per_slot:
        raise ShapeError(
            f"group {group}: block_indices is {first}; a slot holds {shape.blocks_per_slot} GPU blocks, so it is from 0 "
            f"to {shape.blocks_per_slot - 1}"
        )
    wanted = -(-(first + len(blocks)) // shape.blocks_per_slot) if len(blocks) else 0
    if len(slots) != wanted:
        raise ShapeError(
            f"group {group}: {len(blocks)} GPU blocks from index {first} on fill {wanted} slots of "
            f"{shape.blocks_per_slot}; the spec names {len(slots)}"
        )
    targets, name = (cpu.of_group(group), "slot") if store else (gpu.of_group(group), "GPU block")
    if len(set(targets)) != len(targets):
        raise ShapeError(f"group {group}: a {name} is named twice as a destination")
    index = first + np.arange(len(blocks), dtype=np.int64)
    inside = index % shape.blocks_per_slot * shape.block_bytes
    return blocks, slots[index // shape.blocks_per_slot] * shape.slot_bytes + shape.shard_offset + inside


def _runs(group: int, shape: GroupShape, blocks: Numbers, offsets: Numbers) -> list[Runs]:
    """One ``Runs`` a strip. Blocks join where the next one is next to its predecessor on both sides."""
    joins = (np.diff(blocks) == 1) & (np.diff(offsets) == shape.pitch)
    if not shape.join_slots:
        joins &= np.diff(offsets // shape.slot_bytes) == 0
    starts = np.concatenate(([0], np.flatnonzero(~joins) + 1))
    counts = np.diff(np.append(starts, len(blocks)))
    firsts, places = blocks[starts], offsets[starts]
    return [
        Runs(group, strip, shape.pitch, strip.offset + firsts * strip.block_stride, places + strip.slot_offset, counts)
        for strip in shape.strips
    ]


def _numbers(values: Sequence[Any], name: str, count: int) -> Numbers:
    if not len(values):
        return np.empty(0, np.int64)
    try:
        numbers = np.array(values)
    except (ValueError, OverflowError) as error:
        raise ShapeError(f"{name}: {error}") from None
    if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
        raise ShapeError(f"{name} are not whole numbers that fit 64 bits ({numbers.dtype})")
    if not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise ShapeError(f"{name}: {numbers.min()} to {numbers.max()}; there are 0 to {count - 1}")
    return numbers.astype(np.int64)


def _name(direction: TransferType) -> str:
    return f"{direction[0].value} -> {direction[1].value}"
