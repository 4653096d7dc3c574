"""Jobs on the wire: who waits for which rank, what the manager must be told at the end, and which GPU blocks are still read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tiering.connectors.wire import WorkerOutput
from tiering.memory.transfer.spec import BlockSpan, Medium, TransferSpec
from tiering.sync import SyncFace
from tiering.types import Outcome

CoreJob: TypeAlias = tuple[int, tuple[bool, ...]]
"""(job of the manager's, which of its blocks are copied)."""


@dataclass(slots=True)
class Job:
    """A copy that every rank does its part of."""

    job_id: int
    request_id: str
    is_store: bool
    pending: set[int]
    """Ranks that have not reported."""
    core_jobs: list[CoreJob]
    gpu_block_ids: tuple[int, ...]
    failed: bool = False
    error: str = ""


@dataclass(slots=True)
class JobCounters:
    store_jobs: int = 0
    stored_blocks: int = 0
    failed_store_jobs: int = 0
    load_jobs: int = 0
    loaded_blocks: int = 0
    failed_load_jobs: int = 0
    unknown_reports: int = 0
    """Reports of jobs that had ended, or never were."""
    flushed_jobs: int = 0
    """Stores that a forward pass had to wait for, because it overwrites their GPU blocks."""
    last_error: str = ""


@dataclass(slots=True)
class JobTable:
    """All jobs that some rank has not ended, and the GPU blocks that store jobs read."""

    sync: SyncFace
    world_size: int
    counters: JobCounters = field(default_factory=JobCounters)
    jobs: dict[int, Job] = field(default_factory=dict)
    _reads: dict[int, int] = field(default_factory=dict)
    """GPU block -> the newest open store job that reads it. An older one was flushed when the block was given away."""
    _last_id: int = 0

    def begin(
        self, request_id: str, core_jobs: list[CoreJob], gpu_block_ids: tuple[int, ...], *, is_store: bool
    ) -> int:
        """Register a job; its number on the wire."""
        self._last_id += 1
        job = Job(self._last_id, request_id, is_store, set(range(self.world_size)), core_jobs, gpu_block_ids)
        self.jobs[job.job_id] = job
        if is_store:
            self.counters.store_jobs += 1
            self._reads.update(dict.fromkeys(gpu_block_ids, job.job_id))
        else:
            self.counters.load_jobs += 1
        return job.job_id

    def reading(self, gpu_block_ids: Collection[int]) -> frozenset[int]:
        """Store jobs that read any of these GPU blocks."""
        if not self._reads:
            return frozenset()
        return frozenset(self._reads[block] for block in gpu_block_ids if block in self._reads)

    def report(self, output: WorkerOutput) -> list[Job]:
        """Take in what ranks say; the jobs that all ranks have ended now, the manager told."""
        ended: list[Job] = []
        for job_id, report in output.jobs.items():
            job = self.jobs.get(job_id)
            fresh = report.ranks & job.pending if job is not None else frozenset()
            self.counters.unknown_reports += len(report.ranks) - len(fresh)
            if job is None or not fresh:
                continue
            job.pending -= fresh
            if fresh & report.failed:
                job.failed, job.error = True, job.error or report.error
            if not job.pending:
                self._end(job)
                ended.append(job)
        return ended

    def abandon(self) -> None:
        """No worker will report any more, and none copies: every open job ends as failed."""
        for job in list(self.jobs.values()):
            job.failed, job.error = True, job.error or "the engine shut down"
            self._end(job)

    def _end(self, job: Job) -> None:
        del self.jobs[job.job_id]
        counters = self.counters
        blocks = sum(sum(copied) for _, copied in job.core_jobs)
        if job.failed:
            counters.last_error = job.error
        if job.is_store:
            for block in job.gpu_block_ids:
                if self._reads.get(block) == job.job_id:
                    del self._reads[block]
            counters.failed_store_jobs += job.failed
            counters.stored_blocks += 0 if job.failed else blocks
            outcome = Outcome.failed(job.error or "a rank could not copy the block") if job.failed else Outcome.OK
            for core_job, copied in job.core_jobs:
                self.sync.complete(core_job, [outcome if one else Outcome.CANCELLED for one in copied])
        else:
            counters.failed_load_jobs += job.failed
            counters.loaded_blocks += 0 if job.failed else blocks
            for core_job, _ in job.core_jobs:
                self.sync.release(core_job)


@dataclass(slots=True)
class SpecParts:
    """A ``TransferSpec`` in the making: blocks are added group by group, in order."""

    groups: int
    gpu: list[list[int]] = field(init=False)
    slots: list[list[int]] = field(init=False)
    first_index: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.gpu = [[] for _ in range(self.groups)]
        self.slots = [[] for _ in range(self.groups)]
        self.first_index = [0] * self.groups

    def add(self, group: int, gpu_block_ids: Iterable[int], slot: int) -> None:
        self.gpu[group] += gpu_block_ids
        self.slots[group].append(slot)

    @property
    def gpu_block_ids(self) -> tuple[int, ...]:
        return tuple(block for ids in self.gpu for block in ids)

    def store_spec(self) -> TransferSpec:
        return TransferSpec(self._gpu_span(), self._cpu_span())

    def load_spec(self) -> TransferSpec:
        return TransferSpec(self._cpu_span(), self._gpu_span())

    def _gpu_span(self) -> BlockSpan:
        return BlockSpan(Medium.GPU, self.gpu_block_ids, _sizes(self.gpu), tuple(self.first_index))

    def _cpu_span(self) -> BlockSpan:
        slots = tuple(slot for part in self.slots for slot in part)
        return BlockSpan(Medium.CPU, slots, _sizes(self.slots), (0,) * self.groups)


def _sizes(parts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(len, parts))
