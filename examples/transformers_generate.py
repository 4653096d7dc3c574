"""A prompt of 2,048 tokens, answered twice by a transformers model: ``python examples/transformers_generate.py [CONFIG]``.

Run it again from the same directory: now the first answer is quick too, because the blocks are still on the disk.
The model is small and has random weights, so that nothing is downloaded; any decoder-only model is used the same way.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tiering.connectors.transformers import TieredPrefixCache

PROMPT_TOKENS = 2048
CONFIG = Path(__file__).parent.parent / "configs" / "local.yaml"  # keeps blocks in ./kv-cache


def main(config: str | Path = CONFIG) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=4096,
            initializer_range=0.1,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()
    prompt = torch.randint(1, 4096, (1, PROMPT_TOKENS))

    begin = time.perf_counter()
    plain = model.generate(prompt, max_new_tokens=8, do_sample=False)
    print(f"the model alone   {time.perf_counter() - begin:6.3f} s")

    with TieredPrefixCache(model, config) as cache:
        for name in ("with tiers", "with tiers, again"):
            begin = time.perf_counter()
            out = cache.generate(prompt, max_new_tokens=8, do_sample=False)
            seconds = time.perf_counter() - begin
            assert cache.last is not None
            reused = ", ".join(f"{tokens} from {tier}" for tier, tokens in cache.last.reused_tokens.items())
            print(f"{name:17} {seconds:6.3f} s   {cache.last.computed_tokens} tokens computed, {reused or '0'} reused")
            assert torch.equal(out, plain)
    print("all answers are the same, token for token")


if __name__ == "__main__":
    main(*sys.argv[1:])
