"""The engine: requests in, greedy tokens out, with a connector beside it or without."""

from __future__ import annotations

import math
import pickle
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tiering.connectors.reference.blocks import BlockPool
from tiering.connectors.reference.halves import SchedulerHalf, WorkerHalf
from tiering.connectors.reference.hashing import BlockHasher
from tiering.connectors.reference.request import Request, RequestRecord
from tiering.connectors.reference.runner import Runner, Sample
from tiering.connectors.reference.scheduler import Scheduler
from tiering.connectors.reference.tables import BlockTables
from tiering.connectors.requests import RequestLimits, StepOutput
from tiering.connectors.wire import ConnectorMetadata, WorkerOutput
from tiering.errors import ShapeError

IDLE_STEP_S = 0.0005
"""How long ``run`` rests after a step that had nothing to compute: transfers go on meanwhile."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did."""

    scheduled_tokens: int
    tokens: dict[str, int]
    """The token that each of these requests gained."""
    finished: tuple[Request, ...]
    invalid_block_ids: frozenset[int]
    """GPU blocks that loads of this step, or ended in it, did not fill."""


class ReferenceEngine:
    """Serves requests on ``runner``. One thread; a call that raises leaves the engine unusable.

    With ``connector_scheduler``, one of ``connector_workers`` a rank, each registered with ``runner.memory``. Both halves,
    the manager under them and the runner stay the caller's, who shuts them down after the engine's last step.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        connector_scheduler: SchedulerHalf | None = None,
        connector_workers: Sequence[WorkerHalf] = (),
        tokens_per_hash: int | None = None,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 16,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``tokens_per_hash`` (None: as many as divide every group's block) must be what the scheduler half was told."""
        memory = runner.memory
        ranks = memory.ranks if connector_scheduler is not None else 0
        if len(connector_workers) != ranks:
            raise ShapeError(f"{len(connector_workers)} connector workers; {ranks} are needed, one a rank")
        if tokens_per_hash is None:
            tokens_per_hash = math.gcd(*(group.tokens_per_block for group in memory.groups))
        self.pool = BlockPool(memory.num_gpu_blocks)
        tables = BlockTables(memory.groups, self.pool, tokens_per_hash=tokens_per_hash)
        self.scheduler = Scheduler(
            tables,
            connector_scheduler,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
        )
        self._runner = runner
        self._connector = connector_scheduler
        self._workers = tuple(connector_workers)
        self._hasher = BlockHasher(runner.layout, tokens_per_hash)
        self._requests: dict[str, Request] = {}
        """Added and not yet finished or aborted."""
        self._ranks_done: Counter[str] = Counter()
        """Ranks that ended the request's load, while some have not."""
        self._now = now

    # -- requests -----------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        salt: bytes = b"",
        lora: bytes = b"",
        limits: RequestLimits | None = None,
        keep_logits: bool = False,
    ) -> Request:
        """Queue a prompt and return its request, which the engine keeps up to date. ``max_tokens``: tokens to generate.

        Raises ``ShapeError`` for an empty prompt, or one too long for the engine; ``ValueError`` if the id is in use.
        """
        if not token_ids or max_tokens < 1:
            raise ShapeError(f"request {request_id!r}: give at least one prompt token and max_tokens of at least 1")
        request = Request(
            request_id=request_id,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            max_tokens=max_tokens,
            salt=salt,
            lora=lora,
            hasher=self._hasher,
            record=RequestRecord(arrival_s=self._now()),
            keep_logits=keep_logits,
        )
        self.scheduler.add(request)
        self._requests[request_id] = request
        if self._connector is not None:
            self._connector.on_new_request(request, limits)
        return request

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is. Unknown and finished ones are passed over: an abort may come late."""
        if self.scheduler.abort(request_id) is not None:
            del self._requests[request_id]

    def reset_prefix_cache(self) -> None:
        """The weights changed: nothing computed so far is used again. Requests that run compute from their tokens anew.

        Call ``manager.reset(epoch)`` first, so that the tiers miss too.
        """
        self.scheduler.preempt_all()
        self.pool.forget_all()
        if self._connector is not None:
            self._connector.reset()

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Requests to serve, or loads and stores under way: keep stepping."""
        return self.scheduler.has_requests or (self._connector is not None and self._connector.has_pending_work())

    def step(self) -> StepResult:
        """Schedule, move KV, compute, and take stock. A step may have nothing to compute."""
        step = self.scheduler.schedule()
        work = [(self._requests[one.request_id], one) for one in step.scheduled]
        if self._connector is None:
            return self._taken_stock(step, self._runner.forward(work), WorkerOutput(), [])

        metadata = self._connector.build_connector_meta(step)
        message = pickle.dumps(metadata)
        for worker in self._workers:
            # A copy each, as when ranks are processes: a worker strikes out what it has done.
            self._before_forward(worker, pickle.loads(message))
        samples = self._runner.forward(work)
        output, done = WorkerOutput(), []
        for worker in self._workers:
            ended, reported = self._after_forward(worker)
            done += self._ended_on_all_ranks(ended)
            output = output.merge(reported)
        # Before the next schedule: what a load brought, or failed to, decides what is computed.
        self._connector.update_connector_output(output)
        return self._taken_stock(step, samples, output, done)

    def run(self, *, deadline_s: float = 600.0) -> None:
        """Step until there is no more work. Raises ``TimeoutError`` after ``deadline_s``."""
        until = self._now() + deadline_s
        while self.has_work:
            if self._now() > until:
                raise TimeoutError(f"requests {sorted(self._requests)} were not served within {deadline_s:g} s")
            if not self.step().scheduled_tokens:
                time.sleep(IDLE_STEP_S)

    @staticmethod
    def _before_forward(worker: WorkerHalf, metadata: ConnectorMetadata) -> None:
        worker.handle_preemptions(metadata)  # blocks that this step overwrites have been copied out after this
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv()

    @staticmethod
    def _after_forward(worker: WorkerHalf) -> tuple[set[str], WorkerOutput]:
        """Requests whose load has ended on this rank, and what it reports."""
        worker.wait_for_save()
        _, finished_recving = worker.get_finished()
        output = worker.take_output()
        worker.clear_connector_metadata()
        return finished_recving, output or WorkerOutput()

    def _ended_on_all_ranks(self, request_ids: set[str]) -> list[str]:
        self._ranks_done.update(request_ids)
        done = [request_id for request_id in request_ids if self._ranks_done[request_id] == len(self._workers)]
        for request_id in done:
            del self._ranks_done[request_id]
        return done

    def _taken_stock(
        self, step: StepOutput, samples: Mapping[str, Sample], output: WorkerOutput, done: Sequence[str]
    ) -> StepResult:
        accepted = self.scheduler.update(step, samples, output.invalid_block_ids, done)
        finished = []
        for request_id, sample in accepted.items():
            request = self._requests[request_id]
            record = request.record
            if record.ttft_s is None:
                record.ttft_s = self._now() - record.arrival_s
            if request.keep_logits and sample.logits is not None:
                record.logits.append(sample.logits)
            if request.is_complete:
                finished.append(self._requests.pop(request_id))
        return StepResult(
            scheduled_tokens=sum(one.scheduled_tokens for one in step.scheduled),
            tokens={request_id: sample.token_id for request_id, sample in accepted.items()},
            finished=tuple(finished),
            invalid_block_ids=output.invalid_block_ids,
        )
