"""The textbook policies against list-based references, call by call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.naive import NaiveARC, NaiveLRU, Policy, paper_arc_hits
from tiering.policies import ARCPolicy, LRUPolicy

CAPACITY_BLOCKS = 6

keys_of = st.lists(st.integers(0, 14).map(lambda i: b"%d" % i), max_size=6, unique=True)
step = st.one_of(
    st.tuples(st.just("store"), keys_of, keys_of),
    st.tuples(st.just("touch"), keys_of, keys_of),
    st.tuples(st.just("name"), keys_of, keys_of),
    st.tuples(st.just("lose"), keys_of, keys_of),
)
Pair = Callable[[], tuple[Policy, Policy]]
pairs: dict[str, Pair] = {
    "lru": lambda: (LRUPolicy(CAPACITY_BLOCKS), NaiveLRU()),
    "arc": lambda: (ARCPolicy(CAPACITY_BLOCKS), NaiveARC(CAPACITY_BLOCKS)),
}


def take_step(
    policy: Policy, action: str, keys: list[bytes], protected: list[bytes], resident: set[bytes]
) -> list[bytes]:
    """Do it, keep the caller's own view of ``resident`` up to date, and return what the policy named."""
    if action == "touch":
        policy.touch(keys)
    elif action == "name":
        return policy.victims(len(keys), protected.__contains__)
    elif action == "lose":
        policy.forget(keys, evicted=False)
        resident.difference_update(keys)
    else:
        missing = sum(key not in resident for key in keys)
        named = policy.victims(missing - (CAPACITY_BLOCKS - len(resident)), {*keys, *protected}.__contains__)
        policy.forget(named, evicted=True)
        resident.difference_update(named)
        room = CAPACITY_BLOCKS - len(resident)
        stored = [key for i, key in enumerate(keys) if key in resident or i < room]
        policy.admit(stored, None)
        resident.update(stored)
        return named
    return []


@pytest.mark.parametrize("name", pairs)
@given(steps=st.lists(step, max_size=40))
def test_same_victims_as_the_reference(name: str, steps: list[tuple[str, list[bytes], list[bytes]]]) -> None:
    policy, reference = pairs[name]()
    resident: set[bytes] = set()
    expected_resident: set[bytes] = set()
    for action, keys, protected in steps:
        named = take_step(policy, action, keys, protected, resident)
        assert named == take_step(reference, action, keys, protected, expected_resident)
        assert resident == expected_resident
        assert len(policy) == len(resident)


def test_lru_evicts_the_head_of_a_path_first() -> None:
    """The documented effect of a forward touch."""
    policy = LRUPolicy(4)
    policy.admit([b"a", b"b", b"c"], None)
    policy.touch([b"a", b"b"])
    assert policy.victims(3, lambda key: False) == [b"c", b"a", b"b"]


def test_arc_keeps_what_was_used_twice_through_a_scan() -> None:
    policy = ARCPolicy(4)
    policy.admit([b"x", b"y"], None)
    policy.touch([b"x", b"y"])
    for i in range(50):
        policy.forget(policy.victims(len(policy) + 1 - 4, lambda key: False), evicted=True)
        policy.admit([b"scan%d" % i], None)
    assert set(policy.victims(4, lambda key: False)) >= {b"x", b"y"}


@given(requests=st.lists(st.integers(0, 12).map(lambda i: b"%d" % i), max_size=200), c=st.integers(1, 6))
def test_arc_hits_as_often_as_the_paper_says(requests: list[bytes], c: int) -> None:
    """Block by block it is the paper's algorithm but for the moment at which ``p`` moves, so the hits are close."""
    policy, resident, hits = ARCPolicy(c), set[bytes](), 0
    for key in requests:
        if key in resident:
            hits += 1
            policy.touch([key])
            continue
        if len(resident) == c:
            named = policy.victims(1, lambda key: False)
            policy.forget(named, evicted=True)
            resident.difference_update(named)
        policy.admit([key], None)
        resident.add(key)
    assert abs(hits - paper_arc_hits(requests, c)) <= 0.1 * len(requests) + 3


def test_arc_needs_a_capacity() -> None:
    with pytest.raises(ValueError, match="capacity_blocks is 0; it must be at least 1"):
        ARCPolicy(0)
