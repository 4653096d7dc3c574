"""Our manager behind vLLM's ``OffloadingManager``: key by key, and only what is in CPU memory can be loaded.

Each answer lasts one step: a HIT is leased when it is given, and what no ``prepare_load`` took is released when the step's
schedule ends. A block that lies in a secondary tier alone is promoted while its request waits; few requests at a time may
do that, each within the configuration's ``load_bytes_per_request``, and past the slowest tier's deadline the answer is a
miss.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tiering.connectors.vllm.layout import EngineBlocks
from tiering.connectors.vllm.leases import Leases
from tiering.connectors.vllm.managers import reset
from tiering.connectors.vllm.paths import before, run_from
from tiering.connectors.vllm.pauses import EmptySteps
from tiering.connectors.vllm.transfers import SlotsLoadStoreSpec
from tiering.connectors.wire import ArenaAddress
from tiering.manager import TieringOffloadingManager
from tiering.runtime.clock import Clock
from tiering.runtime.gate import KEYS_PER_HOLD_MAX
from tiering.types import BlockKey, Outcome

PROMOTING_REQUESTS_MAX: Final = 8
"""Requests that may have blocks promoted at a time; others wait for their turn, at most until their deadline."""
PRIMARY: Final = "primary"
STEPS_UNDER_WAY_MAX: Final = 2
"""Steps that vLLM may have handed to its workers and not yet heard of, without pipeline parallelism."""


@dataclass(slots=True)
class _Request:
    """What one request asked in this step, and what is promoted for it."""

    asked: dict[int, dict[BlockKey, None]] = field(default_factory=dict)
    """By group, in the order asked: keys that some tier has."""
    verdicts: dict[BlockKey, LookupResult] = field(default_factory=dict)
    """Of this step: keys that are not in CPU memory. Judged ahead, a run at a time."""
    lacks: bool = False
    """It was told to wait for a block that a secondary tier has."""
    jobs: dict[int, int] = field(default_factory=dict)
    """Promotions under way, and their groups."""
    ended: list[int] = field(default_factory=list)
    """Promotions that ended: their blocks stay leased until the request has asked again."""
    promoted: set[BlockKey] = field(default_factory=set)
    kept: set[BlockKey] = field(default_factory=set)
    """Blocks that it found or stored: whatever follows them is no orphan."""
    given_up: bool = False
    """Its deadline has passed, or its promotions have ended: what is not in CPU memory is a miss."""
    until_s: float | None = None
    """When it stops waiting; set by the first answer that lets it wait."""

    def start_over(self) -> None:
        """It runs, or was preempted: its next lookup is a new one."""
        self.given_up, self.until_s = False, None


@dataclass(slots=True)
class _Store:
    """A granted store job of ours, part of one of vLLM's."""

    job: int
    keys: tuple[BlockKey, ...]


class TieringSpecManager(OffloadingManager):
    """vLLM's scheduler calls; one thread. The manager is open, its arena shared."""

    def __init__(
        self, manager: TieringOffloadingManager, blocks: EngineBlocks, arena: ArenaAddress, pp_size: int
    ) -> None:
        self._manager = manager
        self._sync = manager.sync
        self._blocks = blocks
        self._arena = arena
        self._group = {group_id: group for group, group_id in enumerate(blocks.group_ids)}
        self._clock: Clock = manager.parts.clock
        self._wait_s = max((tier.deadline_s for tier in manager.config.tiers), default=0.0)
        self._leases = Leases(self._sync)
        self._requests: dict[str, _Request] = {}
        self._stores: dict[BlockKey, _Store] = {}
        self._orphans: list[tuple[int, list[_Store], list[BlockKey]]] = []
        """What a reset left in flight: the step from which on the workers have let go of it."""
        self._empty_steps = EmptySteps()
        self._step = 0
        self._polled = False
        """Whether this step knows which promotions have ended."""
        self._grace_steps = max(STEPS_UNDER_WAY_MAX, pp_size) + 1

    @property
    def tiering(self) -> TieringOffloadingManager:
        """The tiers."""
        return self._manager

    # -- requests -----------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._requests[req_context.req_id] = _Request()
        return RequestOffloadingContext()

    def promotes(self, req_id: str) -> bool:
        """Whether blocks are being promoted for a request."""
        return req_id in self._requests and bool(self._requests[req_id].jobs)

    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._requests.pop(req_context.req_id, None)
        if request is not None:
            self._let_go(request)

    # -- lookup -------------------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        group = self._group.get(get_offload_group_idx(key))
        if group is None:
            return LookupResult.MISS
        if not self._polled:
            self._poll()
        request = self._requests.setdefault(req_context.req_id, _Request())
        verdict = LookupResult.HIT if key in self._leases else request.verdicts.get(key)
        if verdict is None:
            run = run_from(key, req_context, KEYS_PER_HOLD_MAX)
            if self._leases.offer(run, group):
                verdict = LookupResult.HIT
            else:
                self._judge(run, group, request, req_context)
                verdict = request.verdicts.get(key, LookupResult.MISS)
        if verdict in (LookupResult.HIT, LookupResult.HIT_PENDING):
            request.asked.setdefault(group, {})[key] = None
            request.lacks = request.lacks or verdict is LookupResult.HIT_PENDING
        return verdict

    def _judge(self, run: list[BlockKey], group: int, request: _Request, req_context: ReqContext) -> None:
        """Verdicts for a run whose first block is not READY, up to the first miss or the next READY block."""
        if request.given_up or not req_context.load_tier_filter.allows(Medium.STORAGE, None):
            return
        now_s = self._clock.now()
        if request.until_s is not None and now_s >= request.until_s:
            request.given_up = True
            return
        result = self._sync.lookup_each(run, group=group)
        for position, (key, where) in enumerate(zip(run, result.where, strict=False)):
            waits = position in result.awaited
            if where == PRIMARY or (where is None and not waits):
                break
            request.verdicts[key] = LookupResult.RETRY if where is None else LookupResult.HIT_PENDING
        if request.verdicts and request.until_s is None:
            request.until_s = now_s + self._wait_s

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        request = self._requests.get(req_context.req_id)
        return CacheHitSource.DISK if request is not None and key in request.promoted else CacheHitSource.HOST

    # -- load ---------------------------------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        slots = [self._leases.take(key) for key in keys]
        request = self._requests.get(req_context.req_id)
        if request is not None:
            request.kept.update(keys)
            for group, asked in request.asked.items():
                self._sync.touch(list(asked), group=group)
        return SlotsLoadStoreSpec(slots, self._arena)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        for key in keys:
            self._leases.give_back(key)

    # -- store --------------------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """The longest heads that fit, one a contiguous run; None only if there is room for nothing at all."""
        granted: list[BlockKey] = []
        slots: list[int] = []
        refused = False
        kept = self._requests.setdefault(req_context.req_id, _Request()).kept
        for group, run in self._runs(keys, req_context):
            start = 0
            while start < len(run):
                parent = run[start - 1] if start else self._parent(run[0], group, kept, req_context)
                plan = self._sync.plan_store(run[start:], parent=parent, group=group)
                if plan.job:
                    store = _Store(plan.job, tuple(grant.key for grant in plan.grants))
                    self._stores.update(dict.fromkeys(store.keys, store))
                    granted += store.keys
                    slots += [grant.slot for grant in plan.grants]
                kept.update(run[start : start + plan.stop])
                start += plan.stop
                if plan.refused or not plan.stop:
                    refused = True
                    break
        if refused and not granted:
            return None
        return PrepareStoreOutput(granted, SlotsLoadStoreSpec(slots, self._arena), [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        outcome = Outcome.OK if success else Outcome.failed("the copy to CPU memory failed")
        self._complete({store.job: store for key in keys if (store := self._stores.get(key))}.values(), outcome)

    def _complete(self, stores: Iterable[_Store], outcome: Outcome) -> None:
        for store in stores:
            self._sync.complete(store.job, [outcome] * len(store.keys))
            for key in store.keys:
                if self._stores.get(key) is store:
                    del self._stores[key]

    def _runs(self, keys: Collection[BlockKey], req_context: ReqContext) -> list[tuple[int, list[BlockKey]]]:
        """Contiguous runs: where the scheduler left out a block, a new run begins."""
        runs: list[tuple[int, list[BlockKey]]] = []
        last: tuple[int, int] | None = None
        for key in keys:
            group = self._group[get_offload_group_idx(key)]
            end = req_context.get_offload_key_position(key)
            tokens = self._blocks.layout.groups[group].tokens_per_block
            if end is None or last != (group, end - tokens):
                runs.append((group, []))
            runs[-1][1].append(key)
            last = (group, end) if end is not None else None
        return runs

    def _parent(self, key: BlockKey, group: int, kept: set[BlockKey], req_context: ReqContext) -> BlockKey | None:
        """The key before ``key``, if the request has it in the tiers.

        Of several groups some may have windows, whose blocks are of use without those before them.
        """
        if len(self._blocks.layout.groups) > 1:
            return None
        parent = before(key, self._blocks.layout.groups[group].tokens_per_block, req_context)
        return parent if parent in kept else None

    # -- steps --------------------------------------------------------------------------------------------------------

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Leases that nobody took end; promotions begin, and those that ended are let go."""
        self._step += 1
        if not self._polled:
            self._poll()
        self._polled = False
        self._empty_steps.step(waiting=any(request.jobs for request in self._requests.values()))
        now_s = self._clock.now()
        for request in self._requests.values():
            overdue = request.until_s is not None and now_s >= request.until_s
            if overdue:
                self._stop_promoting(request)
            if overdue or request.asked or request.verdicts:
                self._release(request.ended)
            if request.lacks and not request.jobs and not request.given_up:
                self._promote(request)
            request.asked, request.verdicts, request.lacks = {}, {}, False
        for req_id in (*context.new_req_ids, *context.preempted_req_ids):
            if req_id in self._requests:
                self._requests[req_id].start_over()
        self._leases.end_step()
        for orphans in [orphans for orphans in self._orphans if orphans[0] <= self._step]:
            self._orphans.remove(orphans)
            self._complete(orphans[1], Outcome.failed("the weights changed"))
            for key in orphans[2]:
                self._leases.give_back(key)

    def has_pending_work(self) -> bool:
        return bool(self._orphans) or any(request.jobs for request in self._requests.values())

    def _promote(self, request: _Request) -> None:
        """Lease and promote what the request was told, as one run a group: its own head must not make room for its tail."""
        if sum(bool(other.jobs) for other in self._requests.values()) >= PROMOTING_REQUESTS_MAX:
            return
        for group, asked in request.asked.items():
            plan = self._sync.plan_load(list(asked), group=group)
            request.promoted.update(list(asked)[len(plan.slots) :])
            if plan.done:
                request.ended.append(plan.job)
            else:
                request.jobs[plan.job] = group
        # What is ready now is all that can be had: asking again would promote the same blocks again.
        request.given_up = not request.jobs

    def _poll(self) -> None:
        """Once a step, before the first lookup: what was promoted is READY, and leased until the request has asked."""
        self._polled = True
        ended = {job for job, _ in self._sync.poll()}
        for request in self._requests.values():
            for job in request.jobs.keys() & ended:
                del request.jobs[job]
                request.ended.append(job)
                request.given_up = not request.jobs

    def _stop_promoting(self, request: _Request) -> None:
        self._release(list(request.jobs))
        request.jobs.clear()

    def _let_go(self, request: _Request) -> None:
        """Nothing is promoted or kept for it any more."""
        self._stop_promoting(request)
        self._release(request.ended)

    def _release(self, jobs: list[int]) -> None:
        for job in jobs:
            self._sync.release(job)
        jobs.clear()

    # -- the whole ----------------------------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Every tier misses from now on. vLLM forgets its jobs under way; ours end once no worker can be at them."""
        for request in self._requests.values():
            self._let_go(request)
            request.start_over()
            request.kept.clear()
        self._leases.end_step()
        under_way = list({store.job: store for store in self._stores.values()}.values())
        self._orphans.append((self._step + self._grace_steps, under_way, self._leases.taken()))
        self._stores.clear()
        reset(self._manager)

    def shutdown(self) -> None:
        for request in self._requests.values():
            self._let_go(request)
        for _, stores, _ in self._orphans:
            self._complete(stores, Outcome.CANCELLED)
        self._complete({store.job: store for store in self._stores.values()}.values(), Outcome.CANCELLED)
        self._leases.end_all()
        self._manager.sync.close()
