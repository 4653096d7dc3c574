"""Random-weight models with a fixed seed, written to a directory: an engine loads them without any hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

VOCABULARY: Final = 512
SEED: Final = 20


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Enough of a Llama's configuration to give its KV cache a size."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int = 64
    positions: int = 1024
    window: int = 0
    """Tokens that all layers but the last attend to; 0: all of them."""

    @property
    def name(self) -> str:
        return f"{'hybrid' if self.window else 'llama'}-{self.hidden}"

    @property
    def kv_bytes_per_token(self) -> int:
        """fp32 keys and values of all layers."""
        return 2 * 4 * self.layers * self.kv_heads * self.head_dim


TINY: Final = ModelShape(layers=4, hidden=256, heads=4, kv_heads=2)
"""A prompt of 500 tokens takes milliseconds; greedy outputs of different prompts differ."""
HYBRID: Final = ModelShape(layers=4, hidden=256, heads=4, kv_heads=2, window=128)
"""Three layers with a sliding window and one without: vLLM makes four groups of them."""
LARGER: Final = ModelShape(layers=8, hidden=768, heads=12, kv_heads=12, positions=3328)
"""The prefill of 3,072 tokens costs seconds on one core, as it should where a hit is to be worth something."""


def write_model(directory: Path, shape: ModelShape) -> Path:
    """Write configuration and weights; ``directory``. Weights come from ``SEED`` alone: two processes agree on them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Olmo3Config, Olmo3ForCausalLM

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.positions,
        # With the usual 0.02 a random model repeats one token whatever it reads, and equal outputs would prove nothing.
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    torch.manual_seed(SEED)
    model: LlamaForCausalLM | Olmo3ForCausalLM
    if shape.window:
        kinds = ["sliding_attention"] * (shape.layers - 1) + ["full_attention"]
        model = Olmo3ForCausalLM(Olmo3Config(**common, sliding_window=shape.window, layer_types=kinds))
    else:
        model = LlamaForCausalLM(LlamaConfig(**common, head_dim=shape.head_dim))
    model.save_pretrained(directory)
    return directory
