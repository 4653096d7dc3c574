"""Loads on the scheduler's side: from an allocation, through promotions that may take their time, to a job for the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tiering.connectors.geometry import Geometry, GroupGeometry
from tiering.connectors.jobs import JobTable, SpecParts
from tiering.connectors.requests import NULL_BLOCK
from tiering.connectors.wire import LoadJob
from tiering.core.events import LoadPlan
from tiering.errors import ClosedError
from tiering.runtime.gate import KEYS_PER_HOLD_MAX
from tiering.sync import SyncFace
from tiering.types import BlockKey


@dataclass(slots=True)
class _Part:
    """A run of one group's blocks, at most as many as one load of the manager's takes."""

    group: GroupGeometry
    blocks: range
    core_job: int
    slots: tuple[int, ...]
    done: bool


@dataclass(slots=True)
class Load:
    """What was promised to one request, until it is on the wire."""

    request_id: str
    computed_tokens: int
    tokens: int
    tables: tuple[Sequence[int], ...]
    in_step: bool
    until_s: float
    parts: list[_Part]
    aborted: bool = False
    """Nobody waits for the blocks: nothing is copied, and none is reported missing."""
    void: bool = False
    """What it was to bring is of the old weights: all of it is missing."""

    @property
    def done(self) -> bool:
        return all(part.done for part in self.parts)


@dataclass(slots=True)
class Loader:
    """Loads of all requests that wait for promotions."""

    sync: SyncFace
    geometry: Geometry
    jobs: JobTable
    deadline_s: float
    waiting: dict[int, Load] = field(default_factory=dict)
    """By a number: an aborted load may still be here when its request's id is used again."""
    _begun: int = 0
    _part_of: dict[int, _Part] = field(default_factory=dict)
    short_tokens: int = 0
    """Tokens that were promised and could not be given."""

    def begin(
        self,
        request_id: str,
        keys: Sequence[Sequence[BlockKey]],
        computed_tokens: int,
        tokens: int,
        tables: tuple[Sequence[int], ...],
        *,
        in_step: bool,
        now_s: float,
    ) -> None:
        """Lease and promote what lifts the request's prefix from ``computed_tokens`` to ``tokens``."""
        parts: list[_Part] = []
        for group in self.geometry.groups:
            wanted = group.to_load(computed_tokens, tokens)
            for start in range(wanted.start, wanted.stop, KEYS_PER_HOLD_MAX):
                blocks = range(start, min(wanted.stop, start + KEYS_PER_HOLD_MAX))
                plan = self._plan(keys[group.group][blocks.start : blocks.stop], group)
                part = _Part(group, blocks, plan.job, plan.slots, plan.done)
                parts.append(part)
                if not plan.done:
                    self._part_of[plan.job] = part
        until_s = now_s + self.deadline_s
        load = Load(request_id, computed_tokens, tokens, tables, in_step, until_s, parts)
        self._begun += 1
        self.waiting[self._begun] = load
        if in_step:  # the engine counts on this very step: what is not there by now is missing
            self._end(load)

    def _plan(self, keys: Sequence[BlockKey], group: GroupGeometry) -> LoadPlan:
        try:
            return self.sync.plan_load(keys, group=group.group)
        except ClosedError:  # promised before the close: the engine computes what does not come
            return LoadPlan(0, True, ())

    def abort(self, request_id: str) -> None:
        """The request is gone: what is queued for it need not be read. Its load still ends on the wire, with nothing."""
        for load in self.waiting.values():
            if load.request_id == request_id and not load.aborted:
                load.aborted = True
                self._give_back(load)

    def reset(self) -> None:
        """The weights changed: whatever is on its way is of no use."""
        for load in self.waiting.values():
            load.void = True
            self._give_back(load)

    def _give_back(self, load: Load) -> None:
        for part in load.parts:
            self._part_of.pop(part.core_job, None)
            if part.core_job:
                self.sync.release(part.core_job)
            part.core_job, part.slots, part.done = 0, (), True

    def collect(self, now_s: float) -> dict[int, LoadJob]:
        """Jobs of all loads that wait for nothing any more."""
        self._poll()
        for load in self.waiting.values():
            if not load.done and now_s >= load.until_s:
                self._end(load)
        ready = [number for number, load in self.waiting.items() if load.done]
        return dict(self._on_the_wire(self.waiting.pop(number)) for number in ready)

    def _end(self, load: Load) -> None:
        for part in load.parts:
            if not part.done:
                self.sync.end_load(part.core_job)
        self._poll()

    def _poll(self) -> None:
        for core_job, slots in self.sync.poll():
            if (part := self._part_of.pop(core_job, None)) is not None:
                part.slots, part.done = slots, True

    def _on_the_wire(self, load: Load) -> tuple[int, LoadJob]:
        tokens = load.computed_tokens if load.aborted or load.void else self._given(load)
        if not load.aborted:
            self.short_tokens += load.tokens - tokens
        spec = SpecParts(len(self.geometry.groups))
        missing: list[int] = []
        for part in load.parts:
            self._add(load, part, tokens, spec, missing)
        core_jobs = [(part.core_job, (True,) * len(part.slots)) for part in load.parts if part.core_job]
        job_id = self.jobs.begin(load.request_id, core_jobs, spec.gpu_block_ids, is_store=False)
        told = () if load.aborted else tuple(missing)
        return job_id, LoadJob(load.request_id, spec.load_spec(), told, load.in_step)

    def _given(self, load: Load) -> int:
        """Tokens of the prefix that all groups can really give."""
        short = [part for part in load.parts if len(part.slots) < len(part.blocks)]
        if not short:
            return load.tokens
        if any(group.windowed for group in self.geometry.groups):
            # The window that was loaded is that of the whole prefix: it is of no use to a shorter one.
            return load.computed_tokens
        step = self.geometry.step_tokens
        tokens = min((part.blocks.start + len(part.slots)) * part.group.tokens_per_block for part in short)
        return max(load.computed_tokens, tokens // step * step)

    def _add(self, load: Load, part: _Part, tokens: int, spec: SpecParts, missing: list[int]) -> None:
        """Blocks below ``tokens`` are copied, what lies behind is missing. The first may be on the GPU in part."""
        group, table = part.group, load.tables[part.group.group]
        gpu_computed = load.computed_tokens // group.gpu_tokens_per_block
        for index, block in enumerate(part.blocks):
            first, stop = max(block * group.span, gpu_computed), (block + 1) * group.span
            while first < stop and table[first] == NULL_BLOCK:  # the engine's window may begin inside our block
                first += 1
            ids = table[first:stop]
            if not ids:
                continue
            if tokens > load.computed_tokens and (block + 1) * group.tokens_per_block <= tokens:
                if not spec.slots[group.group]:
                    spec.first_index[group.group] = first - block * group.span
                spec.add(group.group, ids, part.slots[index])
            else:
                missing += ids
