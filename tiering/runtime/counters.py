"""What one tier did, in numbers that only grow. Written on the I/O loop, read from any thread."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final, Literal, TypeAlias, TypedDict

from tiering.types import Outcome, OutcomeCode

Kind: TypeAlias = Literal["probe", "load", "store", "delete"]
KINDS: Final[tuple[Kind, ...]] = ("probe", "load", "store", "delete")

ErrorKind: TypeAlias = Literal["raised", "defect", "failed", "timeout", "queue_timeout", "refused_down"]
ERRORS: Final[tuple[ErrorKind, ...]] = ("raised", "defect", "failed", "timeout", "queue_timeout", "refused_down")

BUCKETS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper edges of the latency buckets; one more, without an edge, follows."""


class Latency(TypedDict):
    calls: int
    sum_s: float
    buckets: tuple[int, ...]
    """Calls by duration, one more than ``BUCKETS_S``; not cumulative. Their sum is ``calls``."""


class TierCounts(TypedDict):
    """A snapshot. All since the start of the process, whatever was reset or reopened meanwhile."""

    submitted_ops: dict[Kind, int]
    submitted_blocks: dict[Kind, int]
    finished_ops: dict[Kind, int]
    """Equals ``submitted_ops`` when nothing is queued or running."""
    blocks: dict[Kind, dict[str, int]]
    """Items by the outcome that was reported (values of ``OutcomeCode``)."""
    bytes: dict[Kind, int]
    """Payload bytes of the items that came back OK."""
    calls: dict[Kind, int]
    """Backend calls begun, retries included, trials not."""
    errors: dict[ErrorKind, int]
    """Backend calls that ``raised`` a BackendError, broke the contract (``defect``), ``failed`` every item, or passed
    the deadline (``timeout``); operations whose deadline passed in the queue (``queue_timeout``) or that were refused
    because the tier was not up (``refused_down``). One call counts once, except that a timeout may also fail later."""
    retries: int
    timeouts: int
    """Operations that passed their deadline, queued or running."""
    trials: int
    breaker_opens: dict[str, int]
    worker_deaths: int
    latency: dict[Kind, Latency]
    """Duration of the backend calls that returned outcomes."""


class TierCounters:
    """One tier's counts. The lock is held for a few additions only, so that a snapshot is consistent in itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._submitted_ops = dict.fromkeys(KINDS, 0)
        self._submitted_blocks = dict.fromkeys(KINDS, 0)
        self._finished_ops = dict.fromkeys(KINDS, 0)
        self._blocks = {kind: dict.fromkeys(OutcomeCode, 0) for kind in KINDS}
        self._bytes = dict.fromkeys(KINDS, 0)
        self._calls = dict.fromkeys(KINDS, 0)
        self._errors = dict.fromkeys(ERRORS, 0)
        self._retries = 0
        self._timeouts = 0
        self._trials = 0
        self._breaker_opens = {"read": 0, "write": 0}
        self._worker_deaths = 0
        self._latency_s = dict.fromkeys(KINDS, 0.0)
        self._buckets = {kind: [0] * (len(BUCKETS_S) + 1) for kind in KINDS}

    def submitted(self, kind: Kind, blocks: int) -> None:
        with self._lock:
            self._submitted_ops[kind] += 1
            self._submitted_blocks[kind] += blocks

    def finished(self, kind: Kind, outcomes: Iterable[Outcome], ok_bytes: int) -> None:
        with self._lock:
            self._finished_ops[kind] += 1
            self._bytes[kind] += ok_bytes
            blocks = self._blocks[kind]
            for outcome in outcomes:
                blocks[outcome.code] += 1

    def called(self, kind: Kind) -> None:
        with self._lock:
            self._calls[kind] += 1

    def returned(self, kind: Kind, seconds: float) -> None:
        with self._lock:
            self._latency_s[kind] += seconds
            self._buckets[kind][bisect_left(BUCKETS_S, seconds)] += 1

    def error(self, what: ErrorKind) -> None:
        with self._lock:
            self._errors[what] += 1

    def timeout(self, what: Literal["timeout", "queue_timeout"]) -> None:
        with self._lock:
            self._errors[what] += 1
            self._timeouts += 1

    def retry(self) -> None:
        with self._lock:
            self._retries += 1

    def trial(self) -> None:
        with self._lock:
            self._trials += 1

    def breaker_opened(self, side: Literal["read", "write"]) -> None:
        with self._lock:
            self._breaker_opens[side] += 1

    def worker_died(self) -> None:
        with self._lock:
            self._worker_deaths += 1

    def snapshot(self) -> TierCounts:
        """A copy that stays as it is. Any thread."""
        with self._lock:
            return {
                "submitted_ops": dict(self._submitted_ops),
                "submitted_blocks": dict(self._submitted_blocks),
                "finished_ops": dict(self._finished_ops),
                "blocks": {
                    kind: {code.value: count for code, count in codes.items()} for kind, codes in self._blocks.items()
                },
                "bytes": dict(self._bytes),
                "calls": dict(self._calls),
                "errors": dict(self._errors),
                "retries": self._retries,
                "timeouts": self._timeouts,
                "trials": self._trials,
                "breaker_opens": dict(self._breaker_opens),
                "worker_deaths": self._worker_deaths,
                "latency": {
                    kind: {"calls": sum(buckets), "sum_s": self._latency_s[kind], "buckets": tuple(buckets)}
                    for kind, buckets in self._buckets.items()
                },
            }
