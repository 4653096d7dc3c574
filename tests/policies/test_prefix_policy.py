"""The leaf-first policy against a model that recomputes everything, and against inputs that contradict themselves."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from tests.policies.naive import NaivePrefix
from tiering.policies import PrefixPolicy

DEPTH_MAX = 6


def head_of(leaf: bytes) -> list[bytes]:
    """The path to ``leaf``: a key here is the text of its prefix, so that its parent and depth are plain to see."""
    return [leaf[:i] for i in range(1, len(leaf) + 1)]


@st.composite
def stretch(draw: st.DrawFn) -> list[bytes]:
    """A contiguous stretch of one path of a binary forest."""
    path = head_of(draw(st.text("ab", min_size=1, max_size=DEPTH_MAX)).encode())
    return path[draw(st.integers(0, len(path) - 1)) :]


some_keys = st.lists(st.text("ab", min_size=1, max_size=DEPTH_MAX).map(str.encode), max_size=8)
step = st.one_of(
    st.tuples(st.just("admit behind its parent"), stretch()),
    st.tuples(st.just("admit, parent unknown"), stretch()),
    st.tuples(st.just("touch"), stretch()),
    st.tuples(st.just("evict"), some_keys),
    st.tuples(st.just("evict some"), some_keys),
    st.tuples(st.just("lose"), some_keys),
)


def never(key: bytes) -> bool:
    return False


@given(steps=st.lists(step, max_size=30))
def test_same_victims_as_the_model(steps: list[tuple[str, list[bytes]]]) -> None:
    policy, model = PrefixPolicy(16), NaivePrefix(len)
    for action, keys in steps:
        if action == "touch":
            policy.touch(keys)
            model.touch(keys)
        elif action == "lose":
            policy.forget(keys, evicted=False)
            model.forget(keys, evicted=False)
        elif action.startswith("admit"):
            parent = keys[0][:-1] or None if action == "admit behind its parent" else None
            policy.admit(keys, parent)
            model.admit(keys, parent)
        else:
            named = policy.victims(len(keys), set(keys).__contains__)
            assert named == model.victims(len(keys), set(keys).__contains__)
            gone = named if action == "evict" else named[1::2]
            policy.forget(gone, evicted=True)
            model.forget(gone, evicted=True)
        assert len(policy) == len(model)
        assert policy.victims(len(model) + 1, never) == model.victims(len(model), never)


@given(steps=st.lists(st.tuples(st.sampled_from(["admit", "evict"]), stretch()), max_size=40))
def test_prefix_evicted_head_first(steps: list[tuple[str, list[bytes]]]) -> None:
    """Row 28: whatever was stored and evicted, what remains of each chain is its head."""
    policy, resident = PrefixPolicy(16), set[bytes]()
    for action, keys in steps:
        if action == "admit":
            path = head_of(keys[-1])
            fresh = [key for key in path if key not in resident]
            policy.touch(path)
            if fresh:
                policy.admit(fresh, fresh[0][:-1] or None)
            resident.update(path)
        else:
            gone = policy.victims(len(keys), never)
            assert len(gone) == min(len(keys), len(resident))
            policy.forget(gone, evicted=True)
            resident.difference_update(gone)
        assert all(key[:-1] in resident for key in resident if len(key) > 1)


nonsense = st.lists(
    st.tuples(
        st.sampled_from(["admit", "touch", "evict", "lose"]),
        st.lists(st.sampled_from("abcdef").map(str.encode), max_size=6),
        st.sampled_from([None, b"a", b"b", b"c", b"z"]),
    ),
    max_size=30,
)


@given(steps=nonsense)
def test_contradicting_links_and_repeated_keys_lose_no_block(
    steps: list[tuple[str, list[bytes], bytes | None]],
) -> None:
    """Keys are opaque and a caller may misuse them: two parents, cycles, a key twice in one run."""
    policy, resident = PrefixPolicy(8), set[bytes]()
    for action, keys, parent in steps:
        if action == "admit":
            policy.admit(keys, parent)
            resident.update(keys)
        elif action == "touch":
            policy.touch(keys)
        else:
            gone = policy.victims(len(keys), never) if action == "evict" else keys
            policy.forget(gone, evicted=action == "evict")
            resident.difference_update(gone)
        named = policy.victims(100, never)
        assert sorted(named) == sorted(resident)
        assert policy.victims(100, never) == named
        assert len(policy) == len(resident)


def chain(name: str, blocks: int) -> list[bytes]:
    return [b"%s %d" % (name.encode(), i) for i in range(blocks)]


def test_a_promoted_hole_is_a_parent_again() -> None:
    policy = PrefixPolicy(8)
    path = chain("x", 4)
    policy.admit(path, None)
    policy.forget(path[1:2], evicted=False)
    assert policy.victims(4, never) == [path[3], path[2], path[0]]
    policy.admit(path[1:2], path[0])
    assert policy.victims(4, never) == path[::-1]


def test_a_parent_learned_later_links_two_roots() -> None:
    policy = PrefixPolicy(8)
    path = chain("x", 4)
    policy.admit(path[2:], None)
    policy.admit(path[:2], None)
    assert policy.victims(1, never) == path[3:], "the older root has no parent yet"
    policy.admit(path[2:], path[1])
    assert policy.victims(4, never) == path[::-1]


def test_an_ancestor_is_as_recent_as_its_descendants_were() -> None:
    """Touching only the tail of a path keeps its head too, also after the tail has gone."""
    policy = PrefixPolicy(8)
    used, idle = chain("used", 3), chain("idle", 2)
    policy.admit(used, None)
    policy.admit(idle, None)
    policy.touch(used[2:])
    policy.forget(used[2:], evicted=False)
    assert policy.victims(4, never) == [idle[1], idle[0], used[1], used[0]]


def test_naming_victims_changes_nothing() -> None:
    policy = PrefixPolicy(64)
    for name in "abcd":
        policy.admit(chain(name, 8), None)
    everything = policy.victims(32, never)
    for n in (1, 5, 32, 3):
        assert policy.victims(n, never) == everything[:n]
        assert policy.victims(n, lambda key: key.startswith(b"a")) == everything[8 : 8 + n]
    assert policy.victims(0, never) == []


def test_an_error_in_the_callers_function_loses_no_block() -> None:
    policy = PrefixPolicy(64)
    for name in "abcd":
        policy.admit(chain(name, 8), None)
    everything = policy.victims(32, never)
    for fail_at in range(32):
        asked = count()

        def protected(key: bytes, fail_at: int = fail_at, asked: count[int] = asked) -> bool:
            if next(asked) == fail_at:
                raise ZeroDivisionError
            return False

        try:
            policy.victims(32, protected)
        except ZeroDivisionError:
            pass
        else:
            raise AssertionError(f"call {fail_at} was not made")
        assert policy.victims(32, never) == everything
