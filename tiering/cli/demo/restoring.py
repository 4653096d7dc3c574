"""The re-store phase: the traffic with it and without, and one block's cost and gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiering.cli.demo.block import BlockCase, measure_block
from tiering.cli.demo.model import DemoModel
from tiering.cli.demo.options import Progress, TrafficScale
from tiering.cli.demo.phase import Setup
from tiering.cli.demo.traffic import Outputs, TrafficRun, expected_outputs, run_pair

POLICIES = ("lru", "prefix")
GPU_GAIN_TO_COST = 50.0
"""On a serving GPU: some 25 ms of prefill for a block of 256 tokens, against 0.5 ms of DMA for its 2 MB."""
HIT_AGAIN = 0.5
"""The share of re-stored blocks that conversations use again, in that estimate."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The same traffic without re-store and with it."""

    off: TrafficRun
    on: TrafficRun

    @property
    def hit_again(self) -> float | None:
        """Blocks regained for each block re-stored; None if none was. Above 1 where one brings back those behind it too."""
        if not self.on.restored_blocks:
            return None
        tokens = self.on.hit_tokens - self.off.hit_tokens
        return tokens / self.on.tokens_per_block / self.on.restored_blocks


@dataclass(frozen=True, slots=True)
class RestoreResult:
    scale: TrafficScale
    pairs: tuple[Pair, ...]
    expected: Outputs
    """What each turn answers without tiers."""
    block: BlockCase

    @property
    def outputs_identical(self) -> bool:
        runs = [run for pair in self.pairs for run in (pair.off, pair.on)]
        return self.block.outputs_identical and all(run.outputs == self.expected for run in runs)

    def expected_gain_to_cost(self, pair: Pair) -> float | None:
        """Prefill time regained in the traffic for the time that copies took, by the measured cost and gain of a block."""
        return None if pair.hit_again is None else self.block.gain_to_cost * pair.hit_again

    @property
    def claims(self) -> list[tuple[bool, str]]:
        return [
            (self.outputs_identical, "re-store or its absence changed token ids"),
            (self.block.is_regained, "the evicted block did not come back, or the prefix was not cut without it"),
            *(
                (pair.on.restored_blocks > 0, f"policy {pair.on.policy!r}: nothing was re-stored though switched on")
                for pair in self.pairs
            ),
            *(
                (not pair.off.restored_blocks, f"policy {pair.off.policy!r}: blocks were re-stored though switched off")
                for pair in self.pairs
            ),
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "outputs_identical": self.outputs_identical,
            "conversations": self.scale.conversations,
            "turns_each": self.scale.turns,
            "tokens_per_block": self.scale.tokens_per_block,
            "primary_blocks": self.scale.primary_blocks,
            "device_blocks": self.scale.device_blocks,
            "traffic": [run.to_json() for pair in self.pairs for run in (pair.off, pair.on)],
            "block": {
                **self.block.to_json(),
                "gain_to_cost_of_a_gpu": GPU_GAIN_TO_COST,
                "expected_gain_to_cost_of_a_gpu": GPU_GAIN_TO_COST * HIT_AGAIN,
            },
            "blocks_hit_again_per_restored": {pair.on.policy: pair.hit_again for pair in self.pairs},
            "expected_gain_to_cost": {pair.on.policy: self.expected_gain_to_cost(pair) for pair in self.pairs},
        }


def run_restoring(setup: Setup, model: DemoModel, scale: TrafficScale, progress: Progress) -> RestoreResult:
    """``model``, the one of the other phases, tells what a block costs; a smaller one carries the many turns."""
    block = measure_block(setup, model, progress)
    small = DemoModel(scale.model, seed=setup.seed, positions_max=scale.sequence_tokens_max)
    expected = expected_outputs(scale, small, setup.seed, progress)
    pairs = tuple(Pair(*run_pair(scale, small, setup.seed, progress, policy)) for policy in POLICIES)
    return RestoreResult(scale, pairs, expected, block)
