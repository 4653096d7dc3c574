"""vLLM's KV cache tensors as blocks of pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import group_kernel_blocks

from tiering.connectors.vllm.layout import EngineBlocks
from tiering.errors import ConfigError
from tiering.memory.transfer.blocks import DeviceBlocks, as_pages

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def device_blocks(
    kv_caches: Mapping[str, torch.Tensor], kv_cache_config: KVCacheConfig, blocks: EngineBlocks
) -> DeviceBlocks:
    """The offloaded groups' blocks on this rank. Layers that share a cache count once.

    Raises ``ShapeError`` if a block is not contiguous in each layer, ``ConfigError`` if it is larger than planned.
    """
    groups = []
    for names in (kv_cache_config.kv_cache_groups[group_id].layer_names for group_id in blocks.group_ids):
        pages = [as_pages(group_kernel_blocks(kv_caches[name], kv_cache_config.num_blocks)) for name in names]
        groups.append(tuple({(page.data_ptr(), page.stride(0)): page for page in pages}.values()))
    device = DeviceBlocks(tuple(groups))
    for group, planned_bytes in enumerate(blocks.shard_bytes):
        found_bytes = device.block_bytes(group) * blocks.blocks_per_slot
        if found_bytes > planned_bytes:
            raise ConfigError(
                f"KV cache group {blocks.group_ids[group]}: a block has {found_bytes} bytes on this rank, the scheduler"
                f" planned {planned_bytes}; this cache layout is not supported by TieringConnector"
            )
    return device
