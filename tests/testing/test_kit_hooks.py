"""How the kit behaves towards an author who overrides little, or wrongly."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backends.memory import MemoryBackend, MemoryConfig
from tiering.api import Backend, run_blocking
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


@pytest.mark.parametrize(
    ("hook", "test"),
    [
        ("slow_medium", "test_rule_08_a_slow_medium_only_takes_longer"),
        ("hung_medium", "test_rule_07_cancelled_calls_on_a_hung_medium_leave_the_buffers_alone"),
        ("hung_medium", "test_rule_09_aclose_keeps_its_deadline_on_a_hung_medium"),
        ("failing_medium", "test_rule_02_a_failing_medium_is_told_and_overcome"),
    ],
)
def test_an_author_disturbs_the_real_medium_through_a_hook(hook: str, test: str, tmp_path: Path) -> None:
    told: list[object] = []

    @contextlib.contextmanager
    def disturb(self: BackendTests, tmp_path: Path) -> Iterator[None]:
        told.append(tmp_path)
        yield
        told.append("well again")

    run(type("OwnMediumKit", (MinimalKit,), {hook: disturb})(), test, tmp_path)
    assert told == [tmp_path, "well again"]


async def test_by_default_nothing_blocking_starts_on_a_hung_medium(tmp_path: Path) -> None:
    ran: list[int] = []
    with MinimalKit().hung_medium(tmp_path):
        kept, dropped = (asyncio.create_task(run_blocking(ran.append, n)) for n in (1, 2))
        await asyncio.sleep(0.01)
        dropped.cancel()
        await asyncio.wait((dropped,))
        assert (ran, kept.done(), dropped.cancelled()) == ([], False, True)
    await kept
    assert ran == [1]


async def test_by_default_blocking_calls_start_late_on_a_slow_medium(tmp_path: Path) -> None:
    ran: list[int] = []
    with MinimalKit().slow_medium(tmp_path):
        began_s = time.monotonic()
        await asyncio.gather(*(run_blocking(ran.append, n) for n in range(5)))
        assert time.monotonic() - began_s >= 0.01
    assert sorted(ran) == [0, 1, 2, 3, 4]


def test_by_default_no_file_grows_on_a_failing_medium(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with MinimalKit().failing_medium(tmp_path), pytest.raises(OSError) as failure:
        file.write_bytes(b"x")
    assert failure.value.errno == errno.EFBIG
    assert file.write_bytes(b"xyz") == 3


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
