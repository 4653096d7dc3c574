"""The reference engine over ``ContentRunner``, a manager and both halves: every byte that a request reads is checked."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.connectors.transfers import HeldEngine
from tiering import FlushReport, TieringConfig, TieringOffloadingManager
from tiering.connectors import OffloadingConnectorScheduler, OffloadingConnectorWorker
from tiering.connectors.reference import CacheGroup, ContentRunner, ReferenceEngine, Request, Sample, StepResult
from tiering.connectors.requests import ScheduledRequest, StepOutput
from tiering.connectors.wire import ConnectorMetadata, WorkerOutput
from tiering.core.invariants import check
from tiering.core.transitions import PrimaryState
from tiering.memory.transfer.blocks import Placement
from tiering.memory.transfer.factory import open_engines
from tiering.memory.transfer.spec import LOAD, STORE
from tiering.runtime.clock import Clock

FULL = CacheGroup("full", 4, (0, 1), 32)
WINDOW = CacheGroup("sliding_window(10)", 4, (2,), 32)
WIDE = CacheGroup("sliding_window(20)", 8, (2,), 32)
RECURRENT = CacheGroup("recurrent", 4, (3,), 32)

SLOT_BYTES = 4096


IO_TURNS = 48
"""Turns of the manager's loop in which all that is due there and does not hang gets done."""


class WeightedRunner(ContentRunner):
    """Content that depends on the weights in use as well: another set of them, other bytes and other tokens."""

    weights = b""

    def forward(self, work: Sequence[tuple[Request, ScheduledRequest]]) -> dict[str, Sample]:
        return super().forward([(dataclasses.replace(r, salt=self.weights + r.salt), one) for r, one in work])

    def last_token(self, request: Request) -> int:
        """What must follow all the tokens of the request but the last."""
        return self.expected_tokens(request.token_ids[:-1], 1, salt=self.weights + request.salt, lora=request.lora)[0]


class Wiretap:
    """The scheduler's half, and a copy of all that passes between it and the workers."""

    def __init__(self, half: OffloadingConnectorScheduler, ranks: int) -> None:
        self._half = half
        self._ranks = ranks
        self.sent: list[ConnectorMetadata] = []
        """One a step."""
        self.steps: list[StepOutput] = []
        self.reports: Counter[int] = Counter()
        """Ranks that have reported, by job."""
        self.on_new_request = half.on_new_request
        self.get_num_new_matched_tokens = half.get_num_new_matched_tokens
        self.update_state_after_alloc = half.update_state_after_alloc
        self.request_finished = half.request_finished
        self.has_pending_work = half.has_pending_work
        self.reset = half.reset

    def build_connector_meta(self, step: StepOutput) -> ConnectorMetadata:
        self.steps.append(step)
        self.sent.append(self._half.build_connector_meta(step))
        return self.sent[-1]

    def update_connector_output(self, output: WorkerOutput) -> None:
        self.reports.update({job: len(report.ranks) for job, report in output.jobs.items()})
        self._half.update_connector_output(output)

    @property
    def open_jobs(self) -> set[int]:
        """Sent, and not reported by all ranks."""
        sent = {job for metadata in self.sent for job in [*metadata.load_jobs, *metadata.store_jobs]}
        return {job for job in sent if self.reports[job] < self._ranks}


class Rig:
    """One engine with its connector. ``span``: GPU blocks in one of ours. ``held``: copies wait for a release."""

    def __init__(
        self,
        groups: Sequence[CacheGroup] = (FULL,),
        *,
        slots: int = 64,
        gpu_blocks: int = 64,
        ranks: int = 1,
        span: int = 1,
        config: Mapping[str, Any] | None = None,
        step_tokens: int = 64,
        clock: Clock | None = None,
        held: bool = False,
        **options: Any,
    ) -> None:
        self.groups = tuple(groups)
        self.span = span
        self.runner = WeightedRunner(groups, num_gpu_blocks=gpu_blocks, ranks=ranks, blocks_per_slot=span)
        slot_bytes = sum(-(-group.block_bytes // SLOT_BYTES) * SLOT_BYTES for group in self.runner.layout.groups)
        settings = {**(config or {})}
        settings["primary"] = {"capacity": slots * slot_bytes, "store_reserve": "0%", **settings.get("primary", {})}
        self.manager = TieringOffloadingManager(TieringConfig.from_dict(settings), self.runner.layout, clock=clock)
        self.manager.sync.open()
        tokens = [group.tokens_per_block for group in groups]
        self.tokens_per_hash = min(tokens)
        self.scheduler = OffloadingConnectorScheduler(
            self.manager, gpu_tokens_per_block=tokens, tokens_per_hash=self.tokens_per_hash, world_size=ranks, **options
        )
        self.workers = [OffloadingConnectorWorker(rank=rank) for rank in range(ranks)]
        self.copies: list[HeldEngine] = []
        """Of each rank both directions, if they are ``held``."""
        for rank, worker in enumerate(self.workers):
            placement = Placement((span,) * len(self.groups), ranks)
            blocks, arena = self.runner.memory.device_blocks(rank), self.manager.parts.arena
            worker.register_kv_caches(blocks, placement, arena)
            if held:
                for engine in open_engines(arena, blocks, placement, rank).values():
                    self.copies.append(HeldEngine(engine))
                    worker.register_engine(self.copies[-1])
        self.wire = Wiretap(self.scheduler, ranks)
        self.engine = ReferenceEngine(
            self.runner,
            connector_scheduler=self.wire,
            connector_workers=self.workers,
            max_num_batched_tokens=step_tokens,
        )
        self.added = 0
        self._by_id: dict[str, Request] = {}
        self._right: dict[tuple[bytes, int, bytes], bytes] = {}

    @property
    def stores(self) -> list[HeldEngine]:
        """By rank."""
        return [engine for engine in self.copies if engine.type == STORE]

    @property
    def loads(self) -> list[HeldEngine]:
        return [engine for engine in self.copies if engine.type == LOAD]

    @property
    def requests(self) -> list[Request]:
        """All that were ever added."""
        return list(self._by_id.values())

    def add(self, prompt: Sequence[int], max_tokens: int = 1, **options: Any) -> Request:
        self.added += 1
        request = self.engine.add_request(f"r{self.added}", prompt, max_tokens=max_tokens, **options)
        self._by_id[request.request_id] = request
        return request

    def step(self) -> StepResult:
        result = self.engine.step()
        unfilled = result.invalid_block_ids
        wrong = [block for block in self.runner.wrong_blocks if block.block_id not in unfilled]
        assert not wrong, f"a request read bytes that are not its tokens': {wrong}"
        for request_id, token in result.tokens.items():
            assert token == self.runner.last_token(self._by_id[request_id]), request_id
        return result

    def keys(self, request: Request, group: int = 0) -> list[bytes]:
        """Keys of the request's full blocks: the hash of a block's last token, and the group."""
        per_block = self.manager.layout.groups[group].tokens_per_block // self.tokens_per_hash
        return [content + group.to_bytes(4, "big") for content in request.block_hashes[per_block - 1 :: per_block]]

    def right_bytes(self, request: Request, group: int, block: int) -> bytes:
        """What the block of ours holds, by the runner's tokens alone: a shard a rank, each its GPU blocks in order."""
        key = (self.runner.weights, group, self.keys(request, group)[block])
        if key not in self._right:
            self._right[key] = b"".join(
                self.runner.block_content(
                    request.token_ids,
                    block * self.span + part,
                    group=group,
                    rank=rank,
                    salt=self.runner.weights + request.salt,
                    lora=request.lora,
                ).tobytes()
                for rank in range(self.runner.memory.ranks)
                for part in range(self.span)
            )
        return self._right[key]

    def check_slots(self) -> None:
        """Every READY block of these requests holds, in its slot, what its tokens stand for."""
        world, arena = self.manager.parts.core.world, self.manager.parts.arena
        for request in self.requests:
            for group in range(len(self.groups)):
                for index, key in enumerate(self.keys(request, group)):
                    block = world.blocks.get(key)
                    if block is None or block.state is not PrimaryState.READY:
                        continue
                    right = self.right_bytes(request, group, index)
                    found = arena.array(group)[block.slot, : len(right)]
                    assert np.array_equal(found, np.frombuffer(right, np.uint8)), (
                        f"block {index} of group {group} of {request.request_id} is stored with wrong bytes"
                    )

    @property
    def step_tokens(self) -> int:
        """A prefix that all groups' blocks cover is a multiple of this."""
        return math.lcm(*(group.tokens_per_block for group in self.manager.layout.groups))

    def ready(self) -> set[bytes]:
        """Keys that the primary tier has, whole."""
        pools = self.manager.parts.core.world.pools
        owners = [block for pool in pools for block in pool.owner]
        return {block.key for block in owners if block is not None and block.state is PrimaryState.READY}

    def flush(self) -> FlushReport:
        """Every demotion that is queued or owed has ended."""
        return asyncio.run(self.manager.flush())

    def turn(self) -> None:
        """Let the manager's tiers do what is due and does not hang."""
        self.manager.parts.io.run(_turns(), 20.0)

    def run(self, steps_max: int = 3000) -> None:
        for _ in range(steps_max):
            if not self.engine.has_work:
                return
            if not self.step().scheduled_tokens:
                self.turn()  # it waits for the tiers: their thread comes first
        raise AssertionError(f"not served within {steps_max} steps")

    def land(self) -> None:
        """Step until every copy that is under way has ended; requests run on."""
        self.step()
        while self.scheduler.stats()["open_jobs"]:
            self.step()

    def serve(self, prompt: Sequence[int], max_tokens: int = 1, **options: Any) -> Request:
        """Add a request and run until nothing is left to do."""
        request = self.add(prompt, max_tokens, **options)
        if self.copies:
            self.finish()
        else:
            self.run()
        return request

    def finish(self, steps_max: int = 300) -> None:
        """Run until nothing is left to do, each ``held`` copy as late as it can be."""
        for _ in range(steps_max):
            if not self.engine.has_work:
                return
            self.turn()
            if not self.step().scheduled_tokens:
                for engine in self.copies:
                    engine.release(1)
            self.check_slots()
        raise AssertionError(f"not served within {steps_max} steps")

    def forget_gpu(self) -> None:
        """The engine's own prefix cache finds nothing any more; nothing runs."""
        self.engine.pool.forget_all()

    def settle(self) -> None:
        """Everything has ended: nothing is leased, held, lent or under way, and the core agrees with itself."""
        if self.copies:
            self.finish()
        else:
            self.run()
        stats = self.manager.stats()
        assert not stats["fused"], stats["fused_reason"]
        assert stats["primary"]["leases"] == stats["open_loads"] == stats["open_stores"] == stats["holds"] == 0
        assert not self.scheduler.has_pending_work()
        assert self.engine.pool.free_blocks == self.engine.pool.num_gpu_blocks - 1
        check(self.manager.parts.core.world)

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()
        self.manager.sync.close()


async def _turns() -> None:
    for _ in range(IO_TURNS):
        await asyncio.sleep(0)


@contextmanager
def rig(groups: Sequence[CacheGroup] = (FULL,), **options: Any) -> Iterator[Rig]:
    """A rig that must have settled when the block ends well."""
    made = Rig(groups, **options)
    try:
        yield made
        made.settle()
    finally:
        made.close()


def prompt(seed: int, tokens: int) -> list[int]:
    """``tokens`` tokens that no other seed's prompt begins with."""
    return [(seed * 7919 + position * 31) % 1000 for position in range(tokens)]
