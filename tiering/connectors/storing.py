"""Stores on the scheduler's side: what is re-stored, what is stored for the first time, and when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tiering.connectors.geometry import Geometry, GroupGeometry
from tiering.connectors.jobs import CoreJob, JobTable, SpecParts
from tiering.connectors.state import GroupState, RequestState
from tiering.connectors.wire import StoreJob
from tiering.core.events import StorePlan
from tiering.runtime.gate import KEYS_PER_HOLD_MAX, STORE_KEYS_PER_HOLD_MAX
from tiering.sync import SyncFace
from tiering.types import BlockKey, Outcome

COMPUTED, GPU_EVICTED, ADAPTIVE = "computed", "gpu_evicted", "adaptive"
_NOBODY: Final = ""
"""The request of a job for blocks that no request has any more."""


@dataclass(slots=True)
class _Copies:
    """One request's job in the making."""

    spec: SpecParts
    core_jobs: list[CoreJob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Resident:
    """A block that stays on the GPU without a request, until the engine gives its blocks away."""

    group: GroupGeometry
    key: BlockKey
    gpu_block_ids: tuple[int, ...]
    run: int
    """One number for all blocks of a group that a request left behind."""
    position: int


@dataclass(slots=True)
class StoreCounters:
    null_blocks: int = 0
    """Positions without a GPU block of their own: outside a window."""
    evicted_stores: int = 0
    """Blocks stored because the engine gave their GPU blocks away (``gpu_evicted``)."""


@dataclass(slots=True)
class Storer:
    """Makes the store jobs of a step. ``prompt_only``: what was generated is not stored."""

    sync: SyncFace
    geometry: Geometry
    jobs: JobTable
    store_when: str
    restore: bool
    restore_bytes_max: int
    prompt_only: bool
    counters: StoreCounters = field(default_factory=StoreCounters)
    _held: dict[int, tuple[RequestState, GroupGeometry, GroupState]] = field(default_factory=dict)
    """By hold."""
    _windowed: bool = False
    _runs: int = 0
    _residents: dict[int, _Resident] = field(default_factory=dict)
    """By each of their GPU blocks. ``gpu_evicted`` alone."""
    _copies: dict[tuple[str, bool], _Copies] = field(default_factory=dict)
    """By request, and whether it stays."""

    def __post_init__(self) -> None:
        self._windowed = any(group.windowed for group in self.geometry.groups)

    # -- the passes of one step ---------------------------------------------------------------------------------------

    def pass_over(self, leaving: Sequence[RequestState], staying: Sequence[RequestState]) -> None:
        """First what was lost, then what is new; of requests that leave the GPU and of those that stay.

        ``leaving``: finished or preempted, their GPU blocks still hold what they held. ``staying``: those that this step
        schedules; what the others hold is re-stored as well.
        """
        early = self._stores_early()
        due = [state for state in leaving if self.store_when != GPU_EVICTED]
        if self._windowed:
            for state in (*due, *staying):
                self._trim(state)
        self._restore(due, everybody=early)
        for state in due:
            self._store_new(state, stays=False)
        for state in staying if early else ():
            if state.confirmed_tokens >= state.settled_tokens:
                self._store_new(state, stays=True)
        if self.store_when == GPU_EVICTED:
            for state in leaving:
                self._remember(state)

    def _stores_early(self) -> bool:
        """Blocks are stored as soon as they are computed."""
        if self.store_when == ADAPTIVE:
            return all(self.sync.free_slots(group=group.group) for group in self.geometry.groups)
        return self.store_when == COMPUTED

    def given_away(self, gpu_block_ids: Iterable[int]) -> None:
        """The engine gave these blocks to somebody else; until the forward pass they hold what they held."""
        lost: dict[tuple[int, BlockKey], _Resident] = {}
        for block in gpu_block_ids:
            resident = self._residents.get(block)
            if resident is not None:
                lost[resident.group.group, resident.key] = resident
                self._forget(resident)
        run: list[_Resident] = []
        for resident in sorted(lost.values(), key=lambda r: (r.run, r.position)):
            if run and (resident.run != run[-1].run or resident.position != run[-1].position + 1):
                self._store_lost(run)
                run = []
            run.append(resident)
        if run:
            self._store_lost(run)

    def _store_lost(self, run: Sequence[_Resident]) -> None:
        """Blocks that follow each other. The one before may still be on the GPU alone, so no parent is named."""
        group = run[0].group
        plan = self.sync.plan_store([resident.key for resident in run], group=group.group)
        self.counters.evicted_stores += len(plan.grants)
        self._take((_NOBODY, False), group, plan, [run[grant.index].gpu_block_ids for grant in plan.grants])

    def take(self, given_away: frozenset[int]) -> tuple[dict[int, StoreJob], set[int]]:
        """The jobs made since the last call; and those of them that must be copied before this step's forward pass.

        These read blocks in ``given_away``. Jobs of requests that stay never are among them: what they read there is what
        the forward pass is about to fill.
        """
        made: dict[int, StoreJob] = {}
        urgent: set[int] = set()
        for (request_id, stays), copies in self._copies.items():
            ids = copies.spec.gpu_block_ids
            job_id = self.jobs.begin(request_id, copies.core_jobs, ids, is_store=True)
            made[job_id] = StoreJob(request_id, copies.spec.store_spec())
            if not stays and not given_away.isdisjoint(ids):
                urgent.add(job_id)
        self._copies.clear()
        return made, urgent

    def moved(self, state: RequestState) -> None:
        """What is held is remembered under this state from now on."""
        for group, part in zip(self.geometry.groups, state.groups, strict=True):
            if part.hold:
                self._held[part.hold] = (state, group, part)

    def forget_residents(self) -> None:
        self._residents.clear()

    # -- stores -------------------------------------------------------------------------------------------------------

    def _store_new(self, state: RequestState, *, stays: bool) -> None:
        """Offer the blocks from the cursor on, group by group; the cursor stops where no slot was left."""
        all_done = True
        for group, part in zip(self.geometry.groups, state.groups, strict=True):
            end = self._end(state, group, part)
            while part.cursor < end:
                start = part.cursor
                run = self._run(group, part, start, end)
                if not run:  # null, or partly so
                    self.counters.null_blocks += 1
                    self._advance(state, group, part, start + 1, stays=stays)
                    continue
                keys = part.keys[run.start : run.stop]
                # A window's head is gone for good: what stands before it is no reason to refuse it.
                parent = part.keys[run.start - 1] if run.start and not group.windowed else None
                # Who stays may come back for what does not fit; who leaves may not.
                plan = self.sync.plan_store(keys, parent=parent, group=group.group, patient=stays)
                ids = [group.gpu_blocks(part.table, run.start + grant.index) for grant in plan.grants]
                self._take((state.request.request_id, stays), group, plan, ids)
                self._advance(state, group, part, run.start + plan.stop, stays=stays)
                if plan.stop < len(keys):
                    all_done = False
                    break
        if all_done:
            state.settled_tokens = min(
                (part.cursor + 1) * group.tokens_per_block
                for group, part in zip(self.geometry.groups, state.groups, strict=True)
            )

    def _end(self, state: RequestState, group: GroupGeometry, part: GroupState) -> int:
        tokens = state.confirmed_tokens
        if state.limits.store_tokens_max is not None:
            tokens = min(tokens, state.limits.store_tokens_max)
        if self.prompt_only:
            tokens = min(tokens, state.request.num_prompt_tokens)
        return min(tokens // group.tokens_per_block, len(part.keys), len(part.table) // group.span)

    def _run(self, group: GroupGeometry, part: GroupState, start: int, end: int) -> range:
        """The blocks from ``start`` on that are on the GPU in one piece."""
        stop = start
        while stop < min(end, start + STORE_KEYS_PER_HOLD_MAX) and group.gpu_blocks(part.table, stop) is not None:
            stop += 1
        return range(start, stop)

    def _advance(
        self, state: RequestState, group: GroupGeometry, part: GroupState, cursor: int, *, stays: bool
    ) -> None:
        """Everything below the new cursor is held from now on: whatever of it the primary tier loses is due again."""
        fresh = part.keys[part.cursor : cursor]
        part.cursor = max(part.cursor, cursor)
        if not self.restore or not stays or not fresh:
            return
        if not part.hold:
            part.hold = self.sync.hold(fresh[:KEYS_PER_HOLD_MAX], group=group.group)
            fresh = fresh[KEYS_PER_HOLD_MAX:]
            if part.hold:
                self._held[part.hold] = (state, group, part)
        if part.hold and fresh:
            self.sync.extend_hold(part.hold, fresh)

    # -- re-store -----------------------------------------------------------------------------------------------------

    def _restore(self, leaving: Sequence[RequestState], *, everybody: bool) -> None:
        """Slots for what is held and was lost, ranked over all requests, within the step's byte budget."""
        if not self._held:
            return
        last_chance = [part.hold for state in leaving for part in state.groups if part.hold]
        if not everybody and not last_chance:
            return
        leaves = set(map(id, leaving))
        holds = None if everybody else last_chance
        for hold, stores in self.sync.plan_restores(holds, bytes_max=self.restore_bytes_max).plans:
            state, group, part = self._held[hold]
            ids = [group.gpu_blocks(part.table, grant.index) for grant in stores.grants]
            self._take((state.request.request_id, id(state) not in leaves), group, stores, ids)

    def _trim(self, state: RequestState) -> None:
        """What left a sliding window is on the GPU no more."""
        for group, part in zip(self.geometry.groups, state.groups, strict=True):
            if not part.hold or not group.windowed:
                continue
            first = part.held_from
            while first < part.cursor and group.gpu_blocks(part.table, first) is None:
                first += 1
            if first > part.held_from:
                part.held_from = first
                self.sync.trim_hold(part.hold, first)

    def let_go(self, state: RequestState) -> None:
        """The GPU blocks are gone: nothing is held any more, and cursors start again."""
        for hold in state.lost_blocks():
            del self._held[hold]
            self.sync.drop_hold(hold)

    # -- gpu_evicted --------------------------------------------------------------------------------------------------

    def _remember(self, state: RequestState) -> None:
        """The request leaves; its blocks stay in the engine's cache until it needs the room."""
        for group, part in zip(self.geometry.groups, state.groups, strict=True):
            self._runs += 1
            for position in range(self._end(state, group, part)):
                ids = group.gpu_blocks(part.table, position)
                if ids is None:
                    continue
                for block in ids:
                    if (old := self._residents.get(block)) is not None:
                        self._forget(old)
                resident = _Resident(group, part.keys[position], ids, self._runs, position)
                self._residents.update(dict.fromkeys(ids, resident))

    def _forget(self, resident: _Resident) -> None:
        for block in resident.gpu_block_ids:
            self._residents.pop(block, None)

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def _take(
        self, whose: tuple[str, bool], group: GroupGeometry, plan: StorePlan, ids: Sequence[tuple[int, ...] | None]
    ) -> None:
        """Put a plan's grants into the job of this step; ``ids``: the GPU blocks of each."""
        if not plan.job:
            return
        copied = tuple(blocks is not None for blocks in ids)
        if not any(copied):
            self.sync.complete(plan.job, [Outcome.CANCELLED] * len(ids))
            return
        copies = self._copies.setdefault(whose, _Copies(SpecParts(len(self.geometry.groups))))
        copies.core_jobs.append((plan.job, copied))
        for grant, blocks in zip(plan.grants, ids, strict=True):
            if blocks is not None:  # else it was held, and the GPU has it no more
                copies.spec.add(group.group, blocks, grant.slot)
