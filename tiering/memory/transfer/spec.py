"""What a copy is told and what it answers: plain, picklable values that travel between an engine's processes."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tiering.errors import ShapeError


class Medium(enum.Enum):
    GPU = "gpu"
    """The engine's device blocks (also where the device is a CPU)."""
    CPU = "cpu"
    """Slots of the arena."""


TransferType: TypeAlias = tuple[Medium, Medium]
"""(source, destination)."""

STORE: TransferType = (Medium.GPU, Medium.CPU)
LOAD: TransferType = (Medium.CPU, Medium.GPU)


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Blocks on one medium, the groups one after another.

    On the GPU ``block_ids`` are the engine's block numbers, each ``1 / blocks_per_slot`` of a slot; on the CPU they are
    slots of the group's pool. ``group_sizes[g]`` of them belong to group g. ``block_indices[g]`` is where in its slot
    the group's first GPU block lies (0 for a CPU span): a load may begin, and end, in the middle of a slot.
    """

    medium: Medium
    block_ids: tuple[int, ...]
    group_sizes: tuple[int, ...]
    block_indices: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.group_sizes) != len(self.block_indices):
            raise ShapeError(
                f"group_sizes names {len(self.group_sizes)} groups, block_indices {len(self.block_indices)}"
            )
        if sum(self.group_sizes) != len(self.block_ids):
            raise ShapeError(
                f"group_sizes add up to {sum(self.group_sizes)}; there are {len(self.block_ids)} block ids"
            )

    def of_group(self, group: int) -> tuple[int, ...]:
        """The group's block ids."""
        start = sum(self.group_sizes[:group])
        return self.block_ids[start : start + self.group_sizes[group]]


@dataclass(frozen=True, slots=True)
class TransferSpec:
    """One job: GPU block ``i`` of a group goes from or to slot ``(block_indices[g] + i) // blocks_per_slot``."""

    source: BlockSpan
    destination: BlockSpan

    @property
    def type(self) -> TransferType:
        return self.source.medium, self.destination.medium


@dataclass(frozen=True, slots=True)
class TransferResult:
    """How a job ended on one rank. A failed copy is a result (``error`` says why), never an exception."""

    job_id: int
    success: bool
    bytes: int
    """Payload bytes moved by this rank."""
    seconds: float
    """From the copy's start to its end, on the device's clock where there is one."""
    type: TransferType
    error: str = ""


class TransferEngine(Protocol):
    """Copies of one direction, in the order submitted. One thread calls; nothing here waits except ``wait`` and ``close``."""

    @property
    def type(self) -> TransferType: ...

    def submit(self, job_id: int, spec: TransferSpec) -> None:
        """Queue a copy. On a device it follows what the caller's stream has been given so far. Empty jobs complete too.

        A spec that cannot be carried out is a failed result. Raises ``ClosedError`` after ``close``, and ``TieringError``
        for the id of a job whose result was not told yet.
        """

    def poll(self) -> list[TransferResult]:
        """Jobs that have ended since the last call, in order; looks at the head of the queue alone."""

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until these jobs ended; ``poll`` tells their results. Raises ``KeyError`` for a job never submitted or already told."""

    def close(self) -> None:
        """Wait for what was submitted and give back streams, events and threads. Idempotent; later submits raise ``ClosedError``.

        ``poll`` still tells the results.
        """
