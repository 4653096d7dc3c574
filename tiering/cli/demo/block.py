"""What one re-store costs and what it regains, measured: ten blocks of a running request, the third evicted meanwhile.

The request's prefix is whole on the GPU. The CPU tier evicts its blocks one at a time, by another prompt that needs the slots;
with re-store each comes back by one copy. At the end the third is gone, the request ends, the GPU forgets, and the prompt
comes again: what it finds, and how long it takes to its first token, is the worth of that one copy.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from tiering import block_keys
from tiering.cli.demo.model import DemoModel
from tiering.cli.demo.options import Progress
from tiering.cli.demo.phase import Setup
from tiering.cli.demo.serving import Tiers, engine_over, tiers_below
from tiering.cli.demo.timing import TimedRunner, TimedStores
from tiering.connectors.reference import ReferenceEngine, Request, RequestState
from tiering.memory.transfer.blocks import Placement
from tiering.memory.transfer.factory import open_engines
from tiering.memory.transfer.spec import STORE

BLOCKS = 10
LOST = 2
"""Index of the block that is evicted last, and without re-store stays away."""
EVICTED = (1, 3, 4, 5, 6, 7, 8, LOST)
"""One after another, each a copy to measure."""
LAND_STEPS_MAX = 100
"""How long a re-store, and the copies, are waited for."""
OTHER_BLOCKS = 2
"""Of the prompt that takes the slots: the free one, and that of the block that goes."""
RUNNING_TOKENS_MAX = 1200
"""Of its answer: more than it gets to before it is aborted."""
SLOT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Again:
    """The prompt again, behind a GPU that forgot it."""

    hit_tokens: int
    ttft_s: float
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockCase:
    tokens_per_block: int
    block_bytes: int
    off: Again
    on: Again
    expected_ids: tuple[int, ...]
    """Without tiers."""
    copy_s: tuple[float, ...]
    """Of each re-store: its GPU -> CPU copy, as the transfer engine tells it."""
    prefill_s: tuple[float, ...]
    """Of a prefill of all the blocks: seconds of the forward pass a block."""

    @property
    def outputs_identical(self) -> bool:
        return self.off.output_ids == self.on.output_ids == self.expected_ids

    @property
    def cost_s(self) -> float:
        """Of one re-store."""
        return statistics.median(self.copy_s)

    @property
    def gain_s(self) -> float:
        """Of one hit: the prefill of one block's tokens."""
        return statistics.median(self.prefill_s)

    @property
    def gain_to_cost(self) -> float:
        return self.gain_s / self.cost_s

    @property
    def is_regained(self) -> bool:
        """Without re-store the prefix ends at the lost block, with it nothing is missing."""
        return (self.off.hit_tokens, self.on.hit_tokens) == (
            LOST * self.tokens_per_block,
            BLOCKS * self.tokens_per_block,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "blocks": BLOCKS,
            "tokens_per_block": self.tokens_per_block,
            "block_bytes": self.block_bytes,
            "hit_tokens_off": self.off.hit_tokens,
            "hit_tokens_on": self.on.hit_tokens,
            "ttft_ms_off": self.off.ttft_s * 1e3,
            "ttft_ms_on": self.on.ttft_s * 1e3,
            "restores_measured": len(self.copy_s),
            "restore_cost_ms": self.cost_s * 1e3,
            "restore_cost_ms_min_max": [min(self.copy_s) * 1e3, max(self.copy_s) * 1e3],
            "hit_gain_ms": self.gain_s * 1e3,
            "gain_to_cost": self.gain_to_cost,
            "outputs_identical": self.outputs_identical,
        }


def measure_block(setup: Setup, model: DemoModel, progress: Progress) -> BlockCase:
    """The case without tiers, without re-store and with it."""
    case = _Case(setup, model)
    runs = []
    for number, restore in enumerate((None, False, True)):
        progress("one block", number, 3)
        runs.append(case.run(restore))
    progress("one block", 3, 3)
    none, off, on = runs
    return BlockCase(
        tokens_per_block=setup.scale.tokens_per_block,
        block_bytes=setup.scale.block_bytes,
        off=off,
        on=on,
        expected_ids=none.output_ids,
        copy_s=tuple(case.copy_s),
        prefill_s=tuple(case.prefill_s),
    )


class _Case:
    def __init__(self, setup: Setup, model: DemoModel) -> None:
        self.copy_s: list[float] = []
        self.prefill_s: list[float] = []
        self._model = model
        self._scale = setup.scale
        self._tokens = setup.workload().tokens
        self._prompt = self._tokens("ten blocks", BLOCKS * setup.scale.tokens_per_block)

    def run(self, restore: bool | None) -> Again:
        """``restore`` None: no tiers."""
        blocks = 2 * BLOCKS + RUNNING_TOKENS_MAX // self._scale.tokens_per_block
        runner = TimedRunner(self._model.runner(num_gpu_blocks=blocks, tokens_per_block=self._scale.tokens_per_block))
        step_tokens_max = (BLOCKS + 2) * self._scale.tokens_per_block
        if restore is None:
            engine = engine_over(runner, None, step_tokens_max=step_tokens_max)
            again = self._again(engine)
            self._note_prefill(runner)
            return again
        slot_bytes = -(-self._scale.block_bytes // SLOT_BYTES) * SLOT_BYTES
        config = {
            # A slot for each block, and one more.
            "primary": {
                "capacity": (BLOCKS + 1) * slot_bytes,
                "policy": "lru",
                "store_when": "computed",
                "store_reserve": "0%",
            },
            "restore": {"enabled": restore},
        }
        # Of the request that runs on, only the ten blocks are in question.
        with tiers_below(runner, config, prompt_only=True) as tiers:
            stores = _timed_stores(runner, tiers)
            engine = engine_over(runner, tiers, step_tokens_max=step_tokens_max)
            running = engine.add_request("running", self._prompt, max_tokens=RUNNING_TOKENS_MAX)
            self._land(engine, tiers, restored_blocks=0)
            self._note_prefill(runner)
            table = frozenset(running.blocks[0][:BLOCKS])
            stored = len(stores.copies)
            for number, lost in enumerate(EVICTED if restore else (LOST,), start=1):
                self._evict(engine, tiers, lost)
                self._land(engine, tiers, restored_blocks=number if restore else 0)
            engine.abort("running")
            engine.run()
            copies = [copy for copy in stores.copies[stored:] if copy.gpu_block_ids <= table]
            self.copy_s += [copy.seconds / len(copy.gpu_block_ids) for copy in copies]
            engine.pool.forget_all()
            return self._again(engine)

    def _note_prefill(self, runner: TimedRunner) -> None:
        """The first forward pass of a run computes all ten blocks, or a few tokens more."""
        prefill = runner.forwards[0]
        self.prefill_s.append(prefill.seconds / prefill.tokens * self._scale.tokens_per_block)

    def _evict(self, engine: ReferenceEngine, tiers: Tiers, lost: int) -> None:
        """Use all blocks of the request but one, and store another prompt: the one is the longest unused, and goes."""
        keys = list(block_keys(self._prompt, tiers.manager.layout))
        tiers.manager.sync.touch(keys[:lost] + keys[lost + 1 :])
        name = f"instead of block {lost}"
        other = engine.add_request(name, self._tokens(name, OTHER_BLOCKS * self._scale.tokens_per_block), max_tokens=1)
        while other.state is not RequestState.FINISHED:
            engine.step()

    def _land(self, engine: ReferenceEngine, tiers: Tiers, restored_blocks: int) -> None:
        """Step, and with it the request that runs, until so many blocks were re-stored and every copy has ended."""
        for _ in range(LAND_STEPS_MAX):
            engine.step()
            is_restored = tiers.manager.stats()["restored_blocks"] >= restored_blocks
            if is_restored and not tiers.connection.scheduler.stats()["open_jobs"]:
                return
        # The verdict tells: without its blocks the prompt finds less.

    def _again(self, engine: ReferenceEngine) -> Again:
        tokens = [*self._prompt, *self._tokens("and then", self._scale.message_tokens)]
        request = engine.add_request("again", tokens, max_tokens=self._scale.answer_tokens)
        engine.run()
        return _answered(request)


def _answered(request: Request) -> Again:
    ttft_s = request.record.ttft_s
    if ttft_s is None:
        raise RuntimeError(f"request {request.request_id!r} was answered without a first token")
    return Again(request.record.tier_tokens, ttft_s, tuple(request.output_ids))


def _timed_stores(runner: TimedRunner, tiers: Tiers) -> TimedStores:
    """Put a watch around the copies GPU -> CPU of the one worker half."""
    engines = open_engines(tiers.manager.parts.arena, runner.memory.device_blocks(0), Placement((1,), 1))
    for direction, engine in engines.items():
        if direction != STORE:
            engine.close()
    stores = TimedStores(engines[STORE])
    (worker,) = tiers.connection.workers
    worker.register_engine(stores)
    return stores
