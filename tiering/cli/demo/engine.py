"""A small engine: paged KV in a bounded device pool, prefix caching, chunked prefill, greedy decode, and offload."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tiering import block_keys
from tiering.cli.demo.model import DemoModel
from tiering.cli.demo.pool import DevicePool
from tiering.types import BlockKey, PrefixMatch

if TYPE_CHECKING:
    from transformers import DynamicCache

    from tiering import TieringOffloadingManager

NEAREST_TIER = "primary"


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One answered prompt: ``prompt_tokens == device_tokens + sum(tier_tokens) + computed_tokens``."""

    conversation: int
    turn: int
    prompt_tokens: int
    device_tokens: int
    """Found in the device pool."""
    tier_tokens: Mapping[str, int]
    """Loaded through the manager, by the nearest tier that had them."""
    computed_tokens: int
    ttft_s: float
    """From the prompt to the first answered token: key hashing, match, load, copies and the rest of the prefill."""
    load_s: float
    """The part of it that match and load took."""
    output_ids: tuple[int, ...]
    logits: torch.Tensor
    """(answer tokens, vocabulary), fp32: what each answered token was chosen from."""

    @property
    def saved_tokens(self) -> int:
        return sum(self.tier_tokens.values())

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "logits"}
        raw = self.logits.contiguous().numpy().tobytes()
        return {
            **fields,
            "tier_tokens": dict(self.tier_tokens),
            "output_ids": list(self.output_ids),
            "logits": {"shape": list(self.logits.shape), "float32": base64.b64encode(raw).decode()},
        }

    @staticmethod
    def from_json(fields: dict[str, Any]) -> TurnRecord:
        raw = bytearray(base64.b64decode(fields["logits"]["float32"]))
        logits = torch.frombuffer(raw, dtype=torch.float32).view(fields["logits"]["shape"])
        return TurnRecord(**{**fields, "output_ids": tuple(fields["output_ids"]), "logits": logits})


class Engine:
    """Answers one prompt at a time. With a ``manager``, what the device pool lost is loaded instead of computed.

    ``pool_blocks`` must hold the longest sequence. A call that raises leaves the engine unusable. The manager stays
    the caller's.
    """

    def __init__(
        self, model: DemoModel, *, tokens_per_block: int, pool_blocks: int, manager: TieringOffloadingManager | None
    ) -> None:
        self.layout = model.layout(tokens_per_block)
        self.pool = DevicePool(pool_blocks, self.layout.groups[0].block_bytes)
        self.stored_blocks = 0
        self.refused_blocks = 0
        self._model = model
        self._tokens_per_block = tokens_per_block
        self._manager = manager
        # Loads land here before they are scattered into the pool, stores are gathered here: one copy each way.
        self._staging = torch.zeros_like(self.pool.rows)

    def blocks(self, keys: Sequence[BlockKey]) -> torch.Tensor:
        """A copy of the resident blocks ``keys``, uint8 (n, block_bytes). Raises ``KeyError`` if one is not resident."""
        return self.pool.rows[self.pool.rows_of(keys)]

    async def answer(
        self,
        conversation: int,
        turn: int,
        prompt: Sequence[int],
        answer_tokens: int,
        *,
        reusable_tokens: int | None = None,
    ) -> TurnRecord:
        """Prefill ``prompt``, decode ``answer_tokens`` greedily, then offer the blocks computed to the manager.

        Only the first ``reusable_tokens`` of the prompt are looked up (None: all).
        """
        begin = time.perf_counter()
        # The last token is always computed: its logits are the answer's first token.
        keys = self._keys(prompt[:-1])[: None if reusable_tokens is None else reusable_tokens // self._tokens_per_block]
        rows = self.pool.hold_prefix(keys)
        on_device = len(rows)
        load_begin = time.perf_counter()
        tier_tokens = await self._load(keys[on_device:])
        load_s = time.perf_counter() - load_begin
        reused = on_device + sum(tier_tokens.values()) // self._tokens_per_block
        rows += self.pool.hold_new(keys[on_device:reused])
        self.pool.rows[rows[on_device:]] = self._staging[: reused - on_device]

        cache = self._model.cache_of(self._model.as_blocks(self.pool.rows[rows], self._tokens_per_block))
        logits = self._prefill(prompt, reused * self._tokens_per_block, cache)
        output, steps = [int(logits.argmax())], [logits]
        ttft_s = time.perf_counter() - begin
        while len(output) < answer_tokens:
            steps.append(self._model.forward(output[-1:], cache))
            output.append(int(steps[-1].argmax()))

        await self._keep([*prompt, *output[:-1]], reused, cache)
        return TurnRecord(
            conversation=conversation,
            turn=turn,
            prompt_tokens=len(prompt),
            device_tokens=on_device * self._tokens_per_block,
            tier_tokens=tier_tokens,
            computed_tokens=len(prompt) - reused * self._tokens_per_block,
            ttft_s=ttft_s,
            load_s=load_s,
            output_ids=tuple(output),
            logits=torch.stack(steps),
        )

    def _keys(self, token_ids: Sequence[int]) -> list[BlockKey]:
        return list(block_keys(token_ids, self.layout))

    async def _load(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """Load the longest run that the tiers have into the staging rows; returns its tokens by tier."""
        if self._manager is None or not keys:
            return {}
        match = await self._manager.match(keys)
        if not match.loadable_blocks:
            return {}
        wanted = match.loadable_blocks
        loaded = await self._manager.load(keys[:wanted], self._staging[:wanted])
        return {tier: n * self._tokens_per_block for tier, n in split_by_tier(match, loaded).items()}

    def _prefill(self, prompt: Sequence[int], start: int, cache: DynamicCache) -> torch.Tensor:
        # Chunks begin at block boundaries whatever was reused, so that every run computes a token in the same chunk.
        logits = torch.empty(0)
        for begin in range(start, len(prompt), self._tokens_per_block):
            logits = self._model.forward(prompt[begin : begin + self._tokens_per_block], cache)
        return logits

    async def _keep(self, sequence: Sequence[int], reused: int, cache: DynamicCache) -> None:
        """Put the full blocks behind the first ``reused`` into the pool and offer them to the manager."""
        keys = self._keys(sequence)
        rows = self.pool.hold_new(keys[reused:])
        into = self._model.as_blocks(self.pool.rows, self._tokens_per_block)
        for index, row in enumerate(rows, start=reused):
            self._model.copy_block(cache, index, into[row])
        if self._manager is not None and rows:
            source = self._staging[: len(rows)]
            torch.index_select(self.pool.rows, 0, torch.tensor(rows), out=source)
            parent = keys[reused - 1] if reused else None
            report = await self._manager.store(keys[reused:], source, parent=parent)
            self.stored_blocks += report.stored
            self.refused_blocks += report.refused
        self.pool.release(keys)


def split_by_tier(match: PrefixMatch, loaded: int) -> dict[str, int]:
    """The blocks of ``match.by_tier`` that make up the ``loaded`` ones.

    A load that stops short of the match stopped at a block of a secondary tier, so those count last.
    """
    counts: dict[str, int] = {}
    for tier in sorted(match.by_tier, key=lambda name: name != NEAREST_TIER):
        counts[tier] = min(match.by_tier[tier], loaded - sum(counts.values()))
    return {tier: n for tier, n in counts.items() if n}
