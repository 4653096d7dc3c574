"""The engines of one rank, by where its blocks are."""

from __future__ import annotations

from tiering.errors import ShapeError
from tiering.memory.arena import Arena
from tiering.memory.transfer.blocks import DeviceBlocks, Placement
from tiering.memory.transfer.cpu import CpuTransferEngine
from tiering.memory.transfer.cuda import CudaTransferEngine
from tiering.memory.transfer.spec import LOAD, STORE, TransferEngine, TransferType


def open_engines(
    arena: Arena, blocks: DeviceBlocks, placement: Placement, rank: int = 0
) -> dict[TransferType, TransferEngine]:
    """One engine a direction, on CUDA (and ROCm) or CPU as the blocks are; the caller closes both.

    Raises ``ShapeError`` if arena, blocks and placement do not fit each other or the device is another one, and
    ``ClosedError`` if the arena is closed.
    """
    engine: type[CudaTransferEngine] | type[CpuTransferEngine]
    if blocks.device.type == "cuda":
        engine = CudaTransferEngine
    elif blocks.device.type == "cpu":
        engine = CpuTransferEngine
    else:
        raise ShapeError(f"no transfer engine for blocks on {blocks.device}: it is made for CUDA, ROCm and CPU tensors")
    return {direction: engine(direction, arena, blocks, placement, rank) for direction in (STORE, LOAD)}
