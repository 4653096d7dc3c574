"""The engine with its model and GPU blocks on a CUDA device, over pinned slots."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.connectors.reference.models import generate, llama, prompts
from tests.connectors.reference.tiered import connected, engine_on, open_manager
from tiering.connectors.reference import ModelRunner

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("options", [{}, {"load_in_step_bytes_max": 1 << 20}], ids=["async", "in_step"])
def test_prompts_come_back_and_answer_as_plain_transformers_does(options: dict[str, int]) -> None:
    model = copy.deepcopy(llama()).cuda()
    runner = ModelRunner(model, name="tiny", num_gpu_blocks=14, tokens_per_block=8, ranks=2)
    asked = prompts(61, 70, 75, 61)
    with open_manager(runner.layout) as manager, connected(runner, manager, **options) as connection:
        engine = engine_on(runner, connection)
        answers, loaded = [], 0
        for turn in range(2):
            for number, prompt in enumerate(asked):
                request = engine.add_request(f"{turn}.{number}", prompt, max_tokens=12)
                engine.run()
                answers.append(request.output_ids)
                loaded += request.record.tier_tokens
    assert loaded > 0
    expected = [generate(llama(), prompt, 12) for prompt in asked]
    assert answers == expected * 2
