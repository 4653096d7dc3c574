"""Prompts of pseudo-random tokens: the same in every process, unrelated unless a prefix is shared on purpose."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.engines.model import VOCABULARY


def prompt(name: str, tokens: int, prefix: Sequence[int] = ()) -> list[int]:
    """``prefix`` and then tokens that depend on ``name`` alone, ``tokens`` in all."""
    source = random.Random(name)
    return [*prefix, *(source.randrange(1, VOCABULARY) for _ in range(tokens - len(prefix)))]


def prompts(name: str, count: int, tokens: int) -> list[list[int]]:
    return [prompt(f"{name}-{index}", tokens) for index in range(count)]
