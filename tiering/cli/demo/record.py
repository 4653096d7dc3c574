"""What is kept of each answered prompt."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One answered prompt: ``prompt_tokens == device_tokens + sum(tier_tokens) + computed_tokens``."""

    conversation: int
    turn: int
    prompt_tokens: int
    device_tokens: int
    """Found in the engine's own prefix cache."""
    tier_tokens: Mapping[str, int]
    """Loaded through the connector, by the nearest tier that had them."""
    computed_tokens: int
    """Of the prompt."""
    ttft_s: float
    """From the prompt to the first answered token: key hashing, match, load, copies and the rest of the prefill."""
    load_s: float
    """The part of it before the first forward pass: match and load."""
    output_ids: tuple[int, ...]
    logits: torch.Tensor
    """(answer tokens, vocabulary), fp32: what each answered token was chosen from."""

    @property
    def saved_tokens(self) -> int:
        return sum(self.tier_tokens.values())

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "logits"}
        raw = self.logits.contiguous().numpy().tobytes()
        return {
            **fields,
            "tier_tokens": dict(self.tier_tokens),
            "output_ids": list(self.output_ids),
            "logits": {"shape": list(self.logits.shape), "float32": base64.b64encode(raw).decode()},
        }

    @staticmethod
    def from_json(fields: dict[str, Any]) -> TurnRecord:
        raw = bytearray(base64.b64decode(fields["logits"]["float32"]))
        logits = torch.frombuffer(raw, dtype=torch.float32).view(fields["logits"]["shape"])
        return TurnRecord(**{**fields, "output_ids": tuple(fields["output_ids"]), "logits": logits})
