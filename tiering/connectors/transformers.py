"""Into Hugging Face transformers: a prefix cache around ``generate`` for a plain script, that outlives the process.

with TieredPrefixCache(model, "configs/local.yaml") as cache:
    out = cache.generate(input_ids, attention_mask=mask, max_new_tokens=32)
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from tiering.config import TieringConfig
from tiering.connectors._transformers_batch import Batch, Settings
from tiering.connectors._transformers_blocks import BlockIO
from tiering.connectors._transformers_model import (
    cache_argument,
    check_eval,
    check_model,
    empty_cache,
    kv_shape,
    layout_of,
    require_transformers,
    weights_sample,
)
from tiering.connectors._transformers_tensors import PrefixTensors, block_of, check_cache
from tiering.errors import ConfigError, TieringError
from tiering.keys import block_keys
from tiering.manager import CLOSE_DEADLINE_S, FLUSH_DEADLINE_S, TieringOffloadingManager
from tiering.types import BlockKey, FlushReport, KVLayout, Outcome, PrefixMatch, StoreReport

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

T = TypeVar("T")

TOKENS_PER_BLOCK = 32
"""Default. A small model has some 10 KiB of KV a token, and a disk wants pieces of 256 KiB and more; a longer block would
leave more of a prompt's end to compute again."""
LOAD_DEADLINE_S = 30.0
"""How long a call waits for blocks, all in all; each read has its tier's deadline besides. Past it the rest is computed."""
STORE_DEADLINE_S = 5.0
"""How long a call waits for demotions to make room for its blocks. Past it the rest is not stored."""


@dataclass(frozen=True, slots=True)
class CallReport:
    """One call of ``generate``: ``prompt_tokens == sum(reused_tokens.values()) + computed_tokens``."""

    prompt_tokens: int
    """Of all prompts, without padding."""
    reused_tokens: Mapping[str, int]
    """By the nearest tier that had them when the call began."""
    computed_tokens: int
    stored_blocks: int
    refused_blocks: int
    """That found no room within ``STORE_DEADLINE_S``."""
    load_s: float
    generate_s: float
    """Of the model itself."""
    store_s: float


class TieredPrefixCache:
    """Keeps the KV of one decoder-only model's prompts and answers, and gives the longest prefix back to ``generate``.

    Use it as ``with``, or call ``open`` and ``close``. No event loop is needed, and a running one (a notebook's) does no
    harm. One call at a time. The model stays the caller's; nothing of it is changed.

    Two models never share blocks: the layout's ``revision`` is a fingerprint of the configuration and of all weights,
    read once here, at the speed of memory. ``revision=`` replaces it by a text that names the weights, where reading
    them takes too long or cannot be done (quantized in an unusual format). Without it each call looks at a sample of
    the weights and raises if they changed; see ``reset``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: str | os.PathLike[str] | TieringConfig,
        *,
        tokens_per_block: int = TOKENS_PER_BLOCK,
        revision: str | None = None,
        epoch: str | None = None,
        store_decode: bool = True,
    ) -> None:
        """``config``: a YAML file, or what was read from one. ``epoch`` (default: the configuration's) names the weights in use.

        ``store_decode=False`` keeps the prompts' blocks alone. Computes one token, to learn the shape of the KV; opens
        nothing. Raises ``ConfigError`` with the remedy: encoder-decoder models, layers other than full attention,
        several devices, training mode.
        """
        check_model(model)
        self._model = model
        self._shape = kv_shape(model)
        self._layout = layout_of(model, self._shape, tokens_per_block, revision)
        self._sample = weights_sample(model) if revision is None else None
        self._store_decode = store_decode
        self._argument = cache_argument(require_transformers().GenerationMixin.prepare_inputs_for_generation)
        config = config if isinstance(config, TieringConfig) else TieringConfig.from_yaml(config)
        self._match_deadline_s = max((tier.deadline_s for tier in config.tiers), default=0.0)
        self._manager = TieringOffloadingManager(config, self._layout, epoch=epoch)
        self._last: CallReport | None = None

    # -- lifecycle ----------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> KVLayout:
        return self._layout

    @property
    def manager(self) -> TieringOffloadingManager:
        """The manager behind it, for ``stats()`` and all else; it is opened and closed here."""
        return self._manager

    @property
    def last(self) -> CallReport | None:
        """What the last call of ``generate`` that returned did; None before the first."""
        return self._last

    def open(self) -> None:
        """Open the tiers; blocks. Raises ``ConfigError`` for what an operator must fix; then, or interrupted, it is closed."""
        try:
            _apart(self._manager.sync.open)
        except BaseException:
            self.close()  # an interrupt comes after the thread has opened it all the same
            raise

    def close(self) -> list[str]:
        """Demote what is owed (``flush_on_close``) and close; blocks. Names of tiers given up as hung. Idempotent."""
        return self._manager.sync.close()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def flush(self, *, deadline_s: float = FLUSH_DEADLINE_S) -> FlushReport:
        """Wait until every block is in the tiers that should have it, at most ``deadline_s``."""
        return _apart(lambda: asyncio.run(self._manager.flush(deadline_s=deadline_s)))

    def reset(self, epoch: str, *, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """The weights were changed on purpose: from now on every tier misses, until blocks of ``epoch`` are stored."""
        _apart(lambda: asyncio.run(self._manager.reset(epoch, deadline_s=deadline_s)))
        if self._sample is not None:
            self._sample = weights_sample(self._model)

    # -- generate -----------------------------------------------------------------------------------------------------

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        salt: bytes = b"",
        lora: bytes = b"",
        **arguments: Any,
    ) -> Any:
        """As ``model.generate`` with the same arguments, and what it returns; the KV of known prefixes is not computed.

        ``input_ids``: integers ``(prompts, tokens)``, padded on the left where ``attention_mask`` is 0. In a batch, as
        many leading columns are skipped as are known for every prompt; the last token of a prompt is always computed.
        Afterwards the full blocks of prompts and answers are stored. ``salt`` keeps tenants apart, ``lora`` names the
        adapter in use.

        Greedy search, sampling, beams (whose answers are not stored) and ``num_return_sequences``; other decodings, a
        cache of the caller's, and model inputs beyond token ids raise ``ConfigError``. Raises ``ClosedError`` when
        closed, and what ``model.generate`` raises; then nothing of the call is stored, and nothing stays leased.
        """
        io = BlockIO(self._manager)
        self._check_weights()
        batch = Batch.of(input_ids, attention_mask)
        settings = Settings.of(self._model, input_ids, attention_mask is not None, arguments)
        epoch, began = io.epoch, time.perf_counter()
        past, columns, matches = self._load(io, batch, salt, lora, settings.copies)
        loaded = time.perf_counter()
        if attention_mask is not None:
            arguments["attention_mask"] = attention_mask
        model: Any = self._model  # whose class has `generate` by a mixin that its type does not tell of
        out = model.generate(input_ids, **arguments, **{self._argument: past})
        generated = time.perf_counter()
        sequences: torch.Tensor = out if isinstance(out, torch.Tensor) else out.sequences
        if settings.beams == 1 and past.get_seq_length() != sequences.shape[1] - 1:
            raise TieringError(
                f"transformers {require_transformers().__version__} left {past.get_seq_length()} columns of KV for "
                f"{sequences.shape[1]} tokens: it did not go on from the cache it was given, and its output may be wrong"
            )
        rows, pads, places = self._to_store(batch, sequences, settings)
        report = self._store(io, rows, pads, places, past, salt, lora, epoch)
        reused = self._reused(batch, columns, matches)
        self._last = CallReport(
            prompt_tokens=batch.tokens,
            reused_tokens=reused,
            computed_tokens=batch.tokens - sum(reused.values()),
            stored_blocks=report.stored,
            refused_blocks=report.refused,
            load_s=loaded - began,
            generate_s=generated - loaded,
            store_s=time.perf_counter() - generated,
        )
        return out

    def _to_store(
        self, batch: Batch, sequences: torch.Tensor, settings: Settings
    ) -> tuple[list[torch.Tensor], list[int], list[int]]:
        """Token ids, padding and row in the cache of what a call computed."""
        if settings.beams > 1 or not self._store_decode:
            # All rows of a prompt have its KV; behind it lies what some beam tried.
            return list(batch.rows), list(batch.pads), [row * settings.copies for row in range(len(batch.rows))]
        pads = [pad for pad in batch.pads for _ in range(settings.copies)]
        rows = []
        for sequence, pad in zip(sequences.detach().cpu(), pads, strict=True):
            ends = [int(n) for eos in settings.eos_ids for n in (sequence[batch.width :] == eos).nonzero()[:1]]
            # Behind its end a row is padded until the longest answer ends.
            rows.append(sequence[pad : batch.width + min(ends) + 1] if ends else sequence[pad:])
        return rows, pads, list(range(len(rows)))

    # -- for those who call the model themselves ----------------------------------------------------------------------

    def load(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        salt: bytes = b"",
        lora: bytes = b"",
    ) -> tuple[DynamicCache, int]:
        """The KV of the leading ``n`` columns of ``input_ids``, and n: pass ``input_ids[:, n:]`` with it to the model.

        n is less than the number of columns, and may be 0. With padding pass the whole mask, and position ids that
        count from each prompt's first token.
        """
        io = BlockIO(self._manager)
        self._check_weights()
        past, columns, _ = self._load(io, Batch.of(input_ids, attention_mask), salt, lora, 1)
        return past, columns

    def store(
        self,
        input_ids: torch.Tensor,
        past: DynamicCache,
        attention_mask: torch.Tensor | None = None,
        *,
        salt: bytes = b"",
        lora: bytes = b"",
    ) -> StoreReport:
        """Store the full blocks of ``input_ids`` that ``past`` holds: its column i must be that of ``input_ids[:, i]``.

        Tokens beyond ``past`` are ignored. ``past`` is only read. One outcome a block, prompt by prompt. Raises
        ``ShapeError`` if ``past`` is not this model's.
        """
        io = BlockIO(self._manager)
        self._check_weights()
        batch = Batch.of(input_ids, attention_mask)
        places = list(range(len(batch.rows)))
        return self._store(io, batch.rows, batch.pads, places, past, salt, lora, io.epoch)

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _load(
        self, io: BlockIO, batch: Batch, salt: bytes, lora: bytes, copies: int
    ) -> tuple[DynamicCache, int, list[PrefixMatch]]:
        """A cache of ``copies`` rows a prompt with the columns that could be had, how many, and where each prompt's lay."""
        size = self._layout.groups[0].tokens_per_block
        # The last token is always computed: its logits are the answer's first token.
        keys = [block_keys(row[:-1], self._layout, salt, lora) for row in batch.rows]
        matches = [io.match(run, self._match_deadline_s) for run in keys]
        past = empty_cache(self._model)
        columns = batch.columns([match.tokens for match in matches])
        if not columns:
            return past, 0, matches
        tensors = PrefixTensors(self._shape, size, batch.pads, columns, copies)
        got = []
        for row, (run, pad) in enumerate(zip(keys, batch.pads, strict=True)):
            wanted = run[: -(-(columns - pad) // size)] if columns > pad else []
            loaded = io.load(wanted, tensors.taker(row), LOAD_DEADLINE_S)
            got.append(loaded * size if loaded < len(wanted) else columns)
        return past, tensors.fill(past, min(columns, batch.columns(got))), matches

    def _store(
        self,
        io: BlockIO,
        rows: Sequence[torch.Tensor],
        pads: Sequence[int],
        places: Sequence[int],
        past: DynamicCache,
        salt: bytes,
        lora: bytes,
        epoch: int,
    ) -> StoreReport:
        check_cache(past, self._shape, rows=max(places, default=-1) + 1)
        size = self._layout.groups[0].tokens_per_block
        columns = past.get_seq_length()
        outcomes: list[Outcome] = []
        stored = 0
        for row, pad, place in zip(rows, pads, places, strict=True):
            keys = block_keys(row[: max(0, columns - pad)], self._layout, salt, lora)
            # What some tier has need not pass through the primary one again.
            known = io.known(keys)
            fill = block_of(past, self._shape, size, place, pad + known * size)
            parent: BlockKey | None = keys[known - 1] if known else None
            part, copied = io.store(keys[known:], fill, parent=parent, deadline_s=STORE_DEADLINE_S, epoch=epoch)
            outcomes += [Outcome.OK] * known + part
            stored += copied
        good = sum(outcome.ok for outcome in outcomes)
        return StoreReport(stored, good - stored, len(outcomes) - good, tuple(outcomes))

    def _reused(self, batch: Batch, columns: int, matches: Sequence[PrefixMatch]) -> dict[str, int]:
        """Tokens of the skipped columns by tier, near to far; a prompt that was cut short lost its farthest."""
        size = self._layout.groups[0].tokens_per_block
        reused = dict.fromkeys(("primary", *self._manager.config.tier_names), 0)
        for pad, match in zip(batch.pads, matches, strict=True):
            left = max(0, columns - pad)
            for tier in reused:
                tokens = min(left, match.by_tier.get(tier, 0) * size)
                reused[tier] += tokens
                left -= tokens
        return {tier: tokens for tier, tokens in reused.items() if tokens}

    def _check_weights(self) -> None:
        """Raises ``ConfigError`` if the model is not the one that the blocks belong to."""
        check_eval(self._model)
        device = self._shape.device
        if torch.is_autocast_enabled(device.type):
            raise ConfigError(
                "autocast changes the KV's dtype; load the model in the dtype it is to compute in instead"
            )
        if self._model.device != device:
            raise ConfigError(f"the model moved from {device} to {self._model.device}; make a new TieredPrefixCache")
        if self._sample is not None and weights_sample(self._model) != self._sample:
            raise ConfigError(
                "the model's weights are not those that this cache was made for; after a change on purpose call "
                "reset(epoch=...), else make a new TieredPrefixCache"
            )


def _apart(work: Callable[[], T]) -> T:
    """Run it in a thread of its own: in the caller's an event loop may be running."""
    with ThreadPoolExecutor(1, thread_name_prefix="kvtiering-script") as executor:
        return executor.submit(work).result()
