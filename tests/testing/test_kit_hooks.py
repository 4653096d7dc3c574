"""How the kit behaves towards an author who overrides little, or wrongly."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.memory import MemoryBackend, MemoryConfig
from tiering.api import Backend
from tiering.testing import BackendTests

DAMAGE_TESTS = [
    name for name in dir(BackendTests) if name.startswith("test_rule_05_") and ("damage" in name or "swapped" in name)
]


class MinimalKit(BackendTests):
    """All that an author must write."""

    def make_backend(self, tmp_path: Path) -> Backend:
        return MemoryBackend(MemoryConfig(capacity_bytes="128MiB"))


class NoHookKit(MinimalKit):
    """Promises what it does not override."""

    corrupt_supported = True


class CannotStartKit(MinimalKit):
    """Works in the test's own process only."""

    parent = os.getpid()

    def make_backend(self, tmp_path: Path) -> Backend:
        if os.environ.get("KIT_TEST_PARENT") not in (None, str(self.parent)):
            raise OSError("no server here")
        return super().make_backend(tmp_path)


def run(kit: BackendTests, test: str, tmp_path: Path) -> None:
    asyncio.run(getattr(kit, test)(tmp_path))


@pytest.mark.parametrize("test", DAMAGE_TESTS)
def test_without_the_hook_damage_is_reported_as_unproven(test: str, tmp_path: Path) -> None:
    with pytest.raises(pytest.skip.Exception, match=r"MinimalKit\.corrupt_supported is False: rule 5 is not proven"):
        run(MinimalKit(), test, tmp_path)


@pytest.mark.parametrize("test", DAMAGE_TESTS)
def test_a_hook_that_finds_nothing_fails(test: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"NoHookKit\.corrupt did not find block"):
        run(NoHookKit(), test, tmp_path)


def test_a_kit_that_cannot_crash_says_so(tmp_path: Path) -> None:
    class InProcessOnly(MinimalKit):
        crash_supported = False

    with pytest.raises(pytest.skip.Exception, match=r"InProcessOnly\.crash_supported is False: rule 6 is not proven"):
        run(InProcessOnly(), "test_rule_06_a_killed_writer_leaves_whole_blocks_only", tmp_path)


def test_a_child_that_cannot_start_shows_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIT_TEST_PARENT", str(os.getpid()))
    with pytest.raises(AssertionError, match=r"(?s)ended by itself.*no server here"):
        run(CannotStartKit(), "test_rule_06_a_killed_writer_leaves_whole_blocks_only", tmp_path)


def test_a_local_class_cannot_crash_and_is_told(tmp_path: Path) -> None:
    class Local(MinimalKit): ...

    with pytest.raises(AssertionError, match="not importable"):
        run(Local(), "test_rule_06_a_killed_writer_leaves_whole_blocks_only", tmp_path)


def test_make_backend_is_the_one_thing_to_override(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="override make_backend in BackendTests"):
        run(BackendTests(), "test_rule_02_missing_is_a_value", tmp_path)


def test_payloads_are_damaged_through_the_hook_alone(tmp_path: Path) -> None:
    """The kit hands over functions of the stored bytes; it has no other way to a medium."""
    edits: list[tuple[bytes, Callable[[bytes], bytes]]] = []

    class Recording(NoHookKit):
        def corrupt(self, tmp_path: Path, key: bytes, edit: Callable[[bytes], bytes]) -> bool:
            edits.append((key, edit))
            return False

    with pytest.raises(AssertionError):
        run(Recording(), "test_rule_05_damaged_payloads_are_corrupt", tmp_path)
    (_, edit), *_ = edits
    raw = bytes(range(256)) * 20
    assert edit(raw) != raw
    assert len(edit(raw)) == len(raw)
