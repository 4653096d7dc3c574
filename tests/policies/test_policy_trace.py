"""The first requests of a real serving trace, replayed on the policies and on the references: hits and victims are equal."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from tests.policies.naive import NaiveARC, NaiveLRU, NaivePrefix, Policy
from tiering.policies import ARCPolicy, LRUPolicy, PrefixPolicy

EXCERPT = Path(__file__).parent / "data" / "conversation_excerpt.jsonl.gz"
CAPACITY_BLOCKS = 500
"""Above the longest prompt (236 blocks); about 5 % of the distinct blocks."""


@cache
def requests() -> list[list[bytes]]:
    with gzip.open(EXCERPT, "rt", encoding="utf-8") as lines:
        return [[b"%d" % block for block in json.loads(line)["hash_ids"]] for line in lines]


@cache
def depth() -> dict[bytes, int]:
    return {key: at for path in requests() for at, key in enumerate(path)}


@dataclass(slots=True)
class Replay:
    """What came of each request: blocks of usable head found, and the victims in the order in which they were named."""

    hits: list[int] = field(default_factory=list)
    victims: list[list[bytes]] = field(default_factory=list)


def replay(policy: Policy) -> Replay:
    """Serve each prompt from a tier of ``CAPACITY_BLOCKS``: how long is its usable head? Then store what it lacks."""
    resident: set[bytes] = set()
    result = Replay()
    for path in requests():
        result.hits.append(next((at for at, key in enumerate(path) if key not in resident), len(path)))
        policy.touch(path)
        missing = [at for at, key in enumerate(path) if key not in resident]
        shortage = len(resident) + len(missing) - CAPACITY_BLOCKS
        gone = policy.victims(max(shortage, 0), set(path).__contains__)
        result.victims.append(gone)
        policy.forget(gone, evicted=True)
        resident.difference_update(gone)
        while missing:
            run = [at for i, at in enumerate(missing) if at == missing[0] + i]
            policy.admit([path[at] for at in run], path[run[0] - 1] if run[0] else None)
            missing = missing[len(run) :]
        resident.update(path)
        assert len(policy) == len(resident) <= CAPACITY_BLOCKS
    return result


def naive_prefix() -> Policy:
    return NaivePrefix(depth().__getitem__)


@pytest.mark.parametrize(
    ("policy", "reference"),
    [
        (lambda: PrefixPolicy(CAPACITY_BLOCKS), naive_prefix),
        (lambda: LRUPolicy(CAPACITY_BLOCKS), NaiveLRU),
        (lambda: ARCPolicy(CAPACITY_BLOCKS), lambda: NaiveARC(CAPACITY_BLOCKS)),
    ],
    ids=["prefix", "lru", "arc"],
)
def test_same_replay_as_the_reference(policy: Callable[[], Policy], reference: Callable[[], Policy]) -> None:
    ours, expected = replay(policy()), replay(reference())
    assert sum(expected.hits) > 0
    assert sum(map(len, expected.victims)) > 1_000
    assert ours.hits == expected.hits
    assert ours.victims == expected.victims
