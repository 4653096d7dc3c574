"""Small transformers models with random weights from a fixed seed, prompts, and configurations of tiers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tiering import TieringConfig

TOKENS = 16
"""Tokens a block."""
VOCABULARY = 512
PAD = 0
NEW = 12
"""Tokens generated in a call."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": None, "bos_token_id": 1, "initializer_range": 0.15,
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, **_COMMON,
}  # fmt: skip


def model(name: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model in eval mode. Equal arguments give equal weights, in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _MAKERS[name]().to(dtype).eval()


_MAKERS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **_LLAMA)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=96, n_layer=3, n_head=4, **_COMMON)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(num_key_value_heads=1, **_LLAMA)),
    # Keys and values of different sizes.
    "deepseek": lambda: transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            num_key_value_heads=4, moe_intermediate_size=64, n_routed_experts=8, n_group=2, topk_group=1,
            num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16,
            qk_nope_head_dim=16, v_head_dim=24, **_LLAMA,
        )
    ),
    "sliding": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(num_key_value_heads=2, **_LLAMA)),
    "recurrent": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(hidden_size=64, num_hidden_layers=2, **_COMMON)
    ),
    "encoder-decoder": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=32, num_layers=1, num_heads=2, d_kv=16, d_ff=32)
    ),
    "dynamic rope": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, **_LLAMA)
    ),
}  # fmt: skip


def prompts(lengths: Sequence[int], *, head: int = 0, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts whose first ``head`` tokens are the same, padded on the left: ids and mask."""
    random = torch.Generator().manual_seed(seed)
    shared = torch.randint(2, VOCABULARY, (head,), generator=random)
    ids = torch.full((len(lengths), max(lengths)), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        own = torch.randint(2, VOCABULARY, (length - head,), generator=random)
        ids[row, -length:] = torch.cat([shared, own])
        mask[row, -length:] = 1
    return ids, mask


def config(*tiers: Any, capacity: str | int = "16MiB", **sections: Any) -> TieringConfig:
    return TieringConfig.from_dict(
        {"primary": {"capacity": capacity, "store_reserve": "0%"}, "tiers": list(tiers), **sections}
    )


def nvme(path: Path) -> dict[str, Any]:
    return {"type": "nvme", "path": str(path), "capacity": "64MiB", "deadline": "20s"}


def cache_name() -> str:
    """What this release of transformers calls the argument for the KV cache."""
    parameters = inspect.signature(transformers.GenerationMixin.prepare_inputs_for_generation).parameters
    return "cache" if "cache" in parameters else "past_key_values"
