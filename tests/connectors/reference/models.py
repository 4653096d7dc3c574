"""Tiny random-weight models whose greedy answers differ from prompt to prompt, and what plain transformers answers."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import torch
import transformers

VOCABULARY = 257
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": None,  # answers are as long as asked for
    "attn_implementation": "sdpa",
}


def _seeded(make: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        # Twice the bits: no rounding comes near to deciding a token.
        return make().double().eval()


@functools.cache
def llama() -> Any:
    return _seeded(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SHAPE)))


@functools.cache
def qwen_with_windows(window: int) -> Any:
    """Layers 0 and 2 attend fully, layer 1 to the last ``window`` tokens."""
    config = transformers.Qwen2Config(
        **_SHAPE,
        use_sliding_window=True,
        sliding_window=window,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    )
    return _seeded(lambda: transformers.Qwen2ForCausalLM(config))


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def generate(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy, by transformers alone."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()
