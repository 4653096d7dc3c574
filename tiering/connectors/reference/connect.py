"""Puts the two halves between an engine's runner and a manager: what an integration does once, at its start."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiering.connectors.reference.runner import Runner
from tiering.connectors.scheduler import OffloadingConnectorScheduler
from tiering.connectors.worker import OffloadingConnectorWorker
from tiering.manager import TieringOffloadingManager
from tiering.memory.transfer.blocks import Placement


@dataclass(frozen=True, slots=True)
class Connection:
    """Both halves, for ``ReferenceEngine(runner, connector_scheduler=..., connector_workers=...)``."""

    scheduler: OffloadingConnectorScheduler
    workers: tuple[OffloadingConnectorWorker, ...]

    def shutdown(self) -> None:
        """After the engine's last step, and before the manager is closed: copies end, leases go back."""
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()


def connect(
    runner: Runner,
    manager: TieringOffloadingManager,
    *,
    prompt_only: bool = False,
    load_in_step_bytes_max: int = 0,
) -> Connection:
    """``manager`` is open, made with ``runner.layout``, and stays the caller's, as ``runner`` does.

    All ranks live in this process and share the manager's arena. Workers in other processes are given no arena: they map
    it when the first metadata tells them where it is (the manager then needs a shared one).
    """
    memory = runner.memory
    gpu_tokens = [group.tokens_per_block for group in memory.groups]
    scheduler = OffloadingConnectorScheduler(
        manager,
        gpu_tokens_per_block=gpu_tokens,
        tokens_per_hash=math.gcd(*gpu_tokens),
        world_size=memory.ranks,
        prompt_only=prompt_only,
        load_in_step_bytes_max=load_in_step_bytes_max,
    )
    slots = zip(manager.layout.groups, gpu_tokens, strict=True)
    placement = Placement(tuple(group.tokens_per_block // tokens for group, tokens in slots), memory.ranks)
    workers = []
    for rank in range(memory.ranks):
        worker = OffloadingConnectorWorker(rank=rank)
        worker.register_kv_caches(memory.device_blocks(rank), placement, manager.parts.arena)
        workers.append(worker)
    return Connection(scheduler, tuple(workers))
