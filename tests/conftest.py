"""What holds for every test: no thread of ours outlives it, and Hypothesis has no deadline of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The parent is Hypothesis's own choice: with CI set it draws the same examples each time.
settings.register_profile("kvtiering", parent=settings.default, deadline=None, print_blob=True)
settings.load_profile("kvtiering")

THREAD_END_S = 5.0
"""How long a thread that was told to end may take on a loaded machine."""

FOREIGN_THREADS = ("tqdm", "asyncio_", "pytest")
"""Threads that libraries keep for the life of the process or of a test's own event loop."""


@pytest.fixture(autouse=True)
def no_thread_outlives_a_test() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and _is_ours(thread)]
    for thread in left:
        thread.join(THREAD_END_S)
    alive = [thread.name for thread in left if thread.is_alive()]
    assert not alive, f"threads outlive the test: {alive}"


def _is_ours(thread: threading.Thread) -> bool:
    return not thread.name.startswith(FOREIGN_THREADS) and not type(thread).__module__.startswith("tqdm")


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the checkout."""
    return Path(__file__).resolve().parent.parent
