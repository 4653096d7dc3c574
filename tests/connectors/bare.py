"""The scheduler's half alone, driven call by call: no engine, no workers, no bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tiering import Group, KVLayout, Outcome, TieringConfig, TieringOffloadingManager
from tiering.connectors import OffloadingConnectorScheduler
from tiering.connectors.requests import ScheduledRequest, StepOutput
from tiering.connectors.wire import ConnectorMetadata, JobReport, WorkerOutput
from tiering.core.invariants import check
from tiering.runtime.clock import Clock
from tiering.testing import VirtualClock

OK = Outcome.OK
TOKENS = 4
SLOT_BYTES = 4096

Tables = tuple[Sequence[int], ...]


@dataclass
class Prompt:
    """A request as an engine keeps it. Prompts of one ``content`` share their prefix."""

    request_id: str
    num_tokens: int
    content: str = "a"
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens

    @property
    def block_hashes(self) -> list[bytes]:
        return [hash_of(self.content, n) for n in range(self.num_tokens // TOKENS)]

    def keys(self, group: int = 0, *, hashes_per_block: int = 1) -> list[bytes]:
        """Of its full blocks."""
        hashes = self.block_hashes[hashes_per_block - 1 :: hashes_per_block]
        return [content + group.to_bytes(4, "big") for content in hashes]


def hash_of(content: str, n: int) -> bytes:
    return hashlib.sha256(f"{content} {n}".encode()).digest()


class Bare:
    """``kinds``: (kind, tokens a block) of each group; the engine's blocks are ``TOKENS`` tokens."""

    def __init__(
        self,
        kinds: Sequence[tuple[str, int]] = (("full", TOKENS),),
        *,
        slots: int = 64,
        config: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        self.layout = KVLayout(groups=[Group(kind, tokens, 64) for kind, tokens in kinds], model="bare")
        settings = {"flush_on_close": 0, **(config or {})}
        settings["primary"] = {
            "capacity": slots * SLOT_BYTES * len(kinds),
            "store_reserve": "0%",
            "store_when": "computed",
            **settings.get("primary", {}),
        }
        self.clock = clock or VirtualClock()
        self.manager = TieringOffloadingManager(TieringConfig.from_dict(settings), self.layout, clock=self.clock)
        self.manager.sync.open()
        self.half = OffloadingConnectorScheduler(
            self.manager, gpu_tokens_per_block=[TOKENS] * len(kinds), tokens_per_hash=TOKENS, **options
        )
        self.ranks = options.get("world_size", 1)

    def step(
        self,
        *scheduled: tuple[Prompt, Tables, int, int],
        preempted: Iterable[str] = (),
        allocated: Iterable[int] = (),
    ) -> ConnectorMetadata:
        """``scheduled``: (request, tables, computed tokens, scheduled tokens)."""
        rows = [
            ScheduledRequest(one.request_id, tables, computed, tokens) for one, tables, computed, tokens in scheduled
        ]
        return self.half.build_connector_meta(StepOutput(rows, frozenset(preempted), frozenset(allocated)))

    def report(self, metadata: ConnectorMetadata, *, failed: Collection[int] = ()) -> None:
        """All ranks end all jobs of a step."""
        all_ranks, nobody = frozenset(range(self.ranks)), frozenset[int]()
        jobs = [*metadata.load_jobs, *metadata.store_jobs]
        reports = {job: JobReport(all_ranks, all_ranks if job in failed else nobody) for job in jobs}
        self.half.update_connector_output(WorkerOutput(reports))

    def put(self, keys: Sequence[bytes], group: int = 0) -> int:
        """Blocks of somebody else come to the primary tier; how many got a slot."""
        sync = self.manager.sync
        plan = sync.plan_store(keys, group=group)
        if plan.job:
            sync.complete(plan.job, [OK] * len(plan.grants))
        return len(plan.grants)

    def ready(self) -> set[bytes]:
        """Keys that the primary tier has, whole."""
        pools = self.manager.parts.core.world.pools
        return {b.key for pool in pools for b in pool.owner if b is not None and b.state.name == "READY"}

    @property
    def leases(self) -> int:
        leases: int = self.manager.stats()["primary"]["leases"]
        return leases

    def settle(self) -> None:
        """Nothing is left of any request."""
        stats = self.manager.stats()
        assert not stats["fused"], stats["fused_reason"]
        assert self.leases == stats["open_loads"] == stats["open_stores"] == stats["holds"] == 0
        assert not self.half.has_pending_work()
        assert self.half.stats()["known_requests"] == 0
        check(self.manager.parts.core.world)

    def close(self) -> None:
        self.half.shutdown()
        self.manager.sync.close()


@contextmanager
def bare(*args: Any, **options: Any) -> Iterator[Bare]:
    """The half, which must be clean when the block ends well."""
    made = Bare(*args, **options)
    try:
        yield made
        made.settle()
    finally:
        made.close()
