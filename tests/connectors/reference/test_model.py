"""The engine on a real model, without a connector: its tokens are those of plain ``generate``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.connectors.reference.models import generate, llama, prompts, qwen_with_windows
from tiering import ShapeError, block_keys
from tiering.connectors.reference import ModelRunner, ReferenceEngine
from tiering.errors import ConfigError

TOKENS = 8


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def engine_of(model: Any, num_gpu_blocks: int = 64, ranks: int = 1, **options: Any) -> ReferenceEngine:
    runner = ModelRunner(model, name="tiny", num_gpu_blocks=num_gpu_blocks, tokens_per_block=TOKENS, ranks=ranks)
    return ReferenceEngine(runner, **options)


def test_mixed_prompts_get_the_tokens_of_generate() -> None:
    engine = engine_of(llama())
    asked = [engine.add_request(str(n), prompt, max_tokens=6) for n, prompt in enumerate(prompts(1, 7, 8, 9, 30, 61))]
    engine.run()
    for request in asked:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert request.output_ids == generate(llama(), prompt, 6)
        assert request.record.computed_tokens == len(prompt) + 5
        assert request.record.ttft_s is not None
        assert request.record.preemptions == 0


def test_a_prompt_longer_than_a_step_is_computed_in_several() -> None:
    engine = engine_of(llama(), max_num_batched_tokens=20, max_num_seqs=4)
    (prompt,) = prompts(70)
    request = engine.add_request("long", prompt, max_tokens=3)
    steps = []
    while engine.has_work:
        steps.append(engine.step().scheduled_tokens)
    assert steps == [16, 16, 16, 16, 6, 1, 1]
    assert request.output_ids == generate(llama(), prompt, 3)


def test_a_second_prompt_reuses_the_blocks_of_the_first() -> None:
    engine = engine_of(llama())
    (prefix, tail) = prompts(29, 10)
    engine.add_request("first", prefix, max_tokens=4)
    engine.run()
    second = engine.add_request("second", prefix + tail, max_tokens=4)
    engine.run()
    assert second.record.engine_tokens == 24
    assert second.record.computed_tokens == 39 - 24 + 3
    assert second.output_ids == generate(llama(), prefix + tail, 4)


def test_an_answer_is_reused_by_the_next_turn() -> None:
    engine = engine_of(llama())
    (prompt, message) = prompts(20, 5)
    first = engine.add_request("first", prompt, max_tokens=13)
    engine.run()
    turn = [*prompt, *first.output_ids, *message]
    second = engine.add_request("second", turn, max_tokens=4)
    engine.run()
    assert second.record.engine_tokens == 32  # 20 + 13 tokens, of which the last was never computed
    assert second.output_ids == generate(llama(), turn, 4)


def test_another_salt_shares_nothing() -> None:
    engine = engine_of(llama())
    (prompt,) = prompts(40)
    engine.add_request("ours", prompt, max_tokens=1, salt=b"a")
    engine.run()
    other = engine.add_request("theirs", prompt, max_tokens=1, salt=b"b")
    engine.run()
    assert other.record.engine_tokens == 0


def test_with_few_blocks_requests_are_preempted_and_answer_the_same() -> None:
    engine = engine_of(llama(), num_gpu_blocks=14, max_num_seqs=6)
    asked = [engine.add_request(str(n), prompt, max_tokens=24) for n, prompt in enumerate(prompts(17, 25, 33, 20, 28))]
    engine.run()
    assert sum(request.record.preemptions for request in asked) > 0
    for request in asked:
        assert request.output_ids == generate(llama(), request.token_ids[: request.num_prompt_tokens], 24)
    assert engine.pool.free_blocks == 13


def test_reused_blocks_give_the_same_bits() -> None:
    """Logits of a prompt computed in one go, and of one whose prefix was in the cache."""
    (prompt,) = prompts(45)
    logits = []
    for prefix_tokens in (0, 16, 40):
        engine = engine_of(llama())
        if prefix_tokens:
            engine.add_request("prefix", prompt[:prefix_tokens], max_tokens=1)
            engine.run()
        request = engine.add_request("whole", prompt, max_tokens=5, keep_logits=True)
        engine.run()
        assert request.record.engine_tokens == prefix_tokens
        logits.append(torch.stack(request.record.logits))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_logits_are_kept_on_demand_alone_and_are_those_of_the_model() -> None:
    engine = engine_of(llama())
    (prompt,) = prompts(21)
    plain = engine.add_request("plain", prompt, max_tokens=2)
    kept = engine.add_request("kept", prompt, max_tokens=2, keep_logits=True)
    engine.run()
    assert plain.record.logits == []
    with torch.inference_mode():
        expected = llama()(torch.tensor([prompt + kept.output_ids[:1]])).logits[0, -2:]
    torch.testing.assert_close(torch.stack(kept.record.logits), expected)


@pytest.mark.parametrize("num_gpu_blocks", [100, 26])
def test_layers_with_a_window_give_back_blocks_and_answer_the_same(num_gpu_blocks: int) -> None:
    model = qwen_with_windows(12)
    engine = engine_of(model, num_gpu_blocks=num_gpu_blocks, max_num_seqs=4, max_num_batched_tokens=24)
    assert [group.kind for group in engine.scheduler.tables.groups] == ["full", "sliding_window(12)"]
    shared, *tails = prompts(40, 3, 20, 11, 6)
    asked = [engine.add_request(str(n), shared + tail, max_tokens=12) for n, tail in enumerate(tails)]
    engine.run()
    later = engine.add_request("later", shared + tails[0], max_tokens=12)
    engine.run()
    for request in [*asked, later]:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert request.output_ids == generate(model, prompt, 12)
    assert engine.pool.free_blocks == num_gpu_blocks - 1


def test_two_ranks_hold_half_the_heads_each() -> None:
    (prompt,) = prompts(50)
    runs = []
    for ranks in (1, 2):
        engine = engine_of(llama(), ranks=ranks)
        runs.append(engine.add_request("a", prompt, max_tokens=8, keep_logits=True))
        engine.run()
    assert runs[1].output_ids == generate(llama(), prompt, 8)
    assert torch.equal(torch.stack(runs[0].record.logits), torch.stack(runs[1].record.logits))


def test_a_page_holds_the_keys_and_values_of_its_tokens() -> None:
    """What the worker half registers: uint8 pages of one layer, in (keys|values, heads, tokens, head_dim)."""
    runner = ModelRunner(llama(), name="tiny", num_gpu_blocks=8, tokens_per_block=TOKENS, ranks=2)
    engine = ReferenceEngine(runner)
    (prompt,) = prompts(16)
    request = engine.add_request("a", prompt, max_tokens=2)
    engine.step()
    block = request.blocks[0][1]
    with torch.inference_mode():
        cache = llama()(torch.tensor([prompt])).past_key_values
    for rank in range(2):
        for layer, pages in enumerate(runner.memory.device_blocks(rank).groups[0]):
            assert pages.shape == (8, 2 * 1 * TOKENS * 16 * 8)
            keys, values = pages[block].clone().view(torch.float64).view(2, 1, TOKENS, 16)
            torch.testing.assert_close(keys[0], cache.layers[layer].keys[0, rank, 8:])
            torch.testing.assert_close(values[0], cache.layers[layer].values[0, rank, 8:])


def test_the_hashes_are_the_layouts_block_keys() -> None:
    runner = ModelRunner(llama(), name="tiny", revision="7", num_gpu_blocks=8, tokens_per_block=TOKENS)
    engine = ReferenceEngine(runner)
    (prompt,) = prompts(27)
    request = engine.add_request("a", prompt, max_tokens=6, salt=b"s", lora=b"l")
    engine.run()
    keys = block_keys(request.token_ids, runner.layout, salt=b"s", lora=b"l")
    assert [block_hash + bytes(4) for block_hash in request.block_hashes] == keys
    assert len(keys) == 4


def test_what_cannot_be_served_is_refused_with_the_remedy() -> None:
    engine = engine_of(llama(), num_gpu_blocks=4)
    with pytest.raises(ShapeError, match="raise num_gpu_blocks"):
        engine.add_request("a", [1] * 25, max_tokens=1)
    with pytest.raises(ShapeError, match="at least one prompt token"):
        engine.add_request("a", [], max_tokens=1)
    engine.add_request("a", [1] * 24, max_tokens=1)
    with pytest.raises(ValueError, match="exists already"):
        engine.add_request("a", [1], max_tokens=1)
    with pytest.raises(ConfigError, match="do not divide into ranks=3"):
        engine_of(llama(), ranks=3)
    with pytest.raises(ShapeError, match="need at least 23"):
        engine_of(llama(), max_num_seqs=16, max_num_batched_tokens=22)
    with pytest.raises(ShapeError, match="block 0 is the null block"):
        engine_of(llama(), num_gpu_blocks=1)
