"""The scheduler's half: lives in the engine's scheduler, decides by the manager, and never waits."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiering.connectors.geometry import Geometry
from tiering.connectors.jobs import JobTable
from tiering.connectors.loading import Loader
from tiering.connectors.matching import match_prefix
from tiering.connectors.requests import NULL_BLOCK, EngineRequest, RequestLimits, ScheduledRequest, StepOutput
from tiering.connectors.state import RequestState
from tiering.connectors.storing import Storer
from tiering.connectors.wire import ArenaAddress, ConnectorMetadata, WorkerOutput
from tiering.errors import ClosedError
from tiering.manager import LOAD_DEADLINE_S, TieringOffloadingManager
from tiering.runtime.gate import KEYS_PER_HOLD_MAX

Tables = tuple[Sequence[int], ...]

FILL_DEADLINE_S = 0.2
"""How long a lookup waits at least for a block that is being stored or promoted; a tier's deadline may be longer."""


@dataclass(slots=True)
class MatchCounters:
    requests: int = 0
    """Prompts that were looked up, once each time that the request had no GPU blocks."""
    query_tokens: int = 0
    """Of their prompts, what the engine's own cache lacked."""
    hit_tokens: int = 0
    """Of these, what was promised and allocated for."""
    resumed_hit_tokens: int = 0
    """Of these, for requests that had run before and were preempted."""
    asked_again: int = 0
    overdue_lookups: int = 0
    """Lookups that got no answer in time and counted as misses."""


class OffloadingConnectorScheduler:
    """One for an engine. Not thread-safe: the engine's scheduler calls it, from one thread.

    A step: ``get_num_new_matched_tokens`` and ``update_state_after_alloc`` for requests that are admitted,
    ``request_finished`` for those that ended, then ``build_connector_meta``; ``update_connector_output`` with what the
    workers report. A request that it does not know, or knows no more, is nobody's error.
    """

    def __init__(
        self,
        manager: TieringOffloadingManager,
        *,
        gpu_tokens_per_block: Sequence[int],
        tokens_per_hash: int,
        world_size: int = 1,
        prompt_only: bool = False,
        load_in_step_bytes_max: int = 0,
    ) -> None:
        """``manager`` is open and stays the caller's; its layout has a group for each of the engine's.

        ``gpu_tokens_per_block``: of each group; the layout's are multiples. ``tokens_per_hash``: of a request's
        ``block_hashes``. ``world_size``: workers that each copy their part of a block. ``prompt_only``: blocks with
        generated tokens are not stored. ``load_in_step_bytes_max``: loads up to this size, all of it in the primary tier,
        happen inside the step that admits the request; longer ones are asynchronous.
        """
        config = manager.config
        self._manager = manager
        self._clock = manager.parts.clock
        self._sync = manager.sync
        self._geometry = Geometry.of(manager.layout, gpu_tokens_per_block, tokens_per_hash)
        self._in_step_bytes_max = load_in_step_bytes_max
        self._lookup_deadline_s = max(FILL_DEADLINE_S, *(tier.deadline_s for tier in config.tiers), 0.0)
        self._jobs = JobTable(self._sync, world_size)
        self._loader = Loader(self._sync, self._geometry, self._jobs, LOAD_DEADLINE_S)
        self._storer = Storer(
            self._sync,
            self._geometry,
            self._jobs,
            config.primary.store_when,
            config.restore.enabled,
            config.restore.bytes_per_step_max,
            prompt_only,
        )
        self._requests: dict[str, RequestState] = {}
        self._leaving: list[RequestState] = []
        """Finished since the last step: their last blocks are stored in the next."""
        self._leased: dict[str, RequestState] = {}
        self._allocated: set[int] = set()
        """GPU blocks given to requests that wait for a load, since the last step."""
        self.counters = MatchCounters()
        self._arena = _address_of(manager)

    # -- admission ----------------------------------------------------------------------------------------------------

    def on_new_request(self, request: EngineRequest, limits: RequestLimits | None = None) -> None:
        """Register a request with limits of its own. Without it a request is known from its first match on."""
        if (old := self._requests.get(request.request_id)) is not None:
            self._forget(old)
        self._requests[request.request_id] = RequestState.of(request, limits or RequestLimits(), self._geometry)

    def _forget(self, state: RequestState) -> None:
        """Nothing is leased, held or read for it any more."""
        self._release_leases(state)
        self._loader.abort(state.request.request_id)
        self._storer.let_go(state)

    def get_num_new_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens behind the first ``num_computed_tokens`` that the tiers can give, and whether the load is asynchronous.

        None: answers are on their way, ask again in a later step. What is READY and reported is leased until the end of
        the step. No I/O but probes is started, and no slot is taken.
        """
        state = self._state(request)
        self._detach(state)  # the engine has taken its blocks, and tells in this step
        self._storer.let_go(state)
        state.stale = False
        state.extend_keys(self._geometry)
        self._release_leases(state)
        state.computed_tokens = num_computed_tokens
        tokens_max = self._tokens_max(state, num_computed_tokens)
        keys = [part.keys for part in state.groups]
        match = match_prefix(self._sync, self._geometry, keys, num_computed_tokens, tokens_max, state.limits.load_tiers)
        if match.pending and self._may_ask_again(state):
            self.counters.asked_again += 1
            return None, False
        self._count(state, num_computed_tokens, tokens_max)
        if match.tokens <= num_computed_tokens:
            return 0, False
        all_ready = self._lease(state, num_computed_tokens, match.tokens)
        state.in_step = all_ready and self._bytes(num_computed_tokens, match.tokens) <= self._in_step_bytes_max
        return match.tokens - num_computed_tokens, not state.in_step

    def _tokens_max(self, state: RequestState, computed_tokens: int) -> int:
        """The engine always computes one token at least: its logits are the answer's first token."""
        tokens = state.request.num_tokens - 1
        if state.limits.load_tokens_max is not None:
            tokens = min(tokens, computed_tokens + state.limits.load_tokens_max)
        if state.loads_failed:
            tokens = computed_tokens
        for group, part in zip(self._geometry.groups, state.groups, strict=True):
            tokens = min(tokens, len(part.keys) * group.tokens_per_block)
        return max(tokens, computed_tokens)

    def _may_ask_again(self, state: RequestState) -> bool:
        now_s = self._clock.now()
        if state.asked_until_s is None:
            state.asked_until_s = now_s + self._lookup_deadline_s
        if now_s < state.asked_until_s:
            return True
        self.counters.overdue_lookups += 1
        return False

    def _count(self, state: RequestState, computed_tokens: int, tokens_max: int) -> None:
        """Statistics and recency: once a request, not once a poll."""
        if state.counted:
            return
        state.counted = True
        self.counters.requests += 1
        self.counters.query_tokens += state.request.num_tokens - computed_tokens
        for group, part in zip(self._geometry.groups, state.groups, strict=True):
            first = group.first_needed(tokens_max // group.tokens_per_block * group.tokens_per_block)
            self._sync.touch(part.keys[first:], group=group.group)

    def _lease(self, state: RequestState, computed_tokens: int, tokens: int) -> bool:
        """Lease the READY blocks of what is reported. True if that is all of it."""
        all_ready = True
        for group, part in zip(self._geometry.groups, state.groups, strict=True):
            wanted = group.to_load(computed_tokens, tokens)
            for start in range(wanted.start, wanted.stop, KEYS_PER_HOLD_MAX):
                stop = min(wanted.stop, start + KEYS_PER_HOLD_MAX)
                plan = self._sync.lease(part.keys[start:stop], group=group.group)
                if plan.job:
                    state.leases.append(plan.job)
                if len(plan.slots) < stop - start:
                    all_ready = False
                    break
        self._leased[state.request.request_id] = state
        return all_ready

    def _bytes(self, computed_tokens: int, tokens: int) -> int:
        groups = self._manager.layout.groups
        return sum(
            len(group.to_load(computed_tokens, tokens)) * groups[group.group].block_bytes
            for group in self._geometry.groups
        )

    def update_state_after_alloc(self, request: EngineRequest, block_ids: Tables, num_external_tokens: int) -> None:
        """GPU blocks were allocated: ``block_ids`` is the whole table, by group. Starts the load that was reported."""
        state = self._state(request)
        state.set_tables(block_ids)
        if num_external_tokens <= 0:
            return
        computed = state.computed_tokens
        self._loader.begin(
            request.request_id,
            [part.keys for part in state.groups],
            computed,
            computed + num_external_tokens,
            tuple(map(tuple, block_ids)),
            in_step=state.in_step,
            now_s=self._clock.now(),
        )
        self._release_leases(state)
        self.counters.hit_tokens += num_external_tokens
        if state.preempted:
            self.counters.resumed_hit_tokens += num_external_tokens
        for group, table in zip(self._geometry.groups, block_ids, strict=True):
            self._allocated.update(table[computed // group.gpu_tokens_per_block :])
        self._allocated.discard(NULL_BLOCK)

    # -- the step -----------------------------------------------------------------------------------------------------

    def build_connector_meta(self, step: StepOutput) -> ConnectorMetadata:
        """What the workers do in this step. Call it once a step, also when nothing is scheduled."""
        for state in list(self._leased.values()):
            self._release_leases(state)
        load_jobs = self._loader.collect(self._clock.now())
        self._preempted(step)
        staying = [known for scheduled in step.scheduled if (known := self._scheduled(scheduled)) is not None]
        given_away = frozenset(self._allocated | step.allocated_block_ids)
        self._allocated = set()
        # A manager that was closed takes no more; the engine goes on without it.
        with contextlib.suppress(ClosedError):
            self._storer.pass_over(self._leaving, staying)
            self._storer.given_away(given_away)
        for state in self._leaving:
            self._storer.let_go(state)
        self._leaving = []
        earlier = self._jobs.reading(given_away)
        store_jobs, urgent = self._storer.take(given_away)
        flush = earlier | urgent
        self._jobs.counters.flushed_jobs += len(flush)
        return ConnectorMetadata(load_jobs, store_jobs, flush, self._arena)

    def _preempted(self, step: StepOutput) -> None:
        """Requests that lost their blocks: what these held is stored in this step, as far as it is not yet."""
        for name in step.preempted:
            if (state := self._requests.get(name)) is not None:
                state.counted, state.preempted, state.asked_until_s = False, True, None  # looked up anew
                self._detach(state)
                state.stale = False

    def _detach(self, state: RequestState) -> None:
        """The blocks that the request had go their own way; it may have got others, and run on them, in this very step."""
        if not state.confirmed_tokens:
            return
        self._leaving.append(old := state.detached(self._geometry))
        self._storer.moved(old)

    def _scheduled(self, scheduled: ScheduledRequest) -> RequestState | None:
        state = self._requests.get(scheduled.request_id)
        if state is None or state.stale:
            return None
        if scheduled.computed_tokens < state.confirmed_tokens:
            # A load failed, or drafts were rejected: what was behind is not what its key says, and is held no more.
            self._storer.let_go(state)
        state.set_tables(scheduled.block_ids)
        state.confirmed_tokens = scheduled.computed_tokens + scheduled.scheduled_tokens
        state.extend_keys(self._geometry)
        return state

    def update_connector_output(self, output: WorkerOutput) -> None:
        """What workers reported, merged or rank by rank. Reports of jobs that are not known are counted and ignored."""
        for job in self._jobs.report(output):
            if job.failed and not job.is_store and (state := self._requests.get(job.request_id)) is not None:
                state.loads_failed = True
                # Its blocks are not what their keys say until they are computed.
                self._storer.let_go(state)

    # -- the end ------------------------------------------------------------------------------------------------------

    def request_finished(self, request: EngineRequest, block_ids: Tables) -> tuple[bool, None]:
        """The request ended, at whatever state, and its GPU blocks are about to be freed: they may be, at once.

        What is still to be stored of them is stored in the next step, and fenced if somebody gets the blocks before. One
        that waits for an asynchronous load keeps its blocks until ``finished_recving`` names it.
        """
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False, None
        self._release_leases(state)
        self._loader.abort(request.request_id)
        if state.confirmed_tokens:
            state.set_tables(block_ids)
            state.extend_keys(self._geometry)
            self._leaving.append(state)
        else:
            self._storer.let_go(state)
        return False, None

    def has_pending_work(self) -> bool:
        """Steps are needed, be they empty, for stores and loads to end."""
        return bool(self._jobs.jobs or self._loader.waiting or self._leaving or self._leased)

    def reset(self) -> None:
        """The weights change: nothing that is held or was computed counts any more. The manager's ``reset`` is the caller's.

        Jobs in flight end as they do; the manager knows that they are of the old weights. A request whose load is with the
        workers then gets bytes of the old weights: the engine takes its blocks away when that load ends. A request that runs on with the
        blocks it has stores nothing any more, until it has lost them.
        """
        for state in self._requests.values():
            self._release_leases(state)
            state.stale = any(part.table for part in state.groups)
            self._storer.let_go(state)
        self._loader.reset()
        for state in self._leaving:
            self._storer.let_go(state)
        self._leaving = []
        self._storer.forget_residents()

    def shutdown(self) -> None:
        """Give back all that is leased, held or on the wire. Shut the workers down first: what they have not reported counts
        as failed, and its slots may be used again. The manager's close is the caller's."""
        self.reset()
        self._loader.waiting.clear()
        self._jobs.abandon()

    def stats(self) -> dict[str, Any]:
        """Counters as plain values, monotonic, and gauges of this moment. Sizes in blocks and tokens."""
        return {
            **dataclasses.asdict(self.counters),
            **dataclasses.asdict(self._jobs.counters),
            **dataclasses.asdict(self._storer.counters),
            "short_tokens": self._loader.short_tokens,
            "open_jobs": len(self._jobs.jobs),
            "waiting_loads": len(self._loader.waiting),
            "known_requests": len(self._requests),
        }

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _state(self, request: EngineRequest) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = RequestState.of(request, RequestLimits(), self._geometry)
        state.request = request
        return state

    def _release_leases(self, state: RequestState) -> None:
        for job in state.leases:
            self._sync.release(job)
        state.leases.clear()
        self._leased.pop(state.request.request_id, None)


def _address_of(manager: TieringOffloadingManager) -> ArenaAddress | None:
    """How workers in other processes reach the slots; None for an arena of this process alone."""
    arena = manager.parts.arena
    if not arena.shared:
        return None
    return ArenaAddress(os.getpid(), arena.fd, tuple((pool.slots, pool.slot_bytes) for pool in arena.pools))
