"""What a demo runs: the user's options, and the sizes of model and conversations behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tiering.errors import ConfigError

Progress: TypeAlias = Callable[[str, int, int], None]
"""Told ``(phase, turns done, turns in all)`` after each turn; called on the thread that runs the demo."""


def no_progress(phase: str, done: int, total: int) -> None:
    """The progress sink of a caller that wants none."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A Llama with random weights (fp32). Wide initial weights make distinct greedy outputs with clear top-2 gaps."""

    layers: int = 4
    hidden: int = 512
    intermediate: int = 1024
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 512
    initializer_range: float = 0.06

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers in fp32."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of one demo. A prompt is system + document + a message and an answer a turn, in tokens."""

    model: ModelSpec = field(default_factory=ModelSpec)
    tokens_per_block: int = 128
    """Also the prefill chunk: a prefix that came from a tier then has the chunk boundaries of one computed here."""
    system_tokens: int = 512
    document_tokens: int = 2048
    message_tokens: int = 40
    answer_tokens: int = 8
    threads: int = 1
    """Of torch. Fixed, because logits are bit-equal only between runs with as many threads."""

    @property
    def block_bytes(self) -> int:
        return self.tokens_per_block * self.model.kv_bytes_per_token

    def sequence_tokens_max(self, turns: int) -> int:
        """Tokens of a conversation after its last answer."""
        return self.system_tokens + self.document_tokens + turns * (self.message_tokens + self.answer_tokens)

    def sequence_blocks_max(self, turns: int) -> int:
        return -(-self.sequence_tokens_max(turns) // self.tokens_per_block)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Scale:
        return Scale(**{**fields, "model": ModelSpec(**fields["model"])})


@dataclass(frozen=True, slots=True)
class TrafficScale:
    """Sizes of the re-store phase: many live conversations, and prompts between them that never come again.

    The numbers make the tier lose blocks of requests that run, which is what re-store is about: the engine holds most
    conversations at once, the tier little more than it, and the prompts that pass through fill it again within a few turns'
    time. With a tier of twice this size nothing would be lost, and nothing regained.
    """

    model: ModelSpec = field(
        default_factory=lambda: ModelSpec(layers=2, hidden=128, intermediate=256, heads=2, kv_heads=2)
    )
    """Smaller than the other phases': there are many more turns here, and each runs several times."""
    tokens_per_block: int = 32
    conversations: int = 10
    """All live from the first turn to the last."""
    turns: int = 10
    opening_tokens: int = 176
    message_tokens: int = 6
    answer_tokens: int = 10
    stagger_steps: int = 2
    """Engine steps between the first turns of two conversations."""
    pause_steps: int = 1
    """Engine steps between an answer and the next message of its conversation."""
    passing_tokens: int = 128
    """Of a prompt that comes once and is answered with one token: one a step."""
    device_blocks: int = 79
    primary_blocks: int = 104
    requests_max: int = 9
    """That the engine runs at once; the others wait."""

    @property
    def block_bytes(self) -> int:
        return self.tokens_per_block * self.model.kv_bytes_per_token

    @property
    def sequence_tokens_max(self) -> int:
        return self.opening_tokens + self.turns * (self.message_tokens + self.answer_tokens)

    @property
    def turns_total(self) -> int:
        return self.conversations * self.turns


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """``path``: keep the tiers' files in a fresh directory below it (None: a temporary directory, removed afterwards).

    Raises ``ConfigError`` for numbers that leave nothing to compare.
    """

    path: Path | None = None
    plot: Path | None = None
    conversations: int = 3
    turns: int = 4
    seed: int = 0
    scale: Scale = field(default_factory=Scale)
    traffic: TrafficScale = field(default_factory=TrafficScale)

    def __post_init__(self) -> None:
        if not 2 <= self.conversations <= 64:
            raise ConfigError(
                f"--conversations is {self.conversations}; use 2 to 64: one alone never leaves the device pool"
            )
        if not 2 <= self.turns <= 64:
            raise ConfigError(
                f"--turns is {self.turns}; use 2 to 64: the first turn of a conversation has no prefix to reuse"
            )
        if not 0 <= self.seed < 1 << 32:
            raise ConfigError(f"--seed is {self.seed}; use 0 to {(1 << 32) - 1}")

    @property
    def turns_total(self) -> int:
        return self.conversations * self.turns
