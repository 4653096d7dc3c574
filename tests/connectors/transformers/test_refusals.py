"""What cannot be served is refused with the remedy, before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.connectors.transformers.models import TOKENS, config, model, prompts
from tiering import ConfigError, ShapeError
from tiering.connectors.transformers import TieredPrefixCache


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("sliding", r"DynamicSlidingWindowLayer.*use a model whose layers all attend"),
        ("recurrent", r"LinearAttentionLayer.*use a model whose layers all attend"),
        ("encoder-decoder", r"only decoder-only models"),
        ("dynamic rope", r"'dynamic' RoPE.*another rope_type"),
    ],
)
def test_models_that_have_no_prefix_to_reuse(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        TieredPrefixCache(model(name), config())


def test_what_is_no_model_and_a_model_in_training() -> None:
    lm = model()
    with pytest.raises(ConfigError, match="pass one such as"):
        TieredPrefixCache(lm.model, config())
    with pytest.raises(ConfigError, match=r"call model\.eval\(\) first"):
        TieredPrefixCache(lm.train(), config())
    lm.eval()
    ids, _ = prompts((40,))
    with TieredPrefixCache(lm, config(), tokens_per_block=TOKENS) as cache:
        lm.train()
        with pytest.raises(ConfigError, match=r"call model\.eval\(\) first"):
            cache.generate(ids)
        lm.eval()
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="autocast"):
            cache.generate(ids)


@pytest.fixture(scope="module")
def cache() -> Any:
    with TieredPrefixCache(model(), config(), tokens_per_block=TOKENS) as opened:
        yield opened


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"cache_implementation": "static"}, "leave it unset"),
        ({"use_cache": False}, "leave it out"),
        ({"past_key_values": object()}, r"call model\.generate"),
        ({"cache": object()}, r"call model\.generate"),
        ({"assistant_model": object()}, "leave it out"),
        ({"prompt_lookup_num_tokens": 3}, "leave it out"),
        ({"custom_generate": lambda: None}, "leave it out"),
        ({"prefill_chunk_size": 16}, "leave it out"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "leave it out"),
        ({"position_ids": torch.arange(40)[None]}, r"covers token ids alone.*call model\.generate"),
        ({"inputs_embeds": torch.zeros(1, 40, 128)}, r"covers token ids alone.*call model\.generate"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be_served(cache: TieredPrefixCache, arguments: dict[str, Any], remedy: str) -> None:
    ids, _ = prompts((40,))
    with pytest.raises(ConfigError, match=remedy) as raised:
        cache.generate(ids, max_new_tokens=2, **arguments)
    assert f"generate({next(iter(arguments))}=" in str(raised.value)


def test_prompts_of_another_form(cache: TieredPrefixCache) -> None:
    ids, mask = prompts((40, 30))
    with pytest.raises(ShapeError, match="2-D integer tensor"):
        cache.generate(ids[0])
    with pytest.raises(ShapeError, match="2-D integer tensor"):
        cache.generate(ids.float())
    with pytest.raises(ShapeError, match="the shape of input_ids"):
        cache.generate(ids, attention_mask=mask[:, 1:])
    with pytest.raises(ShapeError, match="row 1 is not padded on its left"):
        cache.generate(ids, attention_mask=mask.flip(1))
    with pytest.raises(ConfigError, match="no attention_mask; pass the tokenizer's"):
        cache.generate(ids)
