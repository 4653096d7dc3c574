"""The ten rules in one line each, and the one way in which the kit reports that one is broken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

RULES: Final = {
    1: "batch in, one outcome an item, same order; empty batches and repeated keys are legal",
    2: "missing is a value; an exception means that the whole call failed",
    3: "partial failure is normal; the rest of the batch is still tried",
    4: "src and dest are the caller's views: use them in place, keep none after return",
    5: "a load is OK only if dest holds the whole, verified block",
    6: "store is idempotent and atomic: no reader ever sees a part",
    7: "on cancellation do not return until nothing of yours touches the buffers",
    8: "calls may overlap, also on one key; bound your own fan-out",
    9: "aclose is idempotent, waits for calls in flight, and then each method raises ClosedError",
    10: "quiet: no log line a block, nothing outlives aclose, no heavy client imported before open",
}


def broken(rule: int, message: str) -> AssertionError:
    """What the kit raises when ``rule`` is broken: its number and its words come first."""
    return AssertionError(f"rule {rule} ({RULES[rule]}): {message}")


@contextmanager
def blame(rule: int, when: str) -> Iterator[None]:
    """What the kit finds broken within the block is a breach of ``rule``, whatever it looks like on its own."""
    try:
        yield
    except AssertionError as error:
        if str(error).startswith(f"rule {rule} "):
            raise
        raise broken(rule, f"{when}: {error}") from error


def require(condition: bool, rule: int, message: str) -> None:
    """Raises ``broken(rule, message)`` unless ``condition`` holds; a plain assert would vanish under ``python -O``."""
    if not condition:
        raise broken(rule, message)
