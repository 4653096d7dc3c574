"""The proof that loaded KV is the computed KV, and that it matters: plain forwards, comparisons, an altered block."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiering import TieringConfig, TieringOffloadingManager, block_keys
from tiering.cli.demo.model import DemoModel
from tiering.cli.demo.phase import PhaseResult, Setup
from tiering.cli.demo.record import TurnRecord
from tiering.cli.demo.serving import Server, tiers_below

ALTERED_BLOCK = 1
"""Which block of the prompt the control alters: an early one, of the shared system prompt."""


@dataclass(frozen=True, slots=True)
class Control:
    """One prompt answered from tiers that hold honest bytes, and from tiers that hold one altered block.

    Both are stored through the same calls and verify in every tier, so only the content of that block differs.
    """

    expected_ids: tuple[int, ...]
    honest_ids: tuple[int, ...]
    altered_ids: tuple[int, ...]
    loaded_tokens: int
    """By the altered run: the whole prefix, the altered block among it."""
    logit_change: float
    """Largest change of a logit of the first answered token."""


def prompt_of(setup: Setup, turns: Sequence[TurnRecord], conversation: int) -> list[int]:
    """The prompt of the last turn of ``conversation``, given the turns before it."""
    answers = [turn.output_ids for turn in turns if turn.conversation == conversation]
    return setup.workload().prompt(conversation, answers[:-1])


def last_turn(turns: Sequence[TurnRecord], conversation: int) -> TurnRecord:
    return [turn for turn in turns if turn.conversation == conversation][-1]


def plain_forward(model: DemoModel, prompt: Sequence[int], answer_tokens: int) -> tuple[torch.Tensor, float]:
    """One forward over the whole prompt, then greedy decoding: no engine, no blocks, no chunks.

    Returns the logits (answer_tokens, vocabulary) and the seconds to the first token.
    """
    begin = time.perf_counter()
    cache = model.empty_cache()
    steps = [model.forward(prompt, cache)]
    ttft_s = time.perf_counter() - begin
    while len(steps) < answer_tokens:
        steps.append(model.forward([int(steps[-1].argmax())], cache))
    return torch.stack(steps), ttft_s


def run_control(
    setup: Setup,
    model: DemoModel,
    reference: Server,
    turns: Sequence[TurnRecord],
    tiers: tuple[Mapping[str, Any], Mapping[str, Any]],
) -> Control:
    """Answer the last prompt of conversation 0 from honest and from altered blocks.

    ``reference`` is a server whose engine still holds all blocks of ``turns``; ``tiers`` are two configurations over empty
    directories. Keys and values of the altered block change sign: finite numbers, and nothing a checksum would see.
    """
    prompt = prompt_of(setup, turns, 0)
    # What a request can reuse: its last token is always computed.
    blocks = reference.rows(prompt[:-1])
    honest = _store_and_answer(setup, model, prompt, blocks, tiers[0])
    blocks[ALTERED_BLOCK].view(torch.float32).neg_()
    altered = _store_and_answer(setup, model, prompt, blocks, tiers[1])
    return Control(
        expected_ids=last_turn(turns, 0).output_ids,
        honest_ids=honest.output_ids,
        altered_ids=altered.output_ids,
        loaded_tokens=altered.saved_tokens,
        logit_change=(altered.logits[0] - honest.logits[0]).abs().max().item(),
    )


def _store_and_answer(
    setup: Setup, model: DemoModel, prompt: Sequence[int], blocks: torch.Tensor, config: Mapping[str, Any]
) -> TurnRecord:
    """Store ``blocks`` with one manager; answer with another one under an empty engine, so that NVMe serves them."""
    runner = setup.runner(model, setup.pool_blocks)

    async def store() -> None:
        async with TieringOffloadingManager(TieringConfig.from_dict(config), runner.layout) as manager:
            await manager.store(list(block_keys(prompt[:-1], runner.layout)), blocks)
            await manager.flush()

    asyncio.run(store())
    with tiers_below(runner, config) as tiers:
        server = Server(runner, tiers, step_tokens_max=setup.step_tokens_max)
        return server.answer(0, setup.turns - 1, prompt, setup.scale.answer_tokens)


def ids_equal(phases: Sequence[PhaseResult]) -> bool:
    """Every phase answered every turn with the same token ids."""
    return len({tuple(turn.output_ids for turn in phase.turns) for phase in phases}) == 1


def bit_equal(expected: PhaseResult, phases: Sequence[PhaseResult]) -> bool:
    """Every logit of every answered token is the same float, in all ``phases``."""
    return all(
        torch.equal(ours.logits, theirs.logits)
        for phase in phases
        for ours, theirs in zip(phase.turns, expected.turns, strict=True)
    )


def smallest_top2_gap(phases: Sequence[PhaseResult]) -> float:
    """The closest that any greedy choice of any phase came to a tie."""
    logits = torch.cat([turn.logits for phase in phases for turn in phase.turns])
    best = logits.topk(2, dim=-1).values
    return float((best[:, 0] - best[:, 1]).min())


def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference of a logit, over the steps up to the first that chose another token.

    Behind such a step the inputs differ, and with them the logits, for a reason that is counted elsewhere.
    """
    differs = (ours.argmax(-1) != theirs.argmax(-1)).nonzero()
    steps = int(differs[0]) + 1 if len(differs) else len(ours)
    return float((ours[:steps] - theirs[:steps]).abs().max())


def largest_difference_of(phase: PhaseResult, expected: PhaseResult) -> float:
    """``largest_difference`` over the turns up to the first whose answer, part of later prompts, is another one."""
    largest = 0.0
    diverged: set[int] = set()
    for ours, theirs in zip(phase.turns, expected.turns, strict=True):
        if ours.conversation not in diverged:
            largest = max(largest, largest_difference(ours.logits, theirs.logits))
            if ours.output_ids != theirs.output_ids:
                diverged.add(ours.conversation)
    return largest
