"""The verdict: each claim that does not hold is told, and no other. Figures are worked out by hand."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from tiering.cli.demo import DemoOptions, DemoResult, Scale, TrafficScale, render
from tiering.cli.demo.block import Again, BlockCase
from tiering.cli.demo.checks import Control, largest_difference
from tiering.cli.demo.phase import PhaseResult
from tiering.cli.demo.record import TurnRecord
from tiering.cli.demo.restoring import Pair, RestoreResult
from tiering.cli.demo.result import PlainAnswer, spread
from tiering.cli.demo.traffic import TrafficRun, Turn

TIER_OF = {"in_memory": None, "recompute": None, "primary": "primary", "nvme": "nvme", "restart": "nvme"}
TTFT_S = {"in_memory": 0.02, "recompute": 1.0, "primary": 0.05, "nvme": 0.1, "restart": 0.2}
LOGITS = torch.tensor([[0.0, 3.0, 1.0], [2.5, 0.0, 1.0]])  # answers 1, 0; gaps 2.0 and 1.5


def turn(phase: str, conversation: int, number: int) -> TurnRecord:
    tier = TIER_OF[phase]
    saved = {tier: 64} if tier and number else {}
    device = 64 if phase == "in_memory" and number else 0
    return TurnRecord(
        conversation=conversation,
        turn=number,
        prompt_tokens=100,
        device_tokens=device,
        tier_tokens=saved,
        computed_tokens=100 - device - sum(saved.values()),
        # Turn 0 is not measured; of the measured ones, conversation 1 takes twice as long as conversation 0.
        ttft_s=TTFT_S[phase] * (1 + conversation) if number else 9.0,
        load_s=0.01,
        output_ids=(1, 0),
        logits=LOGITS.clone(),
    )


def phase_of(name: str) -> PhaseResult:
    turns = tuple(turn(name, conversation, number) for number in (0, 1) for conversation in (0, 1))
    return PhaseResult(name, turns, open_s=0.0, stored_blocks=0, refused_blocks=0)


def traffic_run(policy: str, *, restore: bool) -> TrafficRun:
    """Two conversations of three turns; of the second and third, 40 tokens are found without re-store, 72 with it."""
    turns = tuple(
        Turn(
            conversation=conversation,
            turn=number,
            prompt_tokens=100,
            device_tokens=8 if number else 0,
            tier_tokens=(18 if restore else 10) if number else 0,
            ttft_s=(0.01 if restore else 0.03) if number else 9.0,
            output_ids=(conversation, number),
        )
        for number in range(3)
        for conversation in range(2)
    )
    return TrafficRun(
        policy=policy,
        restore=restore,
        turns=turns,
        restored_blocks=4 if restore else 0,
        restore_bytes=64 if restore else 0,
        restore_skipped={},
        evicted_blocks=9,
        holes=(0, 0, 1, 2, 0, 3),
        tokens_per_block=16,
        steps=20,
        seconds=1.0,
    )


def restoring() -> RestoreResult:
    block = BlockCase(
        tokens_per_block=16,
        block_bytes=8192,
        off=Again(32, 0.2, (1, 2)),
        on=Again(160, 0.02, (1, 2)),
        expected_ids=(1, 2),
        copy_s=(0.001, 0.002, 0.009),
        prefill_s=(0.07, 0.09),
    )
    pair = Pair(traffic_run("lru", restore=False), traffic_run("lru", restore=True))
    return RestoreResult(TrafficScale(), (pair,), pair.off.outputs, block)


@pytest.fixture
def good(tiny: Scale) -> DemoResult:
    return DemoResult(
        options=DemoOptions(conversations=2, turns=2, scale=tiny),
        phases={name: phase_of(name) for name in TIER_OF},
        plain=(PlainAnswer(0, (1, 0), 1.0, 0.0125), PlainAnswer(1, (1, 0), 1.0, 0.0)),
        control=Control((1, 0), (1, 0), (1, 2), loaded_tokens=64, logit_change=1.0),
        restoring=restoring(),
        machine={"cpus": 2, "filesystem": "ext4"},
        path=None,
        seconds=1.0,
    )


def with_turn(result: DemoResult, phase: str, **changes: object) -> DemoResult:
    """The same result, but for the last turn of ``phase``."""
    *first, last = result.phases[phase].turns
    changed = replace(result.phases[phase], turns=(*first, replace(last, **changes)))  # type: ignore[arg-type]
    return replace(result, phases={**result.phases, phase: changed})


def test_figures_are_those_of_the_measured_turns(good: DemoResult) -> None:
    assert good.failures == []
    assert good.ttft_median_ms("recompute") == pytest.approx(1500)
    assert good.speedup("primary") == pytest.approx(20)
    assert good.speedup("nvme") == pytest.approx(10)
    assert good.prefix_tokens == 64
    assert good.smallest_top2_gap == pytest.approx(1.5)
    assert good.gap_to_difference == pytest.approx(120)
    assert good.to_json()["tokens_saved"] == 3 * 2 * 64
    assert good.to_json()["hit_tokens_by_tier"] == {"primary": 128, "nvme": 256}


@pytest.mark.parametrize("phase", ["recompute", "primary", "nvme", "restart"])
def test_another_token_in_one_phase_fails(good: DemoResult, phase: str) -> None:
    bad = with_turn(good, phase, output_ids=(1, 2))
    assert "the phases gave different token ids" in bad.failures
    assert not bad.outputs_identical


def test_another_token_of_the_plain_forward_fails(good: DemoResult) -> None:
    bad = replace(good, plain=(replace(good.plain[0], output_ids=(2, 0)), good.plain[1]))
    assert bad.failures == ["the phases gave different token ids"]


def test_one_bit_in_one_logit_fails(good: DemoResult) -> None:
    logits = LOGITS.clone()
    logits[1, 2] = torch.nextafter(logits[1, 2], torch.tensor(2.0))
    assert with_turn(good, "restart", logits=logits).failures == ["logits are not bit-equal to the in-memory run"]


def test_a_control_without_effect_fails(good: DemoResult) -> None:
    bad = replace(good, control=replace(good.control, altered_ids=(1, 0)))
    assert bad.failures == ["the altered block did not change the output"]


def test_a_control_whose_honest_blocks_change_the_output_fails(good: DemoResult) -> None:
    bad = replace(good, control=replace(good.control, honest_ids=(0, 0)))
    assert bad.failures == ["the control's honest blocks changed the output"]


def test_a_gap_too_close_to_the_difference_fails(good: DemoResult) -> None:
    bad = replace(good, plain=(replace(good.plain[0], logit_difference=0.0151), good.plain[1]))
    assert len(bad.failures) == 1
    assert "another --seed" in bad.failures[0]


def test_a_tier_that_served_nothing_fails(good: DemoResult) -> None:
    empty = replace(
        good.phases["restart"], turns=tuple(replace(t, tier_tokens={}) for t in good.phases["restart"].turns)
    )
    bad = replace(good, phases={**good.phases, "restart": empty})
    assert bad.failures == ["phase 'restart' loaded nothing from tier 'nvme'"]


def with_block(result: DemoResult, **changes: object) -> DemoResult:
    block = replace(result.restoring.block, **changes)  # type: ignore[arg-type]
    return replace(result, restoring=replace(result.restoring, block=block))


def with_traffic(result: DemoResult, **changes: object) -> DemoResult:
    """The same result, but for the run with re-store."""
    (pair,) = result.restoring.pairs
    changed = replace(pair, on=replace(pair.on, **changes))  # type: ignore[arg-type]
    return replace(result, restoring=replace(result.restoring, pairs=(changed,)))


def test_figures_of_re_store(good: DemoResult) -> None:
    (pair,) = good.restoring.pairs
    assert (pair.off.hit_tokens, pair.on.hit_tokens) == (40, 72)
    assert pair.on.token_hit_rate == pytest.approx((72 + 32) / 400)
    assert pair.on.ttft_median_ms == pytest.approx(10)
    assert pair.on.holes_mean == 1
    assert good.restoring.block.gain_to_cost == pytest.approx(0.08 / 0.002)
    # 32 tokens more, two blocks, for four that were re-stored.
    assert pair.hit_again == pytest.approx(0.5)
    assert good.restoring.expected_gain_to_cost(pair) == pytest.approx(20)


def test_another_token_of_the_re_store_phase_fails(good: DemoResult) -> None:
    first, *others = good.restoring.pairs[0].on.turns
    for bad in (
        with_traffic(good, turns=(replace(first, output_ids=(7, 7)), *others)),
        with_block(good, on=Again(160, 0.02, (1, 3))),
    ):
        assert bad.failures == ["re-store or its absence changed token ids"]
        assert not bad.outputs_identical


def test_a_block_that_stays_away_fails(good: DemoResult) -> None:
    bad = with_block(good, on=Again(144, 0.02, (1, 2)))
    assert bad.failures == ["the evicted block did not come back, or the prefix was not cut without it"]


def test_traffic_without_a_re_store_fails_and_has_no_ratio(good: DemoResult) -> None:
    bad = with_traffic(good, restored_blocks=0)
    assert bad.failures == ["policy 'lru': nothing was re-stored though switched on"]
    assert bad.to_json()["restore"]["expected_gain_to_cost"] == {"lru": None}


def test_render_names_what_failed(good: DemoResult) -> None:
    console = Console(width=160, file=io.StringIO(), record=True)
    render(with_turn(good, "nvme", output_ids=(1, 2)), console)
    text = console.export_text()
    assert "FAILED: the phases gave different token ids" in text
    assert "OK:" not in text


def test_logits_behind_the_first_other_token_do_not_count() -> None:
    other = torch.tensor([[0.0, 3.0, 1.25], [2.5, 4.0, 1.0], [0.0, 0.0, 99.0]])
    same_length = torch.cat([LOGITS, torch.tensor([[1.0, 0.0, 0.0]])])
    assert largest_difference(other, same_length) == pytest.approx(4.0)


def test_a_record_survives_the_way_between_processes_bit_by_bit() -> None:
    logits = torch.tensor([[0.1, -0.0, 1e-42], [float("inf"), 3.4e38, -7.0]])
    record = replace(turn("nvme", 0, 1), logits=logits)
    back = TurnRecord.from_json(record.to_json())
    assert back.logits.view(torch.int32).tolist() == logits.view(torch.int32).tolist()
    assert replace(back, logits=logits) == record


def test_spread_of_five_values() -> None:
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == {"min": 1.0, "lower_quartile": 2.0, "upper_quartile": 4.0, "max": 5.0}
