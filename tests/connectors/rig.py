"""The reference engine over ``ContentRunner``, a manager and both halves: every byte that a request reads is checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tiering import TieringConfig, TieringOffloadingManager
from tiering.connectors import OffloadingConnectorScheduler, OffloadingConnectorWorker
from tiering.connectors.reference import CacheGroup, ContentRunner, ReferenceEngine, Request, StepResult
from tiering.core.invariants import check
from tiering.memory.transfer.blocks import Placement

FULL = CacheGroup("full", 4, (0, 1), 32)
WINDOW = CacheGroup("sliding_window(10)", 4, (2,), 32)
WIDE = CacheGroup("sliding_window(20)", 8, (2,), 32)
RECURRENT = CacheGroup("recurrent", 4, (3,), 32)

SLOT_BYTES = 4096


class Rig:
    """One engine with its connector. ``span``: GPU blocks in one of ours."""

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
        **options: Any,
    ) -> None:
        self.groups = tuple(groups)
        self.runner = ContentRunner(groups, num_gpu_blocks=gpu_blocks, ranks=ranks, blocks_per_slot=span)
        slot_bytes = sum(-(-group.block_bytes // SLOT_BYTES) * SLOT_BYTES for group in self.runner.layout.groups)
        settings = {**(config or {})}
        settings["primary"] = {"capacity": slots * slot_bytes, "store_reserve": "0%", **settings.get("primary", {})}
        self.manager = TieringOffloadingManager(TieringConfig.from_dict(settings), self.runner.layout)
        self.manager.sync.open()
        tokens = [group.tokens_per_block for group in groups]
        self.scheduler = OffloadingConnectorScheduler(
            self.manager, gpu_tokens_per_block=tokens, tokens_per_hash=min(tokens), world_size=ranks, **options
        )
        self.workers = [OffloadingConnectorWorker(rank=rank) for rank in range(ranks)]
        for rank, worker in enumerate(self.workers):
            placement = Placement((span,) * len(self.groups), ranks)
            worker.register_kv_caches(self.runner.memory.device_blocks(rank), placement, self.manager.parts.arena)
        self.engine = ReferenceEngine(
            self.runner,
            connector_scheduler=self.scheduler,
            connector_workers=self.workers,
            max_num_batched_tokens=step_tokens,
        )
        self.added = 0

    def add(self, prompt: Sequence[int], max_tokens: int = 1, **options: Any) -> Request:
        self.added += 1
        return self.engine.add_request(f"r{self.added}", prompt, max_tokens=max_tokens, **options)

    def step(self) -> StepResult:
        result = self.engine.step()
        unfilled = result.invalid_block_ids
        wrong = [block for block in self.runner.wrong_blocks if block.block_id not in unfilled]
        assert not wrong, f"a request read bytes that are not its tokens': {wrong}"
        for request in result.finished:
            prompt = request.token_ids[: request.num_prompt_tokens]
            assert request.output_ids == self.runner.expected_tokens(prompt, request.max_tokens, salt=request.salt)
        return result

    def run(self, steps_max: int = 3000) -> None:
        for _ in range(steps_max):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"not served within {steps_max} steps")

    def land(self) -> None:
        """Step until every copy that is under way has ended; requests run on."""
        self.step()
        while self.scheduler.stats()["open_jobs"]:
            self.step()

    def serve(self, prompt: Sequence[int], max_tokens: int = 1, **options: Any) -> Request:
        """Add a request and run until nothing is left to do."""
        request = self.add(prompt, max_tokens, **options)
        self.run()
        return request

    def forget_gpu(self) -> None:
        """The engine's own prefix cache finds nothing any more; nothing runs."""
        self.engine.pool.forget_all()

    def settle(self) -> None:
        """Everything has ended: nothing is leased, held, lent or under way, and the core agrees with itself."""
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
