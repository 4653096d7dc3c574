"""The worker's half: one a rank, beside the engine's forward pass. Carries out what the scheduler's half decided."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from tiering.connectors.wire import ArenaAddress, ConnectorMetadata, LoadJob, StoreJob, WorkerOutput
from tiering.errors import TieringError
from tiering.memory.arena import Arena, PoolShape
from tiering.memory.pinning import ArenaPinning, PinReport
from tiering.memory.transfer.blocks import DeviceBlocks, Placement
from tiering.memory.transfer.driver import CudaRegistrar
from tiering.memory.transfer.factory import open_engines
from tiering.memory.transfer.spec import (
    LOAD,
    STORE,
    Medium,
    TransferEngine,
    TransferResult,
    TransferSpec,
    TransferType,
)

log = logging.getLogger("tiering.connectors")


class OffloadingConnectorWorker:
    """Not thread-safe: the thread of the forward pass calls.

    A step: ``handle_preemptions``, ``bind_connector_metadata``, ``start_load_kv``, the forward pass, ``wait_for_save``,
    ``get_finished``, ``take_output``, ``clear_connector_metadata``. An engine may call ``start_load_kv`` after the forward
    pass if the step has no load ``in_step``. Copies that fail are results; nothing here raises for them.
    """

    def __init__(self, *, rank: int = 0) -> None:
        self._rank = rank
        self._blocks: DeviceBlocks | None = None
        self._placement: Placement | None = None
        self._arena: Arena | None = None
        self._own_arena: Arena | None = None
        """Attached here, and closed here."""
        self._unreachable = ""
        """Why the slots of the scheduler's process cannot be mapped; "" if they can, or nobody has tried."""
        self._pinning: ArenaPinning | None = None
        self._engines: dict[TransferType, TransferEngine] = {}
        self._metadata: ConnectorMetadata | None = None
        self._deferred: list[tuple[int, StoreJob]] = []
        """Stores of the step before: submitted at the start of this one."""
        self._copying: dict[int, TransferSpec] = {}
        """Jobs submitted and not told yet."""
        self._loads: dict[int, LoadJob] = {}
        """Loads submitted and not told yet."""
        self._flushed: set[int] = set()
        """Stores of this step that were submitted before its forward pass."""
        self._told_max = 0
        """The highest job number that this rank was given."""
        self._results: list[TransferResult] = []
        self._finished_recving: set[str] = set()
        self._invalid: set[int] = set()
        self._poisoned: set[str] = set()
        """Requests whose load inside this step failed: what the step computes on top of it must not be stored."""

    # -- set-up -------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, blocks: DeviceBlocks, placement: Placement, arena: Arena | None = None) -> None:
        """Name the rank's part of the GPU blocks and of the slots. ``arena`` None: it comes with the first metadata.

        Opens a transfer engine a direction and, for a device that copies from pinned memory alone at full speed, pins
        the arena in the background. Raises ``ShapeError`` if blocks and slots do not fit each other.
        """
        self._blocks, self._placement = blocks, placement
        if arena is not None:
            self._open(arena)

    def register_engine(self, engine: TransferEngine) -> None:
        """Route jobs of the engine's type to it, instead of the one there was, which is closed."""
        if (old := self._engines.get(engine.type)) is not None:
            old.close()
            self._take_in(old.poll())
        self._engines[engine.type] = engine

    @property
    def pin_report(self) -> PinReport | None:
        """How far the pinning is; None where nothing is pinned."""
        return None if self._pinning is None else self._pinning.report

    def _open(self, arena: Arena) -> None:
        if self._blocks is None or self._placement is None:
            raise TieringError("register_kv_caches first: the GPU blocks are not known")
        self._engines = open_engines(arena, self._blocks, self._placement, self._rank)
        self._arena = arena
        if self._blocks.device.type == "cuda":
            self._pinning = ArenaPinning(arena, CudaRegistrar(self._blocks.device))

    def _attach(self, address: ArenaAddress) -> None:
        path = f"/proc/{address.pid}/fd/{address.fd}"
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError as error:
            raise TieringError(
                f"cannot map the slots of the scheduler's process through {path}: {error.strerror}; both must run as the"
                " same user, and in one PID namespace"
            ) from None
        try:
            self._own_arena = Arena.attach(fd, [PoolShape(*pool) for pool in address.pools])
        finally:
            os.close(fd)
        self._open(self._own_arena)

    # -- the step -----------------------------------------------------------------------------------------------------

    def handle_preemptions(self, metadata: ConnectorMetadata) -> None:
        """Before the forward pass: submit what is deferred, and wait for the copies whose GPU blocks it overwrites."""
        if metadata.arena is not None and self._arena is None and not self._unreachable:
            try:
                self._attach(metadata.arena)
            except TieringError as error:
                self._unreachable = str(error)
                log.error("rank %d has no slots, every load and store of it fails: %s", self._rank, error)
        self._poisoned.clear()
        self._flushed.clear()
        self._submit_deferred()
        if not metadata.jobs_to_flush:
            return
        for job_id in metadata.jobs_to_flush:
            job = metadata.store_jobs.get(job_id)
            if job is not None:
                self._flushed.add(job_id)
                self._submit(STORE, job_id, job.spec)
            elif job_id > self._told_max:
                self._fail(STORE, job_id, "it was to be flushed, and never reached this rank")
        waiting = [job_id for job_id in metadata.jobs_to_flush if job_id in self._copying]
        if waiting:
            self._engines[STORE].wait(waiting)

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        """This step's message."""
        self._metadata = metadata

    def clear_connector_metadata(self) -> None:
        self._metadata = None

    def start_load_kv(self) -> None:
        """Submit the deferred stores, then this step's loads; wait for those that the forward pass needs."""
        self._submit_deferred()
        loads = {} if self._metadata is None else self._metadata.load_jobs
        for job_id, job in loads.items():
            self._loads[job_id] = job
            self._submit(LOAD, job_id, job.spec)
        needed = [job_id for job_id, job in loads.items() if job.in_step]
        if not needed:
            return
        copying = [job_id for job_id in needed if job_id in self._copying]
        if copying:
            self._engines[LOAD].wait(copying)
        self._poll()
        for job_id in needed:
            if not self._went_well(job_id, loads[job_id]):
                self._poisoned.add(loads[job_id].request_id)

    def _went_well(self, job_id: int, job: LoadJob) -> bool:
        return not job.missing_block_ids and all(r.success for r in self._results if r.job_id == job_id)

    def wait_for_save(self) -> None:
        """After the forward pass: this step's stores wait for the next step's start, and overlap with its compute."""
        stores = {} if self._metadata is None else self._metadata.store_jobs
        for job_id, job in stores.items():
            self._told_max = max(self._told_max, job_id)
            if job_id in self._flushed:
                continue
            if job.request_id in self._poisoned:
                self._fail(STORE, job_id, "a load of the same request failed in this step")
            else:
                self._deferred.append((job_id, job))

    def get_finished(self) -> tuple[set[str], set[str]]:
        """(``finished_sending``, ``finished_recving``): nothing is ever lent past a request's end, so the first is empty."""
        self._poll()
        finished, self._finished_recving = self._finished_recving, set()
        return set(), finished

    def take_output(self) -> WorkerOutput | None:
        """Jobs that ended on this rank, and GPU blocks that a load was to fill and did not, since the last call."""
        if not self._results and not self._invalid:
            return None
        output = WorkerOutput.of(self._results, self._rank)
        output.invalid_block_ids = frozenset(self._invalid)
        self._results, self._invalid = [], set()
        return output

    def shutdown(self) -> None:
        """Submit what is deferred, wait for all copies, give everything back. Idempotent."""
        self._submit_deferred()
        for engine in self._engines.values():
            engine.close()
        self._poll()
        if self._pinning is not None:
            self._pinning.close()
        self._engines, self._pinning, self._blocks = {}, None, None
        if self._own_arena is not None:
            self._own_arena.close()
        self._arena = self._own_arena = None

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def _submit_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for job_id, job in deferred:
            self._submit(STORE, job_id, job.spec)

    def _submit(self, direction: TransferType, job_id: int, spec: TransferSpec) -> None:
        self._told_max = max(self._told_max, job_id)
        engine = self._engines.get(direction)
        if engine is None:
            self._fail(direction, job_id, self._unreachable or "this rank has no slots yet: register_kv_caches first")
            return
        try:
            engine.submit(job_id, spec)
        except TieringError as error:
            self._fail(direction, job_id, str(error))
        else:
            self._copying[job_id] = spec

    def _fail(self, direction: TransferType, job_id: int, why: str) -> None:
        log.warning(
            "job %d (%s to %s) failed on rank %d: %s", job_id, direction[0].value, direction[1].value, self._rank, why
        )
        self._take_in([TransferResult(job_id, False, 0, 0.0, direction, why)])

    def _poll(self) -> None:
        for engine in self._engines.values():
            self._take_in(engine.poll())

    def _take_in(self, results: Iterable[TransferResult]) -> None:
        for result in results:
            self._results.append(result)
            self._copying.pop(result.job_id, None)
            load = self._loads.pop(result.job_id, None)
            if load is None:
                continue
            self._invalid.update(load.missing_block_ids)
            if not result.success:
                assert load.spec.destination.medium is Medium.GPU
                self._invalid.update(load.spec.destination.block_ids)
            if not load.in_step:
                self._finished_recving.add(load.request_id)
