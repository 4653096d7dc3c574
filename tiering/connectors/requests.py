"""What an engine tells the scheduler's half: its requests, and what it scheduled in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

NULL_BLOCK = 0
"""The engine's block that stands for "none": a position outside a sliding window. Its content is never read."""


class EngineRequest(Protocol):
    """A request as its engine keeps it; read at each call, never changed."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: the prompt and what was generated."""

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One chained content hash a full ``tokens_per_hash`` tokens, of confirmed tokens only. Grows, never changes.

        At most 32 bytes each: with the group's number they make the block key.
        """


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may take from, and give to, the tiers."""

    load_tokens_max: int | None = None
    """Tokens of its prompt that may come from the tiers. None: all."""
    store_tokens_max: int | None = None
    """Leading tokens that are offered to the tiers. None: all."""
    load_tiers: frozenset[str] | None = None
    """Names of the tiers that may serve it ("primary" among them). None: any."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request that has tokens in this step."""

    request_id: str
    block_ids: tuple[Sequence[int], ...]
    """The whole table of its GPU blocks after this step's allocation, by group; ``NULL_BLOCK`` where it has none."""
    computed_tokens: int
    """Tokens whose KV its blocks hold before this step (computed, found in the engine's prefix cache, or loaded)."""
    scheduled_tokens: int
    """Tokens that this step computes, without speculative ones."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the engine's scheduler decided for one step. A step may schedule nothing."""

    scheduled: Sequence[ScheduledRequest] = ()
    preempted: frozenset[str] = frozenset()
    """Requests that lost their GPU blocks since the step before."""
    allocated_block_ids: frozenset[int] = frozenset()
    """GPU blocks that were given away in this step and whose old content is lost by its forward pass: not those that a
    request shares because they were in the engine's prefix cache."""
