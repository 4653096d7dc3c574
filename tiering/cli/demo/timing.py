"""Watches that stand between the engine and what computes, and between the worker half and what copies."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tiering.connectors.reference import PagedMemory, Runner, Sample
from tiering.connectors.reference.runner import Work
from tiering.memory.transfer.spec import TransferEngine, TransferResult, TransferSpec, TransferType
from tiering.types import KVLayout


@dataclass(frozen=True, slots=True)
class Forward:
    tokens: int
    seconds: float


class TimedRunner:
    """A ``Runner`` that notes how long each forward pass took."""

    def __init__(self, runner: Runner) -> None:
        self.forwards: list[Forward] = []
        """Those that computed something."""
        self._runner = runner

    @property
    def memory(self) -> PagedMemory:
        return self._runner.memory

    @property
    def layout(self) -> KVLayout:
        return self._runner.layout

    def forward(self, work: Work) -> Mapping[str, Sample]:
        begin = time.perf_counter()
        samples = self._runner.forward(work)
        if work:
            tokens = sum(scheduled.scheduled_tokens for _, scheduled in work)
            self.forwards.append(Forward(tokens, time.perf_counter() - begin))
        return samples


@dataclass(frozen=True, slots=True)
class Copy:
    gpu_block_ids: frozenset[int]
    seconds: float
    """From the copy's start to its end, as the transfer engine tells it."""


class TimedStores:
    """A ``TransferEngine`` GPU -> CPU that notes each copy that succeeded. Owns the one that it is put around."""

    def __init__(self, engine: TransferEngine) -> None:
        self.copies: list[Copy] = []
        self._engine = engine
        self._blocks: dict[int, frozenset[int]] = {}

    @property
    def type(self) -> TransferType:
        return self._engine.type

    def submit(self, job_id: int, spec: TransferSpec) -> None:
        self._engine.submit(job_id, spec)
        self._blocks[job_id] = frozenset(spec.source.block_ids)

    def poll(self) -> list[TransferResult]:
        results = self._engine.poll()
        for result in results:
            blocks = self._blocks.pop(result.job_id)
            if result.success:
                self.copies.append(Copy(blocks, result.seconds))
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        self._engine.wait(job_ids)

    def close(self) -> None:
        self._engine.close()
