"""The order of a request's keys in its prompt, as far as vLLM tells it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from vllm.v1.kv_offload.base import ReqContext

from tiering.types import BlockKey

GROUP_BYTES: Final = 4
"""The end of vLLM's keys: the number of the group."""


def positions_of(req_context: ReqContext) -> Mapping[BlockKey, int]:
    """Where each key of the request ends, in tokens. Empty where this vLLM does not say."""
    positions = getattr(req_context, "_offload_key_positions", None)
    return positions if isinstance(positions, dict) else {}


def run_from(key: BlockKey, req_context: ReqContext, keys_max: int) -> list[BlockKey]:
    """``key`` and those of its group behind it: what the scheduler asks about next, so that one call can serve all."""
    positions = positions_of(req_context)
    if key not in positions:
        return [key]
    start, group = positions[key], key[-GROUP_BYTES:]
    run = [other for other, end in positions.items() if end >= start and other.endswith(group)]
    return run[:keys_max] if run[0] == key else [key]


def in_order(keys: Collection[BlockKey], req_context: ReqContext) -> list[BlockKey]:
    """By group, and from the head of the prompt to its end."""
    positions = positions_of(req_context)
    return sorted(keys, key=lambda key: (key[-GROUP_BYTES:], positions.get(key, 0)))


def before(key: BlockKey, tokens_per_block: int, req_context: ReqContext) -> BlockKey | None:
    """The key of the block before, in the same group."""
    positions = positions_of(req_context)
    end = positions.get(key, 0) - tokens_per_block
    group = key[-GROUP_BYTES:]
    return next((other for other, ends in positions.items() if ends == end and other.endswith(group)), None)
