"""What computes: the interface between the scheduler's decisions and a model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tiering.connectors.reference.pages import PagedMemory
from tiering.connectors.reference.request import Request
from tiering.connectors.requests import ScheduledRequest
from tiering.types import KVLayout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Sample:
    """The next token of a request, and what it was chosen from: ``(vocabulary,)``, if the runner has logits."""

    token_id: int
    logits: torch.Tensor | None = None


Work = Sequence[tuple[Request, ScheduledRequest]]


class Runner(Protocol):
    """A model over paged memory. It reads the requests' tokens and blocks, and writes the blocks of the scheduled tokens."""

    @property
    def memory(self) -> PagedMemory: ...

    @property
    def layout(self) -> KVLayout:
        """What the manager under the connector is opened with; its identity also seeds the block hashes."""

    def forward(self, work: Work) -> Mapping[str, Sample]:
        """Compute the scheduled tokens of each request; a sample for each whose last known token was among them."""


def chunks(start: int, end: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """``start`` to ``end`` cut at the multiples of ``chunk_tokens``.

    So a token is computed in the same chunk whatever was reused before it, and its KV and logits are the same bits.
    """
    borders = [start, *range(start // chunk_tokens * chunk_tokens + chunk_tokens, end, chunk_tokens), end]
    return list(itertools.pairwise(borders))
