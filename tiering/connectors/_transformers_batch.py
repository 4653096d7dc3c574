"""A call's arguments: prompts with their padding, and what of ``generate`` can be served from blocks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tiering.connectors._transformers_model import require_transformers
from tiering.errors import ConfigError, ShapeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_UNSERVED = {
    "cache_implementation": "blocks are read out of a DynamicCache; leave it unset (no static, quantized, offloaded cache)",
    "assistant_model": "assisted generation rolls its cache back; leave it out",
    "prompt_lookup_num_tokens": "assisted generation rolls its cache back; leave it out",
    "assistant_early_exit": "assisted generation rolls its cache back; leave it out",
    "use_mtp": "assisted generation rolls its cache back; leave it out",
    "custom_generate": "only transformers' own decoding is known to use the cache it is given; leave it out",
    "penalty_alpha": "contrastive search is no decoding of transformers' own; leave it out",
    "dola_layers": "DoLa is no decoding of transformers' own; leave it out",
    "constraints": "constrained beam search is no decoding of transformers' own; leave it out",
    "force_words_ids": "constrained beam search is no decoding of transformers' own; leave it out",
    "prefill_chunk_size": "some releases of transformers then compute the prompt again behind the reused part; leave it out",
    "token_healing": "it changes the prompt after its blocks were looked up; heal the prompt first",
}
"""Arguments of ``generate`` that change what the cache holds, and why."""

_CACHES = ("cache", "past_key_values", "cache_params")


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts side by side, padded on the left to ``width`` columns: column ``pads[i]`` holds token 0 of row i."""

    rows: tuple[torch.Tensor, ...]
    """Token ids without padding, 1-D, on the CPU."""
    pads: tuple[int, ...]
    width: int

    @staticmethod
    def of(input_ids: Any, attention_mask: Any) -> Batch:
        """From ids ``(rows, width)`` and a mask of the same shape (None: no padding). Raises ``ShapeError``."""
        if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
            what = (
                f"shape {tuple(input_ids.shape)}" if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
            )
            raise ShapeError(f"input_ids: expected a 2-D integer tensor (prompts, tokens); got {what}")
        ids = input_ids.detach().cpu()
        count, width = ids.shape
        pads = [0] * count
        if attention_mask is not None:
            if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != input_ids.shape:
                raise ShapeError(f"attention_mask: expected a tensor of the shape of input_ids, {tuple(ids.shape)}")
            mask = attention_mask.detach().cpu() != 0
            for row, bad in enumerate((mask[:, 1:] < mask[:, :-1]).any(1).tolist()):
                if bad:
                    raise ShapeError(
                        f"attention_mask: row {row} is not padded on its left; set tokenizer.padding_side = 'left'"
                    )
            pads = (width - mask.sum(1)).tolist()
        return Batch(tuple(row[pad:] for row, pad in zip(ids, pads, strict=True)), tuple(pads), width)

    @property
    def tokens(self) -> int:
        """Of all prompts, without padding."""
        return sum(len(row) for row in self.rows)

    def columns(self, tokens: Sequence[int]) -> int:
        """The leading columns that are whole if the first ``tokens[i]`` tokens of row i are; 0 if these are padding alone."""
        reach = min((pad + n for pad, n in zip(self.pads, tokens, strict=True)), default=0)
        return reach if reach > min(self.pads, default=0) else 0


@dataclass(frozen=True, slots=True)
class Settings:
    """What must be known of a call of ``generate``."""

    copies: int
    """Rows of the cache for each prompt: returned sequences, or beams."""
    beams: int
    eos_ids: frozenset[int]

    @staticmethod
    def of(model: PreTrainedModel, batch_ids: torch.Tensor, masked: bool, arguments: Mapping[str, Any]) -> Settings:
        """Raises ``ConfigError`` that names the argument and the remedy for what cannot be served."""
        configs = (arguments.get("generation_config"), model.generation_config)

        def value(name: str) -> Any:
            if arguments.get(name) is not None:
                return arguments[name]
            return next((found for config in configs if (found := getattr(config, name, None)) is not None), None)

        _check_names(arguments)
        for name, why in _UNSERVED.items():
            if value(name):
                raise ConfigError(f"generate({name}=...) cannot be served: {why}, or call model.generate")
        if value("use_cache") is False:
            raise ConfigError(
                "generate(use_cache=False) computes everything anew; leave it out, or call model.generate"
            )
        eos_ids, pad_ids = _ids(value("eos_token_id")), _ids(value("pad_token_id"))
        # transformers would take the padding for masked here, and from that guess everything else follows.
        if not masked and not pad_ids & eos_ids and any(bool((batch_ids == pad).any()) for pad in pad_ids):
            raise ConfigError("input_ids holds the padding token and there is no attention_mask; pass the tokenizer's")
        beams = value("num_beams") or 1
        return Settings(max(beams, value("num_return_sequences") or 1), beams, eos_ids)


def _check_names(arguments: Mapping[str, Any]) -> None:
    """A block's key stands for tokens alone: whatever else reaches the model would be missing from it."""
    transformers = require_transformers()
    for name in _CACHES:
        if arguments.get(name) is not None:
            raise ConfigError(f"generate({name}=...): the cache is made here; for one of your own call model.generate")
    known = set(inspect.signature(transformers.GenerationMixin.generate).parameters) - {"self", "inputs", "kwargs"}
    known |= set(transformers.GenerationConfig().to_dict()) | {"tokenizer"}
    for name, given in arguments.items():
        if name not in known and given is not None:
            raise ConfigError(
                f"generate({name}=...) cannot be served: a block's key covers token ids alone, and this may change the "
                "KV of the same tokens; call model.generate"
            )


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(torch.as_tensor(value).reshape(-1).tolist())
