"""The reference engine, with the two connector halves and a manager below it or without, and one prompt at a time on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tiering import TieringConfig, TieringOffloadingManager, block_keys
from tiering.cli.demo.record import TurnRecord
from tiering.connectors.reference import Connection, ReferenceEngine, Runner, connect
from tiering.connectors.reference.engine import IDLE_STEP_S
from tiering.connectors.requests import RequestLimits
from tiering.keys import DIGEST_BYTES

TURN_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Tiers:
    """What is below an engine: its manager, open, and the halves between them."""

    manager: TieringOffloadingManager
    connection: Connection


@contextmanager
def tiers_below(runner: Runner, config: Mapping[str, Any], **options: Any) -> Iterator[Tiers]:
    """Open the tiers of a configuration under ``runner``, and close them at the end. ``options``: those of ``connect``.

    Blocks while it opens and closes; not for a thread whose event loop runs.
    """
    manager = TieringOffloadingManager(TieringConfig.from_dict(config), runner.layout)
    with ExitStack() as stack:
        stack.callback(manager.sync.close)
        manager.sync.open()
        connection = connect(runner, manager, **options)
        stack.callback(connection.shutdown)
        yield Tiers(manager, connection)


def engine_over(
    runner: Runner,
    tiers: Tiers | None,
    *,
    step_tokens_max: int,
    requests_max: int = 16,
    now: Callable[[], float] = time.perf_counter,
) -> ReferenceEngine:
    """An engine with an empty prefix cache. ``step_tokens_max``: computed in a step. ``now``: its clock, in seconds."""
    return ReferenceEngine(
        runner,
        connector_scheduler=None if tiers is None else tiers.connection.scheduler,
        connector_workers=() if tiers is None else tiers.connection.workers,
        max_num_batched_tokens=step_tokens_max,
        max_num_seqs=requests_max,
        now=now,
    )


class Server:
    """Answers one prompt at a time. A call that raises leaves it unusable."""

    def __init__(self, runner: Runner, tiers: Tiers | None, *, step_tokens_max: int) -> None:
        """``step_tokens_max`` holds the longest prompt: each is prefilled in one step, block by block."""
        self.engine = engine_over(runner, tiers, step_tokens_max=step_tokens_max)
        self._runner = runner
        self._tiers = tiers
        self._tokens_per_block = runner.layout.groups[0].tokens_per_block
        self._served = 0

    def rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        """A copy of the full blocks of a sequence, uint8 (n, block_bytes). Raises ``KeyError`` if the engine lost one."""
        blocks = self._resident_blocks(token_ids)
        if len(blocks) < len(token_ids) // self._tokens_per_block:
            raise KeyError(f"the engine has {len(blocks)} blocks of a sequence of {len(token_ids)} tokens")
        return self._runner.memory.blocks(0, 0)[blocks]

    def answer(
        self,
        conversation: int,
        turn: int,
        prompt: Sequence[int],
        answer_tokens: int,
        *,
        reusable_tokens: int | None = None,
    ) -> TurnRecord:
        """Serve ``prompt``, then step until all that it stores is stored.

        Only the first ``reusable_tokens`` of the prompt may come from the tiers (None: all).
        """
        self._served += 1
        before = self._hit_blocks()
        request = self.engine.add_request(
            f"request {self._served}",
            prompt,
            max_tokens=answer_tokens,
            limits=self._limits(prompt, reusable_tokens),
            keep_logits=True,
        )
        record = request.record
        load_s = self._serve(record.arrival_s)
        if record.ttft_s is None or record.preemptions:
            raise RuntimeError("a prompt that has the engine to itself was not served, or was preempted")
        hits = {tier: n - before.get(tier, 0) for tier, n in self._hit_blocks().items()}
        return TurnRecord(
            conversation=conversation,
            turn=turn,
            prompt_tokens=len(prompt),
            device_tokens=record.engine_tokens,
            tier_tokens={tier: n * self._tokens_per_block for tier, n in hits.items() if n},
            computed_tokens=len(prompt) - record.engine_tokens - record.tier_tokens,
            ttft_s=record.ttft_s,
            load_s=load_s,
            output_ids=tuple(request.output_ids),
            logits=torch.stack(record.logits),
        )

    def _serve(self, arrival_s: float) -> float:
        """Step until nothing is left to do; the seconds from the arrival to the first step that computed."""
        load_s: float | None = None
        while self.engine.has_work:
            now_s = time.perf_counter()
            if now_s > arrival_s + TURN_DEADLINE_S:
                raise TimeoutError(f"a prompt was not served within {TURN_DEADLINE_S:g} s")
            if not self.engine.step().scheduled_tokens:
                time.sleep(IDLE_STEP_S)
            elif load_s is None:
                load_s = now_s - arrival_s
        return load_s or 0.0

    def _limits(self, prompt: Sequence[int], reusable_tokens: int | None) -> RequestLimits | None:
        if reusable_tokens is None:
            return None
        # A limit counts from what the engine's own cache has.
        resident = len(self._resident_blocks(prompt[:-1])) * self._tokens_per_block
        return RequestLimits(load_tokens_max=max(0, reusable_tokens - resident))

    def _resident_blocks(self, token_ids: Sequence[int]) -> list[int]:
        """GPU blocks of the longest prefix that the engine's own cache has."""
        blocks = []
        for key in block_keys(token_ids, self._runner.layout):
            block = self.engine.pool.find((key[:DIGEST_BYTES], 0))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _hit_blocks(self) -> Mapping[str, int]:
        hits: Mapping[str, int] = {} if self._tiers is None else self._tiers.manager.stats()["hit_blocks_by_tier"]
        return hits
