"""Engines with a connector over a real manager, and transfers that fail or dawdle on demand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from tests.connectors.reference.worlds import World
from tiering import KVLayout, TieringConfig, TieringOffloadingManager
from tiering.connectors.reference import (
    CacheGroup,
    Connection,
    ContentRunner,
    ReferenceEngine,
    Request,
    Runner,
    connect,
)
from tiering.memory.transfer.blocks import Placement
from tiering.memory.transfer.factory import open_engines
from tiering.memory.transfer.spec import LOAD, STORE, TransferEngine, TransferResult, TransferSpec, TransferType


@contextlib.contextmanager
def open_manager(
    layout: KVLayout, *tiers: dict[str, Any], capacity: str = "1MiB", epoch: str = "0", **primary: Any
) -> Iterator[TieringOffloadingManager]:
    config = TieringConfig.from_dict(
        {"primary": {"capacity": capacity, "store_when": "computed", **primary}, "tiers": list(tiers)}
    )
    manager = TieringOffloadingManager(config, layout, epoch=epoch)
    manager.sync.open()
    try:
        yield manager
    finally:
        assert manager.sync.close() == []


@contextlib.contextmanager
def connected(runner: Runner, manager: TieringOffloadingManager, **options: Any) -> Iterator[Connection]:
    """Both halves; at the end nothing may be leased or under way."""
    connection = connect(runner, manager, **options)
    try:
        yield connection
    finally:
        connection.shutdown()
        stats = manager.stats()
        assert (stats["open_loads"], stats["open_stores"], stats["holds"]) == (0, 0, 0)
        assert not stats["fused"]


class FaultyTransfers:
    """A transfer engine that holds its jobs back, or fails them, when the test says so."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self.hold_back = False
        """Jobs submitted from now on are not begun before ``let_go``."""
        self.fail = False
        """Jobs submitted from now on copy nothing and fail."""
        self.failed_jobs = 0
        self._held: list[tuple[int, TransferSpec]] = []
        self._failed: list[TransferResult] = []

    @property
    def type(self) -> TransferType:
        return self._engine.type

    @property
    def held_jobs(self) -> int:
        return len(self._held)

    def submit(self, job_id: int, spec: TransferSpec) -> None:
        if self.fail:
            self.failed_jobs += 1
            self._failed.append(TransferResult(job_id, False, 0, 0.0, self.type, "told to fail"))
        elif self.hold_back:
            self._held.append((job_id, spec))
        else:
            self._engine.submit(job_id, spec)

    def let_go(self) -> None:
        self.hold_back = False
        held, self._held = self._held, []
        for job_id, spec in held:
            self.submit(job_id, spec)

    def poll(self) -> list[TransferResult]:
        failed, self._failed = self._failed, []
        return failed + self._engine.poll()

    def wait(self, job_ids: Collection[int]) -> None:
        if any(job_id in job_ids for job_id, _ in self._held):
            self.let_go()  # whoever waits is not kept waiting
        failed = {result.job_id for result in self._failed}
        self._engine.wait([job_id for job_id in job_ids if job_id not in failed])

    def close(self) -> None:
        self.let_go()
        self._engine.close()


class TieredWorld(World):
    """A ``World`` with a connector: its requests' blocks come back from a manager."""

    def __init__(
        self, groups: Sequence[CacheGroup], num_gpu_blocks: int, *tiers: dict[str, Any], **options: Any
    ) -> None:
        self._exit = contextlib.ExitStack()
        runner_options = {name: options.pop(name) for name in ("blocks_per_slot", "ranks") if name in options}
        half_options = {
            name: options.pop(name) for name in ("load_in_step_bytes_max", "prompt_only") if name in options
        }
        primary = {name: options.pop(name) for name in ("capacity", "store_when", "policy") if name in options}
        self.runner = ContentRunner(groups, num_gpu_blocks=num_gpu_blocks, **runner_options)
        self.manager = self._exit.enter_context(open_manager(self.runner.layout, *tiers, **primary))
        self.connection = self._exit.enter_context(connected(self.runner, self.manager, **half_options))
        self.engine = engine_on(self.runner, self.connection, **options)
        self.requests: list[Request] = []
        ranks = range(self.runner.memory.ranks)
        faulty = [faulty_transfers(self.connection, rank, self.runner, self.manager) for rank in ranks]
        self.loads = [transfers[LOAD] for transfers in faulty]
        """Of each rank."""
        self.stores = [transfers[STORE] for transfers in faulty]

    def __enter__(self) -> TieredWorld:
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    def reset(self, weights: bytes) -> None:
        """New weights: what was computed before counts no more."""
        self.runner.weights = weights
        asyncio.run(self.manager.reset(weights.hex()))
        self.engine.reset_prefix_cache()

    def evict_gpu_blocks(self) -> None:
        """Distractors take every GPU block, as other requests would: nothing is left in the engine's own cache."""
        pool = self.engine.pool
        pool.release(pool.allocate(pool.free_blocks))


def engine_on(runner: Runner, connection: Connection, **options: Any) -> ReferenceEngine:
    return ReferenceEngine(
        runner, connector_scheduler=connection.scheduler, connector_workers=connection.workers, **options
    )


def faulty_transfers(
    connection: Connection, rank: int, runner: Runner, manager: TieringOffloadingManager
) -> dict[TransferType, FaultyTransfers]:
    """Loads and stores of this rank go through those returned, from now on."""
    memory, groups = runner.memory, manager.layout.groups
    sizes = zip(groups, memory.groups, strict=True)
    placement = Placement(tuple(ours.tokens_per_block // gpu.tokens_per_block for ours, gpu in sizes), memory.ranks)
    engines = open_engines(manager.parts.arena, memory.device_blocks(rank), placement, rank)
    faulty = {direction: FaultyTransfers(engine) for direction, engine in engines.items()}
    for transfers in faulty.values():
        connection.workers[rank].register_engine(transfers)
    return faulty
