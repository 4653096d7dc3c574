"""Door (a): ``TieringSecondaryTier``, our tiers below vLLM's own CPU tier.

Our manager stands behind it with a CPU tier of its own, through which the blocks pass: vLLM's slots are free again as soon
as they are copied there, however slow the tier, and eviction, breaker, deadlines, integrity and restart are those of every
other door. It costs one more copy a block.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Collection, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from tiering.connectors.vllm.layout import CONFIG_KEY, blocks_of_offloading, read_config
from tiering.connectors.vllm.managers import reset, run_blocking
from tiering.connectors.vllm.paths import GROUP_BYTES, before, in_order, run_from
from tiering.connectors.vllm.pauses import EmptySteps
from tiering.manager import TieringOffloadingManager
from tiering.runtime.gate import KEYS_PER_HOLD_MAX
from tiering.runtime.threads import IoThread
from tiering.types import BlockKey, KVLayout

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

STOP_S: Final = 2.0
Rows = npt.NDArray[np.uint8]


class TieringSecondaryTier(SecondaryTierManager):
    """All tiers of one YAML file as one secondary tier of vLLM.

    ``secondary_tiers``: ``[{"type": "TieringSecondaryTier", "module_path": "tiering.connectors.vllm", "tiering_config":
    "tiering.yaml"}]``. The scheduler's thread calls; the copies run on threads of ours.
    """

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        tiering_config: str = "",
        backpressure_detector: BackpressureDetector | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        # vLLM keeps one row a chunk, whatever its group: all blocks have the size of a row, and the group is in the key.
        engine = blocks_of_offloading(offloading_spec.config).layout
        config = offloading_spec.config
        self._tokens = {g.group_id: g.tokens_per_block * config.cache.blocks_per_chunk for g in config.groups}
        self._layout = KVLayout.uniform(
            model=engine.model,
            revision=engine.revision,
            dtype=engine.dtype,
            ranks=engine.ranks,
            tokens_per_block=engine.groups[0].tokens_per_block,
            block_bytes=self.block_size_bytes,
        )
        self._rows: Rows | None = np.asarray(primary_kv_view).view(np.uint8)
        self._manager = TieringOffloadingManager(read_config({CONFIG_KEY: tiering_config}), self._layout)
        run_blocking(self._manager.open())
        self._io = IoThread(name="tiering-secondary")
        self._io.start()
        self._empty_steps = EmptySteps()
        self._jobs: set[Future[None]] = set()
        self._results: deque[JobResult] = deque()
        self._verdicts: dict[BlockKey, LookupResult] = {}
        """Of this step."""

    # -- the scheduler's thread ---------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if key not in self._verdicts:
            run = run_from(key, req_context, KEYS_PER_HOLD_MAX)
            result = self._manager.sync.lookup_each(run)
            for position, (asked, where) in enumerate(zip(run, result.where, strict=False)):
                missing = LookupResult.RETRY if position in result.awaited else LookupResult.MISS
                self._verdicts[asked] = missing if where is None else LookupResult.HIT
                if self._verdicts[asked] is LookupResult.MISS:
                    break
        return self._verdicts[key]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        for _, path in itertools.groupby(in_order(keys, req_context), lambda key: key[-GROUP_BYTES:]):
            self._manager.sync.touch(list(path))

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._start(self._store(job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._start(self._load(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        while self._results:
            yield self._results.popleft()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._verdicts.clear()
        self._empty_steps.step(waiting=bool(self._jobs))

    def drain_jobs(self) -> None:
        """Wait for every job; then forget every block: vLLM calls this when its caches are reset, and tells tiers no more.

        A tier that would still have the blocks of the old weights would serve them under the new ones.
        """
        self._wait()
        self._verdicts.clear()
        reset(self._manager)

    def shutdown(self) -> None:
        self._wait()
        self._io.stop(STOP_S)
        self._rows = None
        self._manager.sync.close()

    def _start(self, job: Coroutine[Any, Any, None]) -> None:
        future = self._io.submit(job)
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)

    def _wait(self) -> None:
        for future in list(self._jobs):
            future.result()

    # -- the loop of ours ---------------------------------------------------------------------------------------------

    async def _store(self, job: TransferJob) -> None:
        start_s = time.monotonic()
        refused = 0
        for keys, rows in self._stretches(job):
            parent = before(keys[0], self._tokens_of(keys[0]), job.req_context)
            if parent is not None and not (await self._manager.match([parent])).blocks:
                parent = None
            report = await self._manager.store(keys, rows, parent=parent)
            refused += report.refused
        self._report(job, start_s, list(job.keys), good=not refused)

    async def _load(self, job: TransferJob) -> None:
        start_s = time.monotonic()
        stretches = list(self._stretches(job))
        counts = await asyncio.gather(*(self._manager.load(keys, rows) for keys, rows in stretches))
        loaded = [key for (keys, _), count in zip(stretches, counts, strict=True) for key in keys[:count]]
        self._report(job, start_s, loaded, good=len(loaded) == len(job.keys))

    def _report(self, job: TransferJob, start_s: float, keys: list[BlockKey], *, good: bool) -> None:
        self._results.append(
            JobResult(
                job.job_id,
                good,
                successful_keys=None if good or not job.is_promotion else tuple(keys),
                transfer_time=time.monotonic() - start_s,
                transfer_bytes=len(keys) * self.block_size_bytes,
            )
        )

    def _stretches(self, job: TransferJob) -> Iterator[tuple[list[BlockKey], Rows]]:
        """Blocks that follow each other in the prompt and in vLLM's memory: their rows are one array, without a copy."""
        assert self._rows is not None
        chunk_of = {key: int(chunk) for key, chunk in zip(job.keys, job.chunk_ids, strict=True)}
        keys: list[BlockKey] = []
        for key in in_order(job.keys, job.req_context):
            if keys and (chunk_of[key] != chunk_of[keys[-1]] + 1 or key[-GROUP_BYTES:] != keys[-1][-GROUP_BYTES:]):
                yield keys, self._rows[chunk_of[keys[0]] : chunk_of[keys[-1]] + 1]
                keys = []
            keys.append(key)
        if keys:
            yield keys, self._rows[chunk_of[keys[0]] : chunk_of[keys[-1]] + 1]

    def _tokens_of(self, key: BlockKey) -> int:
        tokens: int = self._tokens[int.from_bytes(key[-GROUP_BYTES:], "big")]
        return tokens
