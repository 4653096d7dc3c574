"""A model small enough that a whole demo, its second process included, takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tiering.cli.demo import ModelSpec, Scale, TrafficScale

TINY = Scale(
    model=ModelSpec(
        layers=2,
        hidden=64,
        intermediate=128,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab=128,
        initializer_range=0.15,
    ),
    tokens_per_block=16,
    system_tokens=48,
    document_tokens=96,
    message_tokens=10,
    answer_tokens=8,
)

# As the default: the tier loses blocks of requests that run, under both policies.
TINY_TRAFFIC = TrafficScale(
    model=TINY.model,
    tokens_per_block=16,
    conversations=6,
    turns=3,
    opening_tokens=88,
    message_tokens=3,
    answer_tokens=8,
    passing_tokens=96,
    device_blocks=42,
    primary_blocks=52,
    requests_max=6,
)


@pytest.fixture(scope="session")
def tiny() -> Scale:
    return TINY


@pytest.fixture(scope="session")
def tiny_traffic() -> TrafficScale:
    return TINY_TRAFFIC


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """Bit-equality holds between runs with as many threads; other tests keep theirs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
