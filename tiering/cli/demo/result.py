"""The figures of a demo, all derived from what its phases recorded."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiering.cli.demo import checks
from tiering.cli.demo.options import DemoOptions
from tiering.cli.demo.phase import PhaseResult
from tiering.cli.demo.record import TurnRecord
from tiering.cli.demo.restoring import RestoreResult

MEASURED = ("recompute", "primary", "nvme", "restart")
TIERED = ("primary", "nvme", "restart")
SERVING_TIER = {"primary": "primary", "nvme": "nvme", "restart": "nvme"}
GAP_TO_DIFFERENCE_MIN = 100.0
"""Below it, equal token ids might be luck."""
GAP_UNCLEAR = (
    f"the smallest top-2 gap is below {GAP_TO_DIFFERENCE_MIN:.0f} times the largest logit difference, so that equal ids "
    "may be luck"
)


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """The last turn of a conversation by one plain forward over the whole prompt."""

    conversation: int
    output_ids: tuple[int, ...]
    ttft_s: float
    logit_difference: float
    """Largest difference from the same turn of the in-memory phase."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What a demo measured. ``phases`` holds ``MEASURED`` and ``in_memory``, the run whose prefix never left memory."""

    options: DemoOptions
    phases: Mapping[str, PhaseResult]
    plain: tuple[PlainAnswer, ...]
    control: checks.Control
    restoring: RestoreResult
    machine: Mapping[str, Any]
    path: str | None
    """Where the tiers' files are kept; None if they were removed."""
    seconds: float

    def measured_turns(self, phase: str) -> list[TurnRecord]:
        """The turns whose prefix an earlier turn computed: all but the first of each conversation."""
        return [turn for turn in self.phases[phase].turns if turn.turn > 0]

    @property
    def outputs_identical(self) -> bool:
        """Every phase, and the plain forwards, gave the same token ids in every turn, those of the re-store phase too."""
        return self.phases_identical and self.restoring.outputs_identical

    @property
    def phases_identical(self) -> bool:
        recompute = self.phases["recompute"]
        return checks.ids_equal(list(self.phases.values())) and all(
            answer.output_ids == checks.last_turn(recompute.turns, answer.conversation).output_ids
            for answer in self.plain
        )

    @property
    def control_changed_outputs(self) -> bool:
        return self.control.altered_ids != self.control.expected_ids

    @property
    def bit_equal_same_chunks(self) -> bool:
        return checks.bit_equal(self.phases["in_memory"], [self.phases[name] for name in TIERED])

    @property
    def largest_logit_difference(self) -> float:
        """Of tiered runs (bit-equal to the in-memory one if all is well) against recomputing and plain forwards."""
        expected = self.phases["in_memory"]
        runs = [checks.largest_difference_of(self.phases[name], expected) for name in MEASURED]
        return max(*runs, *(answer.logit_difference for answer in self.plain))

    @property
    def smallest_top2_gap(self) -> float:
        return checks.smallest_top2_gap(list(self.phases.values()))

    @property
    def gap_to_difference(self) -> float | None:
        """How often the difference fits into the gap; None if no logit differs at all."""
        difference = self.largest_logit_difference
        return self.smallest_top2_gap / difference if difference else None

    @property
    def gap_is_clear(self) -> bool:
        """Equal token ids are no accident of close choices."""
        return self.gap_to_difference is None or self.gap_to_difference >= GAP_TO_DIFFERENCE_MIN

    @property
    def prefix_tokens(self) -> int:
        """Tokens that a measured turn reused, device pool and tiers together, at the least."""
        return min(turn.device_tokens + turn.saved_tokens for name in TIERED for turn in self.measured_turns(name))

    def hit_tokens_by_tier(self, *phases: str) -> dict[str, int]:
        """Tokens loaded through the manager, by the nearest tier that had them."""
        hits: Counter[str] = Counter()
        for name in phases:
            for turn in self.phases[name].turns:
                hits.update(turn.tier_tokens)
        return dict(hits)

    def ttft_ms(self, phase: str) -> list[float]:
        return [turn.ttft_s * 1e3 for turn in self.measured_turns(phase)]

    def ttft_median_ms(self, phase: str) -> float:
        return statistics.median(self.ttft_ms(phase))

    def load_median_ms(self, phase: str) -> float:
        """The part of the TTFT before the first forward pass: match and load."""
        return statistics.median(turn.load_s * 1e3 for turn in self.measured_turns(phase))

    def speedup(self, phase: str) -> float:
        """Median TTFT of recomputing over that of ``phase``, over the same turns."""
        return self.ttft_median_ms("recompute") / self.ttft_median_ms(phase)

    @property
    def failures(self) -> list[str]:
        """Each claim of the demo that did not hold, in words."""
        claims = [
            (self.phases_identical, "the phases gave different token ids"),
            (self.control_changed_outputs, "the altered block did not change the output"),
            (self.control.honest_ids == self.control.expected_ids, "the control's honest blocks changed the output"),
            (self.bit_equal_same_chunks, "logits are not bit-equal to the in-memory run"),
            (self.gap_is_clear, f"{GAP_UNCLEAR}; another --seed gives a model with clearer choices"),
            *(
                (
                    SERVING_TIER[name] in self.hit_tokens_by_tier(name),
                    f"phase {name!r} loaded nothing from tier {SERVING_TIER[name]!r}",
                )
                for name in TIERED
            ),
            *self.restoring.claims,
        ]
        return [failure for held, failure in claims if not held]

    @property
    def ok(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """Plain values only. Times are in ms, unless a name says otherwise."""
        return {
            "ok": self.ok,
            "failures": self.failures,
            "outputs_identical": self.outputs_identical,
            "control_changed_outputs": self.control_changed_outputs,
            "bit_equal_same_chunks": self.bit_equal_same_chunks,
            "smallest_top2_gap": self.smallest_top2_gap,
            "largest_logit_difference": self.largest_logit_difference,
            "gap_to_difference": self.gap_to_difference,
            "prefix_tokens": self.prefix_tokens,
            "ttft_ms": {name: self.ttft_median_ms(name) for name in MEASURED},
            "ttft_spread_ms": {name: spread(self.ttft_ms(name)) for name in MEASURED},
            "load_ms": {name: self.load_median_ms(name) for name in TIERED},
            "plain_forward_ttft_ms": statistics.median(answer.ttft_s * 1e3 for answer in self.plain),
            "speedup_primary": self.speedup("primary"),
            "speedup_nvme": self.speedup("nvme"),
            "speedup_restart": self.speedup("restart"),
            "tokens_saved": sum(self.hit_tokens_by_tier(*TIERED).values()),
            "hit_tokens_by_tier": self.hit_tokens_by_tier(*TIERED),
            "phases": {name: self._phase_json(name) for name in self.phases},
            "turns": self._turns_json(),
            "control": {
                "altered_block": checks.ALTERED_BLOCK,
                "loaded_tokens": self.control.loaded_tokens,
                "logit_change": self.control.logit_change,
                "expected_ids": list(self.control.expected_ids),
                "honest_ids": list(self.control.honest_ids),
                "altered_ids": list(self.control.altered_ids),
            },
            "restore": self.restoring.to_json(),
            "seed": self.options.seed,
            "scale": self.options.scale.to_json(),
            "machine": dict(self.machine),
            "path": self.path,
            "plot": None if self.options.plot is None else str(self.options.plot),
            "seconds": self.seconds,
        }

    def _phase_json(self, name: str) -> dict[str, Any]:
        phase = self.phases[name]
        return {
            "prompt_tokens": sum(turn.prompt_tokens for turn in phase.turns),
            "computed_tokens": sum(turn.computed_tokens for turn in phase.turns),
            "device_tokens": sum(turn.device_tokens for turn in phase.turns),
            "saved_tokens": sum(turn.saved_tokens for turn in phase.turns),
            "hit_tokens_by_tier": self.hit_tokens_by_tier(name),
            "stored_blocks": phase.stored_blocks,
            "refused_blocks": phase.refused_blocks,
            "open_ms": phase.open_s * 1e3,
        }

    def _turns_json(self) -> list[dict[str, Any]]:
        rows = []
        for records in zip(*(self.phases[name].turns for name in self.phases), strict=True):
            first = records[0]
            rows.append(
                {
                    "conversation": first.conversation,
                    "turn": first.turn,
                    "measured": first.turn > 0,
                    "prompt_tokens": first.prompt_tokens,
                    "output_ids": list(first.output_ids),
                    "phases": {
                        name: {
                            "ttft_ms": record.ttft_s * 1e3,
                            "load_ms": record.load_s * 1e3,
                            "computed_tokens": record.computed_tokens,
                            "device_tokens": record.device_tokens,
                            "hit_tokens_by_tier": dict(record.tier_tokens),
                        }
                        for name, record in zip(self.phases, records, strict=True)
                    },
                }
            )
        return rows


def spread(values: list[float]) -> dict[str, float]:
    """Smallest, quartiles and largest of at least two values."""
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return {"min": min(values), "lower_quartile": lower, "upper_quartile": upper, "max": max(values)}
