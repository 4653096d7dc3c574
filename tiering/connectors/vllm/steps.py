"""vLLM's requests and steps in the words of our scheduler's half."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tiering.connectors.requests import NULL_BLOCK, RequestLimits, ScheduledRequest, StepOutput
from tiering.connectors.vllm.layout import EngineBlocks

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger("tiering.connectors")

Tables = tuple[Sequence[int], ...]

LOAD_TOKENS_KEY = "max_load_tokens"
STORE_TOKENS_KEY = "max_offload_tokens"
LOAD_TIERS_KEY = "load_tiers"


def limits_of(request: Request) -> RequestLimits:
    """From the request's ``kv_transfer_params``; what is malformed there is named once and ignored."""
    params: dict[str, Any] = request.kv_transfer_params or {}
    tiers = params.get(LOAD_TIERS_KEY)
    if tiers is not None and not (isinstance(tiers, list) and all(isinstance(tier, str) for tier in tiers)):
        log.warning("request %s: %s is %r; expected a list of tier names", request.request_id, LOAD_TIERS_KEY, tiers)
        tiers = None
    return RequestLimits(
        load_tokens_max=_count(request, params, LOAD_TOKENS_KEY),
        store_tokens_max=_count(request, params, STORE_TOKENS_KEY),
        load_tiers=None if tiers is None else frozenset(tiers),
    )


def _count(request: Request, params: dict[str, Any], key: str) -> int | None:
    value = params.get(key)
    if value is None or (type(value) is int and value >= 0):
        return value
    log.warning("request %s: %s is %r; expected a whole number of tokens", request.request_id, key, value)
    return None


def tables_of(block_ids: Sequence[Sequence[int]], blocks: EngineBlocks) -> Tables:
    """The tables of the groups that are offloaded."""
    return tuple(block_ids[group_id] for group_id in blocks.group_ids)


def step_of(output: SchedulerOutput, blocks: EngineBlocks) -> StepOutput:
    """What vLLM scheduled."""
    state = output.kv_connector_block_state
    scheduled: list[ScheduledRequest] = []
    allocated: set[int] = {copy.dst_block_id for copy in output.kv_cache_block_copies or ()}
    for request_id, computed_tokens, fresh in _requests(output, blocks):
        allocated.update(fresh)
        tokens = output.num_scheduled_tokens.get(request_id, 0)
        table = state.get_block_ids(request_id) if state is not None else None
        if not tokens or table is None:
            continue
        drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        scheduled.append(ScheduledRequest(request_id, tables_of(table, blocks), computed_tokens, tokens - drafts))
    allocated.discard(NULL_BLOCK)
    return StepOutput(scheduled, frozenset(output.preempted_req_ids or ()), frozenset(allocated))


def _requests(output: SchedulerOutput, blocks: EngineBlocks) -> Iterator[tuple[str, int, set[int]]]:
    """(request, tokens computed before this step, GPU blocks whose old content this step overwrites)."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, _behind(new.block_ids, new.num_computed_tokens, blocks)
    cached = output.scheduled_cached_reqs
    for request_id, computed, table in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        if table is None:
            yield request_id, computed, set()
        elif request_id in cached.resumed_req_ids:
            yield request_id, computed, _behind(table, computed, blocks)
        else:
            yield request_id, computed, {block for ids in table for block in ids}


def _behind(table: Sequence[Sequence[int]], computed_tokens: int, blocks: EngineBlocks) -> set[int]:
    """Blocks behind the tokens that the request found in vLLM's own cache, or that were loaded for it before.

    Of groups that are not offloaded all count: their content is nobody's to store.
    """
    tokens = dict(zip(blocks.group_ids, blocks.gpu_tokens_per_block, strict=True))
    return {
        block
        for group_id, ids in enumerate(table)
        for block in (ids[computed_tokens // tokens[group_id] :] if group_id in tokens else ids)
    }
