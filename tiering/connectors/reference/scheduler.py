"""Continuous batching: which requests compute which tokens in the next step, on which blocks, and what became of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tiering.connectors.reference.halves import SchedulerHalf
from tiering.connectors.reference.request import Request, RequestState
from tiering.connectors.reference.runner import Sample
from tiering.connectors.reference.tables import BlockTables, CachedPrefix
from tiering.connectors.requests import ScheduledRequest, StepOutput
from tiering.errors import ShapeError


@dataclass(frozen=True, slots=True)
class _Admission:
    """Where the prefix of a request comes from."""

    cached: CachedPrefix
    external_tokens: int = 0
    """Tokens behind it that the connector can load."""
    is_async: bool = False

    @property
    def tokens(self) -> int:
        return self.cached.tokens + self.external_tokens


class Scheduler:
    """Decides; touches no bytes. One thread; ``schedule`` and ``update`` take turns, ``abort`` comes between two steps.

    First come, first served. Running requests go first; when blocks run out, the youngest loses its own and computes
    again later, from the front of the queue.
    """

    def __init__(
        self,
        tables: BlockTables,
        connector: SchedulerHalf | None,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
    ) -> None:
        if max_num_seqs < 1:
            raise ShapeError(f"max_num_seqs is {max_num_seqs}; it must be at least 1")
        needed = max_num_seqs - 1 + tables.chunk_tokens
        if max_num_batched_tokens < needed:
            # A prefill goes on in whole chunks; requests that decode must leave room for one.
            raise ShapeError(
                f"max_num_batched_tokens is {max_num_batched_tokens}; {max_num_seqs} requests and chunks of "
                f"{tables.chunk_tokens} tokens need at least {needed}"
            )
        self.tables = tables
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """By admission, the youngest last."""
        self._connector = connector
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._requests: dict[str, Request] = {}
        """Exactly those in ``waiting`` and ``running``."""
        self._loading_aborted: dict[str, Request] = {}
        """Aborted while a load fills their blocks: they keep them until it has ended."""
        self._preempted: set[str] = set()
        """Lost their blocks since the last ``schedule``."""

    @property
    def has_requests(self) -> bool:
        return bool(self._requests or self._loading_aborted)

    def add(self, request: Request) -> None:
        """Queue it. Raises ``ShapeError`` if it could never run, ``ValueError`` if its id is in use."""
        if request.request_id in self._requests or request.request_id in self._loading_aborted:
            raise ValueError(f"a request {request.request_id!r} exists already")
        tokens = request.num_prompt_tokens + request.max_tokens - 1  # the last token is chosen and not computed
        needed = self.tables.blocks_needed_alone(tokens, self._max_num_batched_tokens)
        if needed >= self.tables.pool.num_gpu_blocks:
            raise ShapeError(
                f"request {request.request_id!r} needs {needed} GPU blocks for {tokens} tokens; there are "
                f"{self.tables.pool.num_gpu_blocks - 1}: raise num_gpu_blocks"
            )
        self._requests[request.request_id] = request
        self.waiting.append(request)

    # -- one step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepOutput:
        """Choose the tokens of the next step, and allocate for them. ``update`` must follow."""
        scheduled: list[ScheduledRequest] = []
        all_went_on = self._schedule_running(scheduled)
        # What a preempted request just lost would only go back and forth.
        if all_went_on:
            self._schedule_waiting(scheduled)
        preempted, self._preempted = frozenset(self._preempted), set()
        return StepOutput(tuple(scheduled), preempted, self.tables.pool.take_given_away())

    def _schedule_running(self, scheduled: list[ScheduledRequest]) -> bool:
        """Tokens for the requests that run, the oldest first. False: some had to be preempted for it."""
        all_went_on = True
        index = 0
        while index < len(self.running):
            request = self.running[index]
            tokens = self._tokens_to_compute(request, scheduled)
            while tokens and not self.tables.extend(request, tokens):
                all_went_on = False
                victim = self.running.pop()
                self._preempt(victim)
                self.waiting.appendleft(victim)
                if victim is request:
                    return False
            if tokens:
                scheduled.append(self._scheduled(request, tokens))
            index += 1
        return all_went_on

    def _schedule_waiting(self, scheduled: list[ScheduledRequest]) -> None:
        """Admit from the queue, in order. Where one finds no room, those behind it wait too, unless they have blocks."""
        no_room = False
        for request in list(self.waiting):
            if len(self.running) >= self._max_num_seqs:
                return
            if request.state is RequestState.WAITING_FOR_REMOTE_KVS or (no_room and not request.blocks):
                continue
            if request.request_id in self._preempted:
                continue  # the connector hears of the loss in this step, before new blocks come in a later one
            admitted = self._go_on(request, scheduled) if request.blocks else self._admit(request, scheduled)
            no_room |= not admitted
        if no_room and not scheduled and not self._is_loading:
            self._give_up_a_loaded_one()

    def _admit(self, request: Request, scheduled: list[ScheduledRequest]) -> bool:
        """Find its prefix, allocate, tell the connector. False: no room, nothing was changed."""
        admission = self._find_prefix(request)
        if admission is None:
            return True  # the connector has asked a tier and does not know yet: in a later step
        tokens = 0
        if not admission.is_async:
            tokens = self._tokens_to_compute(request, scheduled, computed_tokens=admission.tokens)
            if not tokens:
                return False
        if not self.tables.admit(request, admission.cached, admission.tokens, tokens):
            return False
        request.record.engine_tokens += admission.cached.tokens
        request.record.tier_tokens += admission.external_tokens
        request.external_tokens = admission.external_tokens
        if self._connector is not None:
            self._connector.update_state_after_alloc(request, self.tables.block_ids(request), admission.external_tokens)
        if admission.is_async:
            request.state = RequestState.WAITING_FOR_REMOTE_KVS
        else:
            self._run(request, tokens, scheduled)
        return True

    def _go_on(self, request: Request, scheduled: list[ScheduledRequest]) -> bool:
        """A request whose asynchronous load has ended begins to compute."""
        tokens = self._tokens_to_compute(request, scheduled)
        if not tokens or not self.tables.extend(request, tokens):
            return False
        if self._connector is not None:
            self._connector.update_state_after_alloc(request, self.tables.block_ids(request), 0)
        self._run(request, tokens, scheduled)
        return True

    def _find_prefix(self, request: Request) -> _Admission | None:
        cached = self.tables.find_cached(request)
        if self._connector is None:
            return _Admission(cached)
        tokens, is_async = self._connector.get_num_new_matched_tokens(request, cached.tokens)
        if tokens is None:
            return None
        return _Admission(cached, tokens, is_async and tokens > 0)

    def _run(self, request: Request, tokens: int, scheduled: list[ScheduledRequest]) -> None:
        self.waiting.remove(request)
        request.state = RequestState.RUNNING
        self.running.append(request)
        scheduled.append(self._scheduled(request, tokens))

    def _scheduled(self, request: Request, tokens: int) -> ScheduledRequest:
        return ScheduledRequest(request.request_id, self.tables.block_ids(request), request.computed_tokens, tokens)

    def _tokens_to_compute(
        self, request: Request, scheduled: list[ScheduledRequest], *, computed_tokens: int | None = None
    ) -> int:
        """What the step's budget leaves it: all it lacks, or else as many whole chunks as fit, perhaps none."""
        begin = request.computed_tokens if computed_tokens is None else computed_tokens
        budget = self._max_num_batched_tokens - sum(one.scheduled_tokens for one in scheduled)
        if request.num_tokens - begin <= budget:
            return request.num_tokens - begin
        chunk = self.tables.chunk_tokens
        return max(0, (begin + budget) // chunk * chunk - begin)

    # -- what became of the step --------------------------------------------------------------------------------------

    def update(
        self,
        step: StepOutput,
        samples: Mapping[str, Sample],
        invalid_block_ids: Collection[int] = (),
        finished_recving: Collection[str] = (),
    ) -> dict[str, Sample]:
        """After the forward pass. ``invalid_block_ids``: blocks that a load did not fill; whatever was computed from them
        is dropped and computed again. ``finished_recving``: requests whose load has ended on all ranks.

        Returns the samples that count: each is now a token of its request.
        """
        accepted: dict[str, Sample] = {}
        for one in step.scheduled:
            request = self._requests[one.request_id]
            request.record.computed_tokens += one.scheduled_tokens
            if self._cut(request, invalid_block_ids):
                if not request.computed_tokens:
                    self.running.remove(request)
                    self._requeue(request)
                continue
            request.computed_tokens += one.scheduled_tokens
            self.tables.cache(request)
            if one.request_id in samples:
                accepted[one.request_id] = samples[one.request_id]
                request.append(samples[one.request_id].token_id)
                if request.is_complete:
                    self._end(request, RequestState.FINISHED)
        for request in self.waiting:
            if request.state is RequestState.WAITING_FOR_REMOTE_KVS:
                self._cut(request, invalid_block_ids)
        for request_id in finished_recving:
            self._load_ended(request_id)
        return accepted

    def _cut(self, request: Request, invalid_block_ids: Collection[int]) -> bool:
        """Whether a load left one of its computed blocks unfilled; then the computed tokens end before the first such."""
        valid_tokens = self.tables.valid_tokens(request, invalid_block_ids) if invalid_block_ids else None
        if valid_tokens is None or valid_tokens == request.computed_tokens:
            return False
        _lose_tokens(request, valid_tokens)
        request.record.failed_loads += 1
        return True

    def _load_ended(self, request_id: str) -> None:
        aborted = self._loading_aborted.pop(request_id, None)
        if aborted is not None:
            self.tables.release(aborted)
            return
        request = self._requests.get(request_id)
        if request is None or request.state is not RequestState.WAITING_FOR_REMOTE_KVS:
            raise RuntimeError(f"the connector ended a load for request {request_id!r}, which waits for none")
        request.state = RequestState.WAITING
        if request.computed_tokens:
            self.tables.cache(request)
        else:
            self._drop_blocks(request)

    # -- ends and preemptions -----------------------------------------------------------------------------------------

    def abort(self, request_id: str) -> Request | None:
        """End a request in whatever state it is; None if there is no such request (any more)."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, RequestState.ABORTED)
        return request

    def preempt_all(self) -> None:
        """Every request loses what it has computed or loaded; a load under way ends first, unused."""
        for request in reversed(self.running):
            self._preempt(request)
            self.waiting.appendleft(request)
        self.running.clear()
        for request in self.waiting:
            if request.state is RequestState.WAITING_FOR_REMOTE_KVS:
                _lose_tokens(request, 0)
            elif request.blocks:
                self._preempt(request)

    @property
    def _is_loading(self) -> bool:
        loading = (request.state is RequestState.WAITING_FOR_REMOTE_KVS for request in self.waiting)
        return bool(self._loading_aborted) or any(loading)

    def _give_up_a_loaded_one(self) -> None:
        """Nothing runs and nothing fits: of the requests that were loaded and wait to run, the youngest starts over."""
        request = next((request for request in reversed(self.waiting) if request.blocks), None)
        if request is not None:
            self._preempt(request)

    def _preempt(self, request: Request) -> None:
        request.record.preemptions += 1
        request.state = RequestState.WAITING
        self._drop_blocks(request)

    def _requeue(self, request: Request) -> None:
        request.state = RequestState.WAITING
        self._drop_blocks(request)
        self.waiting.appendleft(request)

    def _drop_blocks(self, request: Request) -> None:
        self.tables.release(request)
        self._preempted.add(request.request_id)

    def _end(self, request: Request, state: RequestState) -> None:
        if self._connector is not None:
            lent, _ = self._connector.request_finished(request, self.tables.block_ids(request))
            if lent:
                raise RuntimeError(f"the connector wants to keep the blocks of {request.request_id!r}: not supported")
        del self._requests[request.request_id]
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        if request.state is RequestState.WAITING_FOR_REMOTE_KVS:
            self._loading_aborted[request.request_id] = request
        else:
            self.tables.release(request)
        request.state = state


def _lose_tokens(request: Request, valid_tokens: int) -> None:
    """Of what its admission found, only ``valid_tokens`` are of use after all; the last of it came from the tiers."""
    lost_tokens = request.computed_tokens - valid_tokens
    from_tiers = min(lost_tokens, request.external_tokens)
    request.record.tier_tokens -= from_tiers
    request.record.engine_tokens -= lost_tokens - from_tiers
    request.external_tokens -= from_tiers
    request.computed_tokens = valid_tokens
