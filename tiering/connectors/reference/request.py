"""One request, as the engine keeps it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiering.connectors.reference.hashing import BlockHasher

if TYPE_CHECKING:
    import torch


class RequestState(enum.Enum):
    WAITING = "waiting"
    """In the queue: new, preempted, or loaded and due to run. Only a loaded one has GPU blocks."""
    WAITING_FOR_REMOTE_KVS = "waiting for remote KVs"
    """In the queue with GPU blocks that an asynchronous load fills: it runs when all ranks have said that it ended."""
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True)
class RequestRecord:
    """What a request cost. Token counts add up over its admissions: a preempted request is admitted again."""

    arrival_s: float
    ttft_s: float | None = None
    """From its arrival to its first token."""
    computed_tokens: int = 0
    """Tokens that a forward pass computed for it, also again after a preemption or a failed load."""
    engine_tokens: int = 0
    """Found in the engine's own prefix cache."""
    tier_tokens: int = 0
    """Loaded from the tiers and used: without what a failed load did not bring."""
    failed_loads: int = 0
    """Loads that did not bring all that was promised."""
    preemptions: int = 0
    logits: list[torch.Tensor] = field(default_factory=list, repr=False)
    """One (vocabulary,) tensor a generated token, if asked for and the runner has them."""


@dataclass(slots=True, eq=False)
class Request:
    """An ``EngineRequest`` of the connector, and the scheduler's book on it. Only the scheduler writes it."""

    request_id: str
    token_ids: list[int]
    """The prompt, and behind it what was generated."""
    num_prompt_tokens: int
    max_tokens: int
    """Tokens to generate."""
    salt: bytes
    lora: bytes
    hasher: BlockHasher
    record: RequestRecord
    keep_logits: bool = False
    state: RequestState = RequestState.WAITING
    computed_tokens: int = 0
    """Tokens whose KV its blocks hold, or will hold once the load that fills them has ended."""
    external_tokens: int = 0
    """Of them, those that its last admission was promised by the tiers."""
    blocks: tuple[list[int], ...] = ()
    """By group: its GPU blocks. Empty while it has none."""
    cached_blocks: list[int] = field(default_factory=list)
    """By group: leading blocks that were offered to the prefix cache."""
    block_hashes: list[bytes] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self._hash()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_complete(self) -> bool:
        return self.num_tokens - self.num_prompt_tokens >= self.max_tokens

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self._hash()

    def _hash(self) -> None:
        self.hasher.extend(self.block_hashes, self.token_ids, salt=self.salt, lora=self.lora)
