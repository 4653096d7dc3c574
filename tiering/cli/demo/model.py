"""A transformers causal LM with random weights, and the runner that puts it under the reference engine."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tiering.cli.demo.options import ModelSpec
from tiering.connectors.reference import ModelRunner
from tiering.errors import ConfigError

if TYPE_CHECKING:
    from transformers import DynamicCache


class DemoModel:
    """A Llama of ``spec`` with weights from ``seed``, on the CPU, in fp32. Not thread-safe."""

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
        self._revision = f"seed={seed} {spec}"

    def runner(self, *, num_gpu_blocks: int, tokens_per_block: int) -> ModelRunner:
        """The model over paged blocks of its own. The weights follow from spec and seed: both are part of the identity."""
        return ModelRunner(
            self._model,
            name="kvtiering-demo-llama",
            revision=self._revision,
            num_gpu_blocks=num_gpu_blocks,
            tokens_per_block=tokens_per_block,
        )

    def empty_cache(self) -> DynamicCache:
        cache: DynamicCache = self._cache_type(config=self._model.config)
        return cache

    def forward(self, token_ids: Sequence[int], cache: DynamicCache) -> torch.Tensor:
        """Compute ``token_ids`` behind what ``cache`` holds and append them to it. Returns the last token's logits.

        transformers alone, without engine or blocks: what the engine's answers are compared with.
        """
        ids = torch.tensor([list(token_ids)])
        arguments: dict[str, Any] = {self._cache_argument: cache}
        with torch.inference_mode():
            output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **arguments)
        logits: torch.Tensor = output.logits[0, -1]
        return logits


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
