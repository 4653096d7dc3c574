"""What travels between the two halves: plain, picklable values. Block ids and slots, never bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tiering.memory.transfer.spec import TransferResult, TransferSpec


@dataclass(frozen=True, slots=True)
class LoadJob:
    """CPU -> GPU for one request. Each asynchronous one ends in exactly one ``finished_recving``, whatever became of it."""

    request_id: str
    spec: TransferSpec
    """Empty spans if nothing came: the job then only carries the bad news."""
    missing_block_ids: tuple[int, ...] = ()
    """GPU blocks that were promised and will not be filled: the engine must compute them."""
    in_step: bool = False
    """The forward pass of this step needs the blocks: ``start_load_kv`` waits for them."""


@dataclass(frozen=True, slots=True)
class StoreJob:
    """GPU -> CPU for one request: blocks newly computed, re-stored, or about to be lost."""

    request_id: str
    spec: TransferSpec


@dataclass(frozen=True, slots=True)
class ArenaAddress:
    """Where a worker in another process finds the slots: the memfd ``fd`` of process ``pid``."""

    pid: int
    fd: int
    pools: tuple[tuple[int, int], ...]
    """(slots, slot_bytes) of each pool."""


@dataclass(slots=True)
class ConnectorMetadata:
    """One step's message from the scheduler's half to every worker."""

    load_jobs: dict[int, LoadJob] = field(default_factory=dict)
    store_jobs: dict[int, StoreJob] = field(default_factory=dict)
    """Submitted at the start of the next step, so that they overlap with its compute and not with this step's end."""
    jobs_to_flush: frozenset[int] = frozenset()
    """Store jobs, of this step or earlier ones, whose GPU blocks this step's forward pass will overwrite: they must have
    been copied before it."""
    arena: ArenaAddress | None = None


@dataclass(frozen=True, slots=True)
class JobReport:
    """Which ranks ended a job, and which of them failed."""

    ranks: frozenset[int]
    failed: frozenset[int] = frozenset()
    error: str = ""

    def merge(self, other: JobReport) -> JobReport:
        return JobReport(self.ranks | other.ranks, self.failed | other.failed, self.error or other.error)


@dataclass(slots=True)
class WorkerOutput:
    """What workers report of one step. ``merge`` adds what another rank reports of the same step, or of a later one."""

    jobs: dict[int, JobReport] = field(default_factory=dict)
    invalid_block_ids: frozenset[int] = frozenset()
    """GPU blocks that a load was to fill and did not."""

    @staticmethod
    def of(results: Iterable[TransferResult], rank: int) -> WorkerOutput:
        """One rank's results."""
        only = frozenset((rank,))
        return WorkerOutput({r.job_id: JobReport(only, frozenset() if r.success else only, r.error) for r in results})

    def merge(self, other: WorkerOutput) -> WorkerOutput:
        """Both reports as one, in a new object."""
        jobs = dict(self.jobs)
        for job, report in other.jobs.items():
            jobs[job] = jobs[job].merge(report) if job in jobs else report
        return WorkerOutput(jobs, self.invalid_block_ids | other.invalid_block_ids)
