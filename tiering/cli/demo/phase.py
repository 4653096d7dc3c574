"""One pass over the workload: an engine with an empty device pool, with or without tiers below it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tiering.cli.demo.model import DemoModel
from tiering.cli.demo.options import Progress, Scale
from tiering.cli.demo.record import TurnRecord
from tiering.cli.demo.serving import Server, tiers_below
from tiering.cli.demo.workload import Workload
from tiering.connectors.reference import ModelRunner


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

    @property
    def step_tokens_max(self) -> int:
        """A whole prompt in one step, beside as many requests as the engine runs at once."""
        return self.scale.sequence_tokens_max(self.turns) + self.scale.tokens_per_block

    def runner(self, model: DemoModel, pool_blocks: int) -> ModelRunner:
        """The model over a device pool of ``pool_blocks``; block 0 is the engine's null block."""
        return model.runner(num_gpu_blocks=pool_blocks + 1, tokens_per_block=self.scale.tokens_per_block)

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

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {**fields, "turns": [turn.to_json() for turn in self.turns]}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> PhaseResult:
        return PhaseResult(**{**fields, "turns": tuple(TurnRecord.from_json(turn) for turn in fields["turns"])})


def run_phase(
    name: str, setup: Setup, model: DemoModel, tiers: Mapping[str, Any] | None, progress: Progress
) -> PhaseResult:
    """Run the workload on a fresh engine, over the tiers of the configuration ``tiers`` (None: no tiers).

    The manager is flushed and closed at the end, so that the next phase finds every block in its directory.
    """
    result, _ = run_server(name, setup, model, tiers, progress, pool_blocks=setup.pool_blocks)
    return result


def run_server(
    name: str,
    setup: Setup,
    model: DemoModel,
    config: Mapping[str, Any] | None,
    progress: Progress,
    *,
    pool_blocks: int,
) -> tuple[PhaseResult, Server]:
    """``run_phase`` with a device pool of ``pool_blocks``; also returns the server, whose manager is closed."""
    runner = setup.runner(model, pool_blocks)
    open_s, stats = 0.0, {"stored_blocks": 0, "refused_blocks": 0}
    with ExitStack() as stack:
        tiers = None
        if config is not None:
            begin = time.perf_counter()
            tiers = stack.enter_context(tiers_below(runner, config))
            open_s = time.perf_counter() - begin
        server = Server(runner, tiers, step_tokens_max=setup.step_tokens_max)
        records = setup.workload().run(server, name, progress)
        if tiers is not None:
            asyncio.run(tiers.manager.flush())
            stats = tiers.manager.stats()
    result = PhaseResult(
        name=name,
        turns=tuple(records),
        open_s=open_s,
        stored_blocks=stats["stored_blocks"],
        refused_blocks=stats["refused_blocks"],
    )
    return result, server
