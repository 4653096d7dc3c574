"""A real model with a connector: tokens of plain ``generate``, and the same bits as a run whose KV never left the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.connectors.reference.models import generate, llama, prompts, qwen_with_windows
from tests.connectors.reference.tiered import connected, engine_on, faulty_transfers, open_manager
from tiering.connectors.reference import ModelRunner, ReferenceEngine, Request
from tiering.memory.transfer.spec import LOAD

TOKENS = 8
GPU_BLOCKS = 14
ANSWER = 6


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Logits are the same bits only between runs with as many threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def runner_of(model: Any, num_gpu_blocks: int = GPU_BLOCKS, **options: Any) -> ModelRunner:
    return ModelRunner(model, name="tiny", num_gpu_blocks=num_gpu_blocks, tokens_per_block=TOKENS, **options)


def serve(engine: ReferenceEngine, name: str, prompt: list[int], max_tokens: int = ANSWER) -> Request:
    request = engine.add_request(name, prompt, max_tokens=max_tokens, keep_logits=True)
    engine.run()
    return request


def logits_of(request: Request) -> torch.Tensor:
    return torch.stack(request.record.logits)


PROMPT, OTHER, THIRD = prompts(61, 70, 75)


@pytest.mark.parametrize("options", [{}, {"load_in_step_bytes_max": 1 << 20}], ids=["async", "in_step"])
@pytest.mark.parametrize(("blocks_per_slot", "ranks"), [(1, 1), (3, 1), (1, 2), (2, 2)])
def test_after_distractors_a_prompt_comes_back_bit_for_bit(
    options: dict[str, Any], blocks_per_slot: int, ranks: int
) -> None:
    never_left = runner_of(llama(), 64)
    reference = ReferenceEngine(never_left)
    serve(reference, "first", PROMPT, max_tokens=1)
    expected = serve(reference, "again", PROMPT)
    assert expected.record.engine_tokens == 56

    runner = runner_of(llama(), blocks_per_slot=blocks_per_slot, ranks=ranks)
    with open_manager(runner.layout) as manager, connected(runner, manager, **options) as connection:
        engine = engine_on(runner, connection)
        serve(engine, "first", PROMPT, max_tokens=1)
        serve(engine, "distractor", OTHER, max_tokens=1)
        serve(engine, "another", THIRD, max_tokens=1)
        again = serve(engine, "again", PROMPT)
        assert (again.record.engine_tokens, again.record.tier_tokens) == (
            0,
            60 // (8 * blocks_per_slot) * 8 * blocks_per_slot,
        )
        assert again.output_ids == generate(llama(), PROMPT, ANSWER)
        assert torch.equal(logits_of(again), logits_of(expected))


def test_another_engine_finds_the_blocks_on_disk(tmp_path: Path) -> None:
    """A restart: a new runner, a new manager, the same directory."""
    nvme = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    expected = generate(llama(), PROMPT, ANSWER)
    tier_tokens = []
    for _ in range(2):
        runner = runner_of(llama())
        with open_manager(runner.layout, nvme) as manager, connected(runner, manager) as connection:
            request = serve(engine_on(runner, connection), "a", PROMPT)
            assert request.output_ids == expected
            tier_tokens.append(request.record.tier_tokens)
    assert tier_tokens == [0, 56]


def test_another_revision_of_the_weights_finds_nothing(tmp_path: Path) -> None:
    nvme = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    for revision in ("1", "2"):
        runner = runner_of(llama(), revision=revision)
        with open_manager(runner.layout, nvme) as manager, connected(runner, manager) as connection:
            assert serve(engine_on(runner, connection), "a", PROMPT).record.tier_tokens == 0


def test_preempted_requests_load_what_they_lost_and_answer_the_same() -> None:
    runner = runner_of(llama())
    with open_manager(runner.layout) as manager, connected(runner, manager) as connection:
        engine = engine_on(runner, connection, max_num_seqs=6)
        asked = [
            engine.add_request(str(n), p, max_tokens=24) for n, p in enumerate(prompts(17, 25, 33, 20, 28, seed=1))
        ]
        engine.run()
        assert sum(request.record.preemptions for request in asked) > 0
        assert sum(request.record.tier_tokens for request in asked) > 0
        for request in asked:
            assert request.output_ids == generate(llama(), request.token_ids[: request.num_prompt_tokens], 24)


@pytest.mark.parametrize("options", [{}, {"load_in_step_bytes_max": 1 << 20}], ids=["async", "in_step"])
def test_a_failed_load_is_computed_and_answers_the_same(options: dict[str, Any]) -> None:
    runner = runner_of(llama())
    with open_manager(runner.layout) as manager, connected(runner, manager, **options) as connection:
        engine = engine_on(runner, connection)
        loads = faulty_transfers(connection, 0, runner, manager)[LOAD]
        serve(engine, "first", PROMPT, max_tokens=1)
        serve(engine, "distractor", OTHER, max_tokens=1)
        loads.fail = True
        again = serve(engine, "again", PROMPT)
        assert loads.failed_jobs == 1
        assert again.record.tier_tokens == 0
        assert again.record.failed_loads == 1
        assert again.output_ids == generate(llama(), PROMPT, ANSWER)


def test_layers_with_a_window_come_back_too() -> None:
    model = qwen_with_windows(12)
    runner = runner_of(model, 30)
    with open_manager(runner.layout) as manager, connected(runner, manager) as connection:
        engine = engine_on(runner, connection)
        serve(engine, "first", PROMPT, max_tokens=1)
        for n, other in enumerate(prompts(70, 70, 70, seed=2)):
            serve(engine, f"distractor {n}", other, max_tokens=1)
        again = serve(engine, "again", PROMPT)
        assert again.record.tier_tokens == 56
        assert again.output_ids == generate(model, PROMPT, ANSWER)


def test_other_bytes_in_the_tiers_change_the_answer() -> None:
    """Negative control: what is loaded is what is computed with."""
    runner = runner_of(llama())
    with open_manager(runner.layout) as manager, connected(runner, manager) as connection:
        engine = engine_on(runner, connection)
        serve(engine, "first", PROMPT, max_tokens=1)
        serve(engine, "distractor", OTHER, max_tokens=1)
        slots = manager.parts.arena.array(0)
        slots.view("float64")[:] *= -1
        again = serve(engine, "again", PROMPT)
        assert again.record.tier_tokens > 0
        assert again.output_ids != generate(llama(), PROMPT, ANSWER)
