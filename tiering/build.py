"""The one composition root: from a configuration and a layout to the parts of a running manager."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tiering import registry
from tiering.api import AfterHits, Backend, BackendConfig
from tiering.config import TieringConfig
from tiering.core.commands import FlushDone, JobDone, SlotsFreed
from tiering.core.journal import Journal
from tiering.core.machine import TieringCore
from tiering.core.state import CoreSpec, DemoteRule, PoolSpec, TierSpec
from tiering.errors import ConfigError
from tiering.memory.arena import SLOT_ALIGNMENT_BYTES, Arena, PoolShape
from tiering.runtime.clock import Clock
from tiering.runtime.driver import Driver
from tiering.runtime.event_log import EventLog
from tiering.runtime.gate import Gate, Notification
from tiering.runtime.ports import LaneSpec, Notice
from tiering.runtime.threads import IoThread
from tiering.runtime.waiting import Mailbox, Pulse, Tally
from tiering.support.units import format_bytes
from tiering.types import KVLayout, Namespace

JOURNAL_EVENTS_MAX = 10_000
COPY_THREADS = 2


@dataclass(slots=True)
class Parts:
    """A manager's organs, wired and not yet started."""

    config: TieringConfig
    layout: KVLayout
    clock: Clock
    arena: Arena
    core: TieringCore
    gate: Gate
    driver: Driver
    io: IoThread
    loads: Mailbox
    """Ends of load jobs."""
    flushes: Mailbox
    """Ends of flushes."""
    freed: Pulse
    """Beats when a caller that was told to come back may."""
    progress: Pulse
    """Beats when the driver reported anything, or a fill ended."""
    restore_due: dict[int, Pulse]
    """One a hold, while it lasts."""
    calls: Tally
    """Whatever may touch a caller's buffer or a slot on a caller's behalf: a close waits for its end."""
    reads: Tally
    """Of these, copies out of slots: a reset waits for their end."""
    copies: ThreadPoolExecutor
    """Threads that copy between callers' buffers and slots."""
    notices: dict[str, int]
    """How often something that a person should know happened, by kind."""
    events: EventLog | None
    """What came to tiers and went from them; None if nobody wants to know."""


def build(config: TieringConfig, layout: KVLayout, clock: Clock, *, shared_arena: bool = False) -> Parts:
    """Wire everything up; nothing is started, opened or connected, but the arena is mapped."""
    shapes = pool_shapes(config, layout)
    backends = {name: _factory(tier) for name, tier in zip(config.tier_names, config.tiers, strict=True)}
    arena = Arena(
        shapes, shared=shared_arena
    )  # first: a capacity beyond the machine must not cost minutes of bookkeeping
    spec = _core_spec(config, layout, shapes, backends)
    journal = Journal(JOURNAL_EVENTS_MAX, spec)
    core = TieringCore(spec, observer=journal)
    loads, flushes, freed, progress = Mailbox(), Mailbox(), Pulse(), Pulse()
    restore_due: dict[int, Pulse] = {}
    notices: dict[str, int] = {}

    def notify(notifications: Sequence[Notification]) -> None:
        for item in notifications:
            if isinstance(item, JobDone):
                loads.deliver(item.job, item)
            elif isinstance(item, FlushDone):
                flushes.deliver(item.job, item)
            elif isinstance(item, SlotsFreed):
                freed.beat()
            elif (due := restore_due.get(item.hold)) is not None:
                due.beat()

    def on_fuse() -> None:
        loads.close(None)
        flushes.close(None)
        freed.beat()

    def on_notice(notice: Notice) -> None:
        notices[notice.kind] = notices.get(notice.kind, 0) + 1

    def on_death(error: BaseException | None) -> None:
        """The I/O thread is gone: nothing that is still in flight will be reported, so nobody may wait for it."""
        notices["io_thread_died"] = 1
        gate.end_loads(clock.now())
        gate.end_flushes(clock.now())
        freed.beat()
        progress.beat()

    events = EventLog(config.tier_names, config.events.batches_max) if config.events.recorded else None
    gate = Gate(core, notify=notify, progress=progress.beat, on_fuse=on_fuse, dump=journal.dump, events=events)
    driver = Driver(
        sink=gate,
        slots=arena,
        pool_bytes=[group.block_bytes for group in layout.groups],
        clock=clock,
        on_notice=on_notice,
    )
    for tier, (name, factory) in zip(config.tiers, backends.items(), strict=True):
        driver.add_tier(LaneSpec(name=name, deadline_s=tier.deadline_s, ops_max=tier.ops_max), factory)
    gate.connect(driver.submit)
    return Parts(
        config=config,
        layout=layout,
        clock=clock,
        arena=arena,
        core=core,
        gate=gate,
        driver=driver,
        io=IoThread(on_death=on_death),
        loads=loads,
        flushes=flushes,
        freed=freed,
        progress=progress,
        restore_due=restore_due,
        calls=Tally(),
        reads=Tally(),
        copies=ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="kvtiering-copy"),
        notices=notices,
        events=events,
    )


def namespace_of(layout: KVLayout, epoch: str) -> Namespace:
    return Namespace.of(layout, epoch=epoch)


def slot_bytes_of(block_bytes: int) -> int:
    return -(-block_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def pool_shapes(config: TieringConfig, layout: KVLayout) -> list[PoolShape]:
    """Split the primary capacity so that every group's slots cover the same number of tokens.

    Raises ``ConfigError`` if a group would get no slot.
    """
    capacity = config.primary.capacity_bytes
    sizes = [slot_bytes_of(group.block_bytes) for group in layout.groups]
    per_token = [size / group.tokens_per_block for size, group in zip(sizes, layout.groups, strict=True)]
    shapes = []
    for size, weight in zip(sizes, per_token, strict=True):
        share = capacity if len(sizes) == 1 else math.floor(capacity * (weight / sum(per_token)))
        slots = share // size
        if slots < 1:
            need = math.ceil(max(s * sum(per_token) / w for s, w in zip(sizes, per_token, strict=True)))
            raise ConfigError(
                f"primary.capacity: {format_bytes(capacity)} holds no block of {format_bytes(size)};"
                f" set at least {format_bytes(need)}"
            )
        shapes.append(PoolShape(slots, size))
    return shapes


def _factory(config: BackendConfig) -> Callable[[], Backend]:
    cls = registry.backend_class(config)
    return lambda: cls(config)  # type: ignore[call-arg]  # the contract: a backend is constructed with its config alone


def _core_spec(
    config: TieringConfig, layout: KVLayout, shapes: Sequence[PoolShape], backends: Mapping[str, Callable[[], Backend]]
) -> CoreSpec:
    primary_policy = registry.policy_class(config.primary.policy)
    pools = tuple(
        PoolSpec(
            slots=shape.slots,
            payload_bytes=group.block_bytes,
            tokens_per_block=group.tokens_per_block,
            reserve_slots=min(config.primary.reserve_slots(shape.slots), shape.slots - 1),
            policy=primary_policy,
        )
        for shape, group in zip(shapes, layout.groups, strict=True)
    )
    block_bytes_min = min(group.block_bytes for group in layout.groups)
    tiers = tuple(
        _tier_spec(index, name, tier, backends[name](), config, block_bytes_min)
        for index, (name, tier) in enumerate(zip(config.tier_names, config.tiers, strict=True))
    )
    return CoreSpec(
        pools=pools,
        tiers=tiers,
        load_bytes_per_request_max=config.primary.load_bytes_per_request_max,
        events=config.events.recorded,
        restore=config.restore.enabled,
    )


def _tier_spec(
    index: int, name: str, tier: BackendConfig, backend: Backend, config: TieringConfig, block_bytes_min: int
) -> TierSpec:
    caps = backend.capabilities
    if caps.exclusive:
        need = caps.overhead_bytes + caps.stored_bytes(block_bytes_min)
        if tier.capacity_bytes is None:
            raise ConfigError(f"tiers[{index}].capacity: tier {name!r} needs a capacity")
        if tier.capacity_bytes < need:
            raise ConfigError(
                f"tiers[{index}].capacity: {format_bytes(tier.capacity_bytes)} holds no block; tier {name!r} needs at"
                f" least {format_bytes(need)} for this layout"
            )
    rule: DemoteRule = tier.demote_when.after_hits if isinstance(tier.demote_when, AfterHits) else tier.demote_when
    return TierSpec(
        name=name,
        capabilities=caps,
        capacity_bytes=tier.capacity_bytes,
        demote_rule=rule,
        queue_bytes_max=tier.queue_bytes_max,
        batch_blocks_max=min(tier.batch_blocks_max, caps.batch_blocks_max),
        policy=registry.policy_class(tier.policy or config.primary.policy),
        block_bytes_min=block_bytes_min,
    )
