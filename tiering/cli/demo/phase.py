"""One pass over the workload: an engine with an empty device pool, with or without tiers below it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tiering import TieringConfig, TieringOffloadingManager
from tiering.cli.demo.engine import Engine, TurnRecord
from tiering.cli.demo.model import DemoModel
from tiering.cli.demo.options import Progress, Scale
from tiering.cli.demo.workload import Workload


@dataclass(frozen=True, slots=True)
class Setup:
    """What a phase needs, in a form that another process can rebuild it from."""

    scale: Scale
    conversations: int
    turns: int
    seed: int

    @property
    def pool_blocks(self) -> int:
        """A device pool for one conversation and a little more: each takes the blocks of the one before it."""
        return self.scale.sequence_blocks_max(self.turns) + 2

    @property
    def distinct_blocks_max(self) -> int:
        return self.conversations * self.scale.sequence_blocks_max(self.turns)

    def workload(self) -> Workload:
        return Workload(self.scale, conversations=self.conversations, turns=self.turns, seed=self.seed)

    def build_model(self) -> DemoModel:
        """The model, after one forward of a chunk, so that no phase pays for first-use initialisation."""
        torch.set_num_threads(self.scale.threads)
        positions = self.scale.sequence_tokens_max(self.turns)
        model = DemoModel(self.scale.model, seed=self.seed, positions_max=positions)
        model.forward(range(min(self.scale.tokens_per_block, self.scale.model.vocab)), model.empty_cache())
        return model

    def tiers(self, directory: Path, *, primary_blocks: int) -> dict[str, Any]:
        """A configuration: ``primary_blocks`` in CPU memory, and NVMe for everything, with room for its segments."""
        block_bytes = self.scale.block_bytes
        return {
            "primary": {"capacity": primary_blocks * block_bytes, "policy": "prefix", "store_reserve": "5%"},
            "tiers": [
                {
                    "type": "nvme",
                    "path": str(directory),
                    "capacity": 2 * self.distinct_blocks_max * (block_bytes + 4096) + (64 << 20),
                }
            ],
        }

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Setup:
        return Setup(**{**fields, "scale": Scale.from_json(fields["scale"])})


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """The turns of one phase, in the order they ran, and what happened beside them."""

    name: str
    turns: tuple[TurnRecord, ...]
    open_s: float
    """Opening the manager: arena, tiers, recovery of what an earlier run left. 0 without tiers."""
    stored_blocks: int
    refused_blocks: int
    device_evicted_blocks: int

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {**fields, "turns": [turn.to_json() for turn in self.turns]}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> PhaseResult:
        return PhaseResult(**{**fields, "turns": tuple(TurnRecord.from_json(turn) for turn in fields["turns"])})


async def run_phase(
    name: str, setup: Setup, model: DemoModel, tiers: Mapping[str, Any] | None, progress: Progress
) -> PhaseResult:
    """Run the workload on a fresh engine, over the tiers of the configuration ``tiers`` (None: no tiers).

    The manager is flushed and closed at the end, so that the next phase finds every block in its directory.
    """
    result, _ = await run_engine(name, setup, model, tiers, progress, pool_blocks=setup.pool_blocks)
    return result


async def run_engine(
    name: str,
    setup: Setup,
    model: DemoModel,
    tiers: Mapping[str, Any] | None,
    progress: Progress,
    *,
    pool_blocks: int,
) -> tuple[PhaseResult, Engine]:
    """``run_phase`` with a device pool of ``pool_blocks``; also returns the engine, whose manager is closed."""
    tokens_per_block = setup.scale.tokens_per_block
    async with AsyncExitStack() as stack:
        begin = time.perf_counter()
        manager = None
        if tiers is not None:
            layout = model.layout(tokens_per_block)
            manager = TieringOffloadingManager(TieringConfig.from_dict(tiers), layout)
            await stack.enter_async_context(manager)
        open_s = time.perf_counter() - begin if manager is not None else 0.0
        engine = Engine(model, tokens_per_block=tokens_per_block, pool_blocks=pool_blocks, manager=manager)
        records = await setup.workload().run(engine, name, progress)
        if manager is not None:
            await manager.flush()
    result = PhaseResult(
        name=name,
        turns=tuple(records),
        open_s=open_s,
        stored_blocks=engine.stored_blocks,
        refused_blocks=engine.refused_blocks,
        device_evicted_blocks=engine.pool.evicted_blocks,
    )
    return result, engine
