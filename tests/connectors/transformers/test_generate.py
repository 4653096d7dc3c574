"""The outputs of ``generate`` are those of the model alone, whatever was reused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.connectors.transformers.models import NEW, TOKENS, cache_name, config, model, nvme, prompts
from tiering import block_keys
from tiering.connectors.transformers import CallReport, TieredPrefixCache

GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
DETAILS: dict[str, Any] = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}


def last(cache: TieredPrefixCache) -> CallReport:
    assert cache.last is not None
    return cache.last


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "deepseek"])
def test_a_padded_batch_of_different_lengths_gives_the_same_tokens(name: str) -> None:
    """Cold, again, and as the next turn of three conversations; columns known for all prompts are not computed."""
    lm = model(name)
    lengths = (100, 83, 120)
    ids, mask = prompts(lengths, head=70)
    with TieredPrefixCache(lm, config(), tokens_per_block=TOKENS) as cache:
        plain = lm.generate(ids, attention_mask=mask, **GREEDY)
        assert torch.equal(cache.generate(ids, attention_mask=mask, **GREEDY), plain)
        assert (last(cache).reused_tokens, last(cache).computed_tokens) == ({}, sum(lengths))

        assert torch.equal(cache.generate(ids, attention_mask=mask, **GREEDY), plain)
        # Full blocks before the last token of each: 96, 80 and 112 tokens, so at least 8 columns are left to compute.
        assert (last(cache).reused_tokens, last(cache).computed_tokens) == ({"primary": sum(lengths) - 3 * 8}, 3 * 8)
        assert last(cache).stored_blocks == 0

        turn, turn_mask = prompts((9, 9, 9), seed=2)
        ids, mask = torch.cat([plain, turn], 1), torch.cat([mask, torch.ones(3, NEW, dtype=mask.dtype), turn_mask], 1)
        plain = lm.generate(ids, attention_mask=mask, **GREEDY)
        assert torch.equal(cache.generate(ids, attention_mask=mask, **GREEDY), plain)
        # 111, 94 and 131 tokens have KV (of the last generated one there is none): 96, 80 and 128 in full blocks.
        assert last(cache).computed_tokens == 3 * max(121 - 96, 104 - 80, 141 - 128)
        assert last(cache).prompt_tokens == 121 + 104 + 141


def test_a_prompt_of_another_start_is_not_confused() -> None:
    lm = model()
    ids, _ = prompts((64, 64), head=0)
    other = ids.clone()
    other[:, 0] = 2 + (ids[:, 0] - 1) % 500
    with TieredPrefixCache(lm, config(), tokens_per_block=TOKENS) as cache:
        cache.generate(ids, **GREEDY)
        assert torch.equal(cache.generate(other, **GREEDY), lm.generate(other, **GREEDY))
        assert last(cache).reused_tokens == {}


def test_a_batch_is_cut_to_what_every_prompt_has() -> None:
    lm = model()
    ids, _ = prompts((96, 96, 96), head=32)
    with TieredPrefixCache(lm, config(), tokens_per_block=TOKENS) as cache:
        cache.generate(ids[:1], **GREEDY)
        assert torch.equal(cache.generate(ids, **GREEDY), lm.generate(ids, **GREEDY))
        assert last(cache).reused_tokens == {"primary": 3 * 32}
        fresh, _ = prompts((96,), seed=3)
        mixed = torch.cat([ids, fresh])
        assert torch.equal(cache.generate(mixed, **GREEDY), lm.generate(mixed, **GREEDY))
        assert last(cache).reused_tokens == {}


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 0.7, "top_k": 20},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
        {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ],
    ids=str,
)
def test_other_ways_to_decode(how: dict[str, Any]) -> None:
    lm = model()
    ids, mask = prompts((60, 75), head=40)
    with TieredPrefixCache(lm, config(), tokens_per_block=TOKENS) as cache:
        for expected in (0, 48 + 63):  # the longer prompt's 64 tokens end at column 64, the other's begin at 15
            torch.manual_seed(5)
            plain = lm.generate(ids, attention_mask=mask, max_new_tokens=NEW, **how)
            torch.manual_seed(5)
            assert torch.equal(cache.generate(ids, attention_mask=mask, max_new_tokens=NEW, **how), plain)
            assert sum(last(cache).reused_tokens.values()) == expected


def test_after_its_end_a_row_is_not_stored() -> None:
    """One answer ends early and is padded while the other goes on: the padding is nobody's prefix."""
    lm = model()
    ids, _ = prompts((48, 48))
    plain = lm.generate(ids, max_new_tokens=40, do_sample=False)
    end = int(plain[0, 51])  # generated as the fourth
    assert end not in plain[0, 48:51]
    assert end not in plain[1, 48:]
    with TieredPrefixCache(lm, config(), tokens_per_block=TOKENS) as cache:
        out = cache.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=end)
        assert torch.equal(out, lm.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=end))
        # 48 + 4 tokens are 3 blocks, 48 + 39 are 5.
        assert last(cache).stored_blocks == 3 + 5


def test_decoded_tokens_are_stored_unless_told_otherwise() -> None:
    lm = model()
    ids, _ = prompts((48,))
    for store_decode, blocks in ((True, 5), (False, 3)):  # 48 + 39 tokens have KV
        with TieredPrefixCache(lm, config(), tokens_per_block=TOKENS, store_decode=store_decode) as cache:
            cache.generate(ids, max_new_tokens=40, do_sample=False)
            assert last(cache).stored_blocks == blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logits_are_bit_equal_to_a_prefix_that_never_left_memory(dtype: torch.dtype) -> None:
    """The same chunks, once from our tiers and once from transformers' own cache cut to the same columns."""
    lm = model(dtype=dtype)
    ids, mask = prompts((100, 83, 120), head=70)
    with TieredPrefixCache(lm, config(), tokens_per_block=TOKENS) as cache:
        plain = lm.generate(ids, attention_mask=mask, **DETAILS)
        cold = cache.generate(ids, attention_mask=mask, **DETAILS)
        assert bits(cold) == bits(plain)
        again = cache.generate(ids, attention_mask=mask, **DETAILS)
        kept = getattr(plain, cache_name())
        kept.crop(-(kept.get_seq_length() - (120 - 8)))
        control = lm.generate(ids, attention_mask=mask, **DETAILS, **{cache_name(): kept})
        assert last(cache).computed_tokens == 3 * 8
        assert bits(again) == bits(control)


def bits(out: Any) -> bytes:
    assert len(out.logits) == NEW
    return torch.stack(out.logits).cpu().numpy().tobytes() + out.sequences.cpu().numpy().tobytes()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_greedy_ids_are_those_of_a_full_prefill_with_room_to_spare(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """fp32: the ids agree, and the smallest gap between the first two choices is 100x what the logits differ by."""
    lm = model(name)
    ids, _ = prompts((90,))
    with TieredPrefixCache(lm, config(), tokens_per_block=TOKENS) as cache:
        cache.generate(ids, **GREEDY)
        again = cache.generate(ids, **DETAILS)
        assert last(cache).computed_tokens == 90 - 80
    plain = lm.generate(ids, **DETAILS)
    logits, reference = torch.stack(again.logits), torch.stack(plain.logits)
    difference = float((logits - reference).abs().max())
    first, second = reference.topk(2, dim=-1).values.unbind(-1)
    gap = float((first - second).min())
    with capsys.disabled():
        print(f"\n  {name}: smallest top-2 gap {gap:.3g}, largest difference of logits {difference:.3g}")
    assert torch.equal(again.sequences, plain.sequences)
    assert gap >= 100 * difference


def test_the_bytes_of_a_block_are_keys_then_values_of_all_layers(tmp_path: Path) -> None:
    """Read back through the manager, and compared with transformers' own cache."""
    lm = model()
    ids, _ = prompts((40,))
    plain = lm.generate(ids, **DETAILS)
    layers = getattr(plain, cache_name()).layers
    with TieredPrefixCache(lm, config(nvme(tmp_path)), tokens_per_block=TOKENS) as cache:
        cache.generate(ids, **GREEDY)
        keys = block_keys(ids[0], cache.layout)
        sync = cache.manager.sync
        plan = sync.plan_load(keys)
        rows = [bytes(sync.slot_view(slot)) for slot in plan.slots]
        sync.release(plan.job)
    assert len(rows) == 2
    for index, row in enumerate(rows):
        span = slice(index * TOKENS, (index + 1) * TOKENS)
        parts = [layer.keys[0, :, span] for layer in layers] + [layer.values[0, :, span] for layer in layers]
        assert row == b"".join(part.contiguous().numpy().tobytes() for part in parts)


def test_load_and_store_around_a_model_called_by_hand() -> None:
    lm = model("gpt2")
    ids, mask = prompts((64, 50), head=40)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    whole = lm(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)
    with TieredPrefixCache(lm, config(), tokens_per_block=TOKENS) as cache:
        past, n = cache.load(ids, mask)
        assert (n, past.get_seq_length()) == (0, 0)
        computed = lm(input_ids=ids, attention_mask=mask, position_ids=positions, **{cache_name(): past})
        report = cache.store(ids, past, mask)
        # 64 and 50 tokens are 4 and 3 blocks; the first two are the same.
        assert (report.stored, report.present, report.refused, len(report.outcomes)) == (5, 2, 0, 7)
        assert torch.equal(computed.logits, whole.logits)
        past, n = cache.load(ids, mask)
        assert n == 48
        rest = lm(input_ids=ids[:, n:], attention_mask=mask, position_ids=positions[:, n:], **{cache_name(): past})
        assert torch.equal(rest.logits.argmax(-1), whole.logits[:, n:].argmax(-1))
        assert torch.allclose(rest.logits, whole.logits[:, n:], rtol=1e-4, atol=1e-4)
        other = model("llama")
        with pytest.raises(ValueError, match="past: expected 3 layers"):
            cache.store(ids, getattr(other.generate(ids, attention_mask=mask, **DETAILS), cache_name()), mask)


async def test_it_works_where_an_event_loop_is_running() -> None:
    """As in a notebook."""
    lm = model()
    ids, _ = prompts((64,))
    with TieredPrefixCache(lm, config(), tokens_per_block=TOKENS) as cache:
        plain = lm.generate(ids, **GREEDY)
        for reused in ({}, {"primary": 48}):
            assert torch.equal(cache.generate(ids, **GREEDY), plain)
            assert last(cache).reused_tokens == reused
        assert cache.flush().lost == 0
        cache.reset("weights-2")
        cache.generate(ids, **GREEDY)
        assert last(cache).reused_tokens == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_on_a_gpu(dtype: torch.dtype) -> None:
    """Into CPU memory and back; bit-equal to transformers' own cache cut to the same columns."""
    lm = model(dtype=dtype).cuda()
    ids, mask = (tensor.cuda() for tensor in prompts((100, 83, 120), head=70))
    with TieredPrefixCache(lm, config(), tokens_per_block=TOKENS) as cache:
        plain = lm.generate(ids, attention_mask=mask, **DETAILS)
        cache.generate(ids, attention_mask=mask, **GREEDY)
        again = cache.generate(ids, attention_mask=mask, **DETAILS)
        assert last(cache).computed_tokens == 3 * 8
        kept = getattr(plain, cache_name())
        kept.crop(-(kept.get_seq_length() - (120 - 8)))
        control = lm.generate(ids, attention_mask=mask, **DETAILS, **{cache_name(): kept})
        assert bits(again) == bits(control)
