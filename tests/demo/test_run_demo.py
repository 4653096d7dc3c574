"""The whole demo, small: two conversations, four phases, one of them in a new process, the control, and re-store."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tiering.cli.demo import DemoOptions, DemoResult, ModelSpec, Scale, TrafficScale, render, run_demo

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
TIERED = ("primary", "nvme", "restart")


@pytest.fixture(scope="module")
def plot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plot") / "demo.png"


@pytest.fixture(scope="module")
def reported() -> list[tuple[str, int, int]]:
    return []


@pytest.fixture(scope="module")
def result(
    tiny: Scale,
    tiny_traffic: TrafficScale,
    tmp_path_factory: pytest.TempPathFactory,
    plot: Path,
    reported: list[tuple[str, int, int]],
) -> DemoResult:
    options = DemoOptions(
        path=tmp_path_factory.mktemp("tiers"), plot=plot, conversations=2, turns=2, scale=tiny, traffic=tiny_traffic
    )
    return run_demo(options, progress=lambda *step: reported.append(step))


def plain_answer(spec: ModelSpec, seed: int, prompt: list[int], answer_tokens: int) -> list[int]:
    """Greedy decoding by transformers alone: every token from a forward over all before it, no cache at all."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        initializer_range=spec.initializer_range,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(answer_tokens):
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_the_demo_holds_all_its_claims(result: DemoResult) -> None:
    assert result.failures == []
    assert result.ok


def test_every_phase_answers_as_transformers_alone(result: DemoResult, tiny: Scale) -> None:
    from tiering.cli.demo.workload import Workload

    workload = Workload(tiny, conversations=2, turns=2, seed=0)
    for conversation in (0, 1):
        answers: list[list[int]] = []
        for turn in (0, 1):
            expected = plain_answer(tiny.model, 0, workload.prompt(conversation, answers), tiny.answer_tokens)
            for phase in result.phases.values():
                ours = [r for r in phase.turns if (r.conversation, r.turn) == (conversation, turn)]
                assert [list(r.output_ids) for r in ours] == [expected], phase.name
            answers.append(expected)


def test_each_prompt_token_is_computed_or_saved_once(result: DemoResult) -> None:
    for phase in result.phases.values():
        for turn in phase.turns:
            # 48 + 96 opening tokens; 10 + 8 for each earlier turn; 10 of this message.
            assert turn.prompt_tokens == 144 + 18 * turn.turn + 10
            assert turn.computed_tokens + turn.device_tokens + sum(turn.tier_tokens.values()) == turn.prompt_tokens


def test_a_measured_turn_computes_only_what_no_block_holds(result: DemoResult) -> None:
    """After turn 0 a conversation has 144 + 10 + 7 tokens with KV: 10 blocks of 16. Turn 1 has 172 tokens."""
    for name in TIERED:
        assert [t.computed_tokens for t in result.phases[name].turns if t.turn == 1] == [172 - 160] * 2
    assert result.prefix_tokens == 160


def test_without_tiers_the_lost_blocks_are_computed_again(result: DemoResult) -> None:
    """Only the shared system prompt, 3 blocks, outlives the other conversation in the device pool for certain."""
    pool_blocks = -(-(144 + 2 * 18) // 16) + 2
    for turn in result.phases["recompute"].turns:
        assert turn.tier_tokens == {}
        if turn.turn == 1:
            # The other conversation held 10 of the pool's 14 rows.
            assert 3 <= turn.device_tokens // 16 <= 3 + pool_blocks - 10
    # On the roomy pool nothing but the new tokens is computed.
    assert [t.device_tokens for t in result.phases["in_memory"].turns if t.turn == 1] == [160, 160]


def test_hits_are_told_by_tier(result: DemoResult) -> None:
    assert set(result.hit_tokens_by_tier("primary")) == {"primary"}
    assert result.hit_tokens_by_tier("nvme")["nvme"] > 0
    assert result.hit_tokens_by_tier("restart")["nvme"] > 0
    assert result.phases["restart"].turns[0].tier_tokens == {"nvme": 144}


def test_an_altered_block_changes_the_answer_and_an_honest_one_does_not(result: DemoResult) -> None:
    assert result.control.honest_ids == result.control.expected_ids
    assert result.control.altered_ids != result.control.expected_ids
    assert result.control.loaded_tokens == 160


def test_the_ten_blocks_of_the_case_come_back(result: DemoResult) -> None:
    """The third of ten blocks was evicted while the request ran: two are found without re-store, ten with it."""
    block = result.restoring.block
    assert block.off.hit_tokens == 2 * 16
    assert block.on.hit_tokens == 10 * 16
    assert len(block.copy_s) == 8
    assert 0 < block.cost_s < block.off.ttft_s


def test_the_traffic_answers_as_transformers_alone(result: DemoResult, tiny_traffic: TrafficScale) -> None:
    """The first two turns of one conversation, without any cache; the others by the demo's own comparison."""
    from tiering.cli.demo.traffic import Script

    script = Script(tiny_traffic, 0)
    said = script.opening(4)
    for turn in (0, 1):
        said = said + script.message(4, turn)
        expected = plain_answer(tiny_traffic.model, 0, said, tiny_traffic.answer_tokens)
        for pair in result.restoring.pairs:
            assert list(pair.off.outputs[4, turn]) == list(pair.on.outputs[4, turn]) == expected
        said = said + expected


def test_every_turn_of_the_traffic_is_served_with_and_without_re_store(result: DemoResult) -> None:
    for pair in result.restoring.pairs:
        for run in (pair.off, pair.on):
            assert sorted(run.outputs) == [(conversation, turn) for conversation in range(6) for turn in range(3)]
            assert run.evicted_blocks > 0
            assert len(run.holes) == 18
        assert pair.off.restored_blocks == 0 < pair.on.restored_blocks
    assert [pair.on.policy for pair in result.restoring.pairs] == ["lru", "prefix"]


def test_the_json_object(result: DemoResult, plot: Path) -> None:
    report = json.loads(json.dumps(result.to_json()))
    assert report["outputs_identical"] is True
    assert report["control_changed_outputs"] is True
    assert report["bit_equal_same_chunks"] is True
    assert set(report["ttft_ms"]) == {"recompute", "primary", "nvme", "restart"}
    assert report["speedup_nvme"] == pytest.approx(report["ttft_ms"]["recompute"] / report["ttft_ms"]["nvme"])
    assert report["smallest_top2_gap"] >= 100 * report["largest_logit_difference"]
    saved = sum(row["phases"][name]["hit_tokens_by_tier"].get(tier, 0)
                for row in report["turns"] for name in TIERED for tier in ("primary", "nvme"))  # fmt: skip
    assert report["tokens_saved"] == saved == sum(report["hit_tokens_by_tier"].values())
    assert len(report["turns"]) == 4
    for phase in report["phases"].values():
        assert phase["computed_tokens"] + phase["device_tokens"] + phase["saved_tokens"] == phase["prompt_tokens"]
        assert phase["refused_blocks"] == 0
    restore = report["restore"]
    assert restore["outputs_identical"] is True
    assert [(run["policy"], run["restore"]) for run in restore["traffic"]] == [
        ("lru", False), ("lru", True), ("prefix", False), ("prefix", True)
    ]  # fmt: skip
    block = restore["block"]
    assert block["gain_to_cost"] == pytest.approx(block["hit_gain_ms"] / block["restore_cost_ms"])
    assert (block["gain_to_cost_of_a_gpu"], block["expected_gain_to_cost_of_a_gpu"]) == (50, 25)
    assert report["plot"] == str(plot)


def test_the_plot_is_a_png(result: DemoResult, plot: Path) -> None:
    assert plot.read_bytes().startswith(PNG_SIGNATURE)


def test_a_given_path_keeps_the_files(result: DemoResult) -> None:
    assert result.path is not None
    assert any(file.is_file() for file in Path(result.path).rglob("*"))


def test_the_progress_of_every_phase_reaches_its_end(result: DemoResult, reported: list[tuple[str, int, int]]) -> None:
    last = {phase: (done, total) for phase, done, total in reported}
    assert set(result.phases) <= set(last)
    assert all(done == total for done, total in last.values())


def test_render_tells_the_verdict(result: DemoResult) -> None:
    console = Console(width=160, file=io.StringIO(), record=True)
    render(result, console)
    text = console.export_text()
    assert "recompute" in text
    assert "identical token for token" in text
    assert "Re-store: 6 live conversations of 3 turns" in text
    assert "estimate for a serving GPU: 50x" in text
    assert "OK: same answers" in text
