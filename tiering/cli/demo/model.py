"""A transformers causal LM, and how its KV cache maps to blocks of bytes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tiering.cli.demo.options import ModelSpec
from tiering.errors import ConfigError
from tiering.types import KVLayout

if TYPE_CHECKING:
    from transformers import DynamicCache


class DemoModel:
    """A Llama of ``spec`` with weights from ``seed``, on the CPU, in fp32.

    A block is one contiguous row of ``block_bytes``: ``(layers, keys|values, kv_heads, tokens_per_block, head_dim)``.
    Not thread-safe.
    """

    def __init__(self, spec: ModelSpec, *, seed: int, positions_max: int) -> None:
        transformers = require_transformers()
        config = transformers.LlamaConfig(
            vocab_size=spec.vocab,
            hidden_size=spec.hidden,
            intermediate_size=spec.intermediate,
            num_hidden_layers=spec.layers,
            num_attention_heads=spec.heads,
            num_key_value_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            max_position_embeddings=positions_max,
            initializer_range=spec.initializer_range,
            attn_implementation="sdpa",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model = transformers.LlamaForCausalLM(config).eval()
        self._cache_type = transformers.DynamicCache
        # transformers 5.2x renamed the argument; the old name still works there, with a warning.
        parameters = inspect.signature(inspect.unwrap(type(self._model).forward)).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.spec = spec
        self.seed = seed

    def layout(self, tokens_per_block: int) -> KVLayout:
        """The identity of this model's blocks. The weights follow from spec and seed, so both are part of it."""
        return KVLayout.uniform(
            model="kvtiering-demo-llama",
            revision=f"seed={self.seed} {self.spec}",
            dtype="float32",
            tokens_per_block=tokens_per_block,
            block_bytes=tokens_per_block * self.spec.kv_bytes_per_token,
        )

    def empty_cache(self) -> DynamicCache:
        cache: DynamicCache = self._cache_type(config=self._model.config)
        return cache

    def forward(self, token_ids: Sequence[int], cache: DynamicCache) -> torch.Tensor:
        """Compute ``token_ids`` behind what ``cache`` holds and append them to it. Returns the last token's logits."""
        ids = torch.tensor([list(token_ids)])
        arguments: dict[str, Any] = {self._cache_argument: cache}
        with torch.inference_mode():
            output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **arguments)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def as_blocks(self, rows: torch.Tensor, tokens_per_block: int) -> torch.Tensor:
        """A float view of uint8 ``rows`` (n, block_bytes): (n, layers, 2, kv_heads, tokens, head_dim). No copy."""
        spec = self.spec
        return rows.view(torch.float32).view(
            rows.shape[0], spec.layers, 2, spec.kv_heads, tokens_per_block, spec.head_dim
        )

    def cache_of(self, blocks: torch.Tensor) -> DynamicCache:
        """A cache that holds the tokens of ``blocks`` (as ``as_blocks`` gives them), in order. Copies."""
        cache = self.empty_cache()
        count, layers, _, kv_heads, tokens, head_dim = blocks.shape
        if count:
            with torch.inference_mode():
                for layer in range(layers):
                    # (n, 2, heads, tokens, dim) -> (2, 1, heads, n * tokens, dim)
                    joined = blocks[:, layer].permute(1, 2, 0, 3, 4).reshape(2, 1, kv_heads, count * tokens, head_dim)
                    cache.update(joined[0], joined[1], layer)
        return cache

    def copy_block(self, cache: DynamicCache, index: int, out: torch.Tensor) -> None:
        """Copy block ``index`` of the sequence in ``cache`` to ``out``: (layers, 2, kv_heads, tokens, head_dim)."""
        tokens = out.shape[3]
        span = slice(index * tokens, (index + 1) * tokens)
        layers: Any = cache.layers  # attention layers all; the declared type covers other kinds
        for layer, into in zip(layers, out, strict=True):
            into[0].copy_(layer.keys[0, :, span])
            into[1].copy_(layer.values[0, :, span])


def require_transformers() -> Any:
    """The transformers package. Raises ``ConfigError`` that names the extra if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"the demo runs a transformers model, and transformers cannot be imported ({error}); "
            "pip install 'kvtiering[transformers]'"
        ) from error
    return transformers
