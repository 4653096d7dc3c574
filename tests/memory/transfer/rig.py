"""Blocks, slots and specs for the tests, and the byte-for-byte model that says what a copy must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tiering.memory.arena import Arena
from tiering.memory.transfer.blocks import DeviceBlocks, Placement
from tiering.memory.transfer.spec import BlockSpan, Medium, TransferSpec

WAIT_S = 30.0


@dataclass(frozen=True)
class Part:
    """One group's part of a job."""

    blocks: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    first: int = 0


def spec(parts: Sequence[Part], *, store: bool) -> TransferSpec:
    gpu = BlockSpan(
        Medium.GPU,
        tuple(block for part in parts for block in part.blocks),
        tuple(len(part.blocks) for part in parts),
        tuple(part.first for part in parts),
    )
    cpu = BlockSpan(
        Medium.CPU,
        tuple(slot for part in parts for slot in part.slots),
        tuple(len(part.slots) for part in parts),
        (0,) * len(parts),
    )
    return TransferSpec(gpu, cpu) if store else TransferSpec(cpu, gpu)


def store(*parts: Part) -> TransferSpec:
    return spec(parts, store=True)


def load(*parts: Part) -> TransferSpec:
    return spec(parts, store=False)


def random_bytes(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Fill ``tensor`` in place, byte by byte."""
    noise = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, tuple(tensor.shape), np.uint8))
    tensor.copy_(noise)
    return tensor


def pages_of(blocks: DeviceBlocks) -> list[list[list[bytes]]]:
    """Every page's bytes: of each group, tensor and block."""
    return [[[bytes(page.tolist()) for page in tensor] for tensor in tensors] for tensors in blocks.groups]


def slots_of(arena: Arena, groups: int) -> list[list[bytearray]]:
    """Every slot's bytes: of each pool."""
    return [[bytearray(slot.tobytes()) for slot in arena.array(pool)] for pool in range(groups)]


def model(
    parts: Sequence[Part],
    pages: list[list[list[bytes]]],
    slots: list[list[bytearray]],
    placement: Placement,
    rank: int,
    *,
    store: bool,
) -> int:
    """Carry out a job on plain bytes, a page at a time; its payload bytes."""
    moved = 0
    for group, part in enumerate(parts):
        per_slot = placement.blocks_per_slot[group]
        block_bytes = sum(len(tensor[0]) for tensor in pages[group])
        for index, block in enumerate(part.blocks, part.first):
            slot = slots[group][part.slots[index // per_slot]]
            at = (rank * per_slot + index % per_slot) * block_bytes
            for tensor in pages[group]:
                size = len(tensor[block])
                if store:
                    slot[at : at + size] = tensor[block]
                else:
                    tensor[block] = bytes(slot[at : at + size])
                at += size
                moved += size
    return moved
