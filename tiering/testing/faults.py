"""A backend that goes wrong on demand: real bytes go to an inner backend, a plan says what happens to each call.

The fault model. A call may be late, hang until it is released (and then finish, late), fail as a whole, or die of an
exception that no contract names. A block of a batch may be failed, refused, missing or corrupt beside good ones, be
claimed by ``contains`` though it is not there, or come back with a neighbour's bytes. A medium may be full for a
while. Faults are explicit or drawn from a seed; ``heal`` ends all of them, after which everything must drain.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypeVar

from tiering.api import Backend, BackendError, BlockKey, ClosedError, Namespace, Outcome, ScanEntry, Usage
from tiering.runtime.clock import Clock, SystemClock

T = TypeVar("T")
R = TypeVar("R")
Op: TypeAlias = Literal["open", "contains", "load", "store", "delete", "aclose"]
Item: TypeAlias = tuple[BlockKey, memoryview]
Call: TypeAlias = Coroutine[Any, Any, list[Outcome]]

ENOSPC: Final = Outcome.refused("ENOSPC: no space left on device")


class InjectedError(RuntimeError):
    """What a defect would raise: no ``BackendError``, so nobody expects it."""


@dataclass(slots=True, eq=False)
class _Rule:
    """One planned fault. ``left`` counts down the uses, None is for ever; ``keys`` None means every key."""

    op: Op
    left: int | None = None
    rate: float = 1.0
    keys: frozenset[BlockKey] | None = None
    error: Callable[[], Exception] | None = None
    outcome: Outcome | None = None
    other: BlockKey | None = None
    latency_s: float = 0.0


class _Gate:
    """Closed until opened, by any thread; waited for on any loop."""

    def __init__(self, op: Op, cancellable: bool) -> None:
        self.op = op
        self.cancellable = cancellable
        self._waiting: set[Future[None]] = set()

    def enter(self) -> Future[None]:
        future: Future[None] = Future()
        self._waiting.add(future)
        return future

    def leave(self, future: Future[None]) -> None:
        self._waiting.discard(future)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def open(self) -> None:
        for future in list(self._waiting):
            # False: its call was cancelled meanwhile.
            if future.set_running_or_notify_cancel():
                future.set_result(None)


class FaultPlan:
    """What goes wrong, in the order of the calls below, until used up or healed. Every method may be called from any thread.

    ``times``: how often the fault strikes (calls, or blocks for faults of a block); None: until ``heal``. ``rate``:
    the share of those that it strikes, drawn from ``seed``: the same seed and the same calls give the same faults.
    """

    def __init__(self, seed: int = 0) -> None:
        self._lock = threading.RLock()
        self._random = random.Random(seed)
        self._rules: list[_Rule] = []
        self._gates: dict[Op, _Gate] = {}
        self._watchers: list[tuple[Op, int, Future[None]]] = []

    def latency(self, op: Op, seconds: float, *, times: int | None = None, rate: float = 1.0) -> None:
        """Calls take ``seconds`` of the backend's clock longer, before the inner backend sees them."""
        self._add(_Rule(op, times, rate, latency_s=seconds))

    def fail_calls(
        self, op: Op, error: Callable[[], Exception], *, times: int | None = None, rate: float = 1.0
    ) -> None:
        """Whole calls raise what ``error()`` makes, such as a retryable ``BackendError``; nothing is read or written."""
        self._add(_Rule(op, times, rate, error=error))

    def die(self, op: Op, *, times: int | None = 1) -> None:
        """Calls raise ``InjectedError``."""
        self._add(_Rule(op, times, error=lambda: InjectedError(f"injected into {op}")))

    def outcomes(
        self,
        op: Op,
        outcome: Outcome,
        *,
        keys: Iterable[BlockKey] | None = None,
        times: int | None = None,
        rate: float = 1.0,
    ) -> None:
        """Single blocks end with ``outcome``; the inner backend sees only the rest of the batch."""
        self._add(_Rule(op, times, rate, None if keys is None else frozenset(keys), outcome=outcome))

    def enospc(self, stores: int) -> None:
        """The medium is full for the next ``stores`` blocks."""
        self.outcomes("store", ENOSPC, times=stores)

    def lie_about(self, keys: Iterable[BlockKey] | None = None) -> None:
        """``contains`` says OK for ``keys`` (all when None) whatever the truth is."""
        self.outcomes("contains", Outcome.OK, keys=keys)

    def swap_bytes(self, key: BlockKey, neighbour: BlockKey) -> None:
        """A load of ``key`` gives the bytes of ``neighbour`` and says OK: a backend that breaks rule 5."""
        self._add(_Rule("load", keys=frozenset((key,)), other=neighbour))

    def hang(self, op: Op, *, cancellable: bool = True) -> None:
        """Calls of ``op`` hang before the inner backend sees them, until ``release``.

        With ``cancellable=False`` a cancelled call behaves like a device that has the request already: it holds on
        to its buffers until released, then reads or writes them, and only then raises ``CancelledError`` (rule 7).
        """
        with self._lock:
            self._gates.setdefault(op, _Gate(op, cancellable)).cancellable = cancellable

    def release(self, op: Op | None = None) -> None:
        """Let the hung calls of ``op`` (None: of every op) go on, and hang no further ones."""
        with self._lock:
            gates = list(self._gates.values()) if op is None else [self._gates[op]] if op in self._gates else []
            for gate in gates:
                del self._gates[gate.op]
                gate.open()

    def hung(self, op: Op) -> int:
        """How many calls of ``op`` hang now."""
        with self._lock:
            return self._gates[op].waiting if op in self._gates else 0

    def when_hung(self, op: Op, calls: int = 1) -> Future[None]:
        """A future that is done once ``calls`` calls of ``op`` hang at the same time.

        For a thread: ``plan.when_hung("load").result(10)``; for a loop: ``await asyncio.wrap_future(...)``.
        """
        future: Future[None] = Future()
        with self._lock:
            if self.hung(op) >= calls:
                future.set_result(None)
            else:
                self._watchers.append((op, calls, future))
        return future

    def heal(self) -> None:
        """End every fault and release every hung call."""
        with self._lock:
            self._rules.clear()
            self.release()

    # What the backend asks.

    def _add(self, rule: _Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    def _strikes(self, rule: _Rule) -> bool:
        # The draw comes first, so that a rule that is used up still leaves the sequence as it was.
        struck = rule.rate >= 1.0 or self._random.random() < rule.rate
        if not struck or rule.left == 0:
            return False
        if rule.left is not None:
            rule.left -= 1
        return True

    def take_call(self, op: Op) -> tuple[float, Exception | None]:
        """The extra seconds of this call, and what it raises then."""
        with self._lock:
            seconds = 0.0
            for rule in self._rules:
                if rule.op != op or (rule.error is None and not rule.latency_s) or not self._strikes(rule):
                    continue
                seconds += rule.latency_s
                if rule.error is not None:
                    return seconds, rule.error()
            return seconds, None

    def take_block(self, op: Op, key: BlockKey) -> Outcome | BlockKey | None:
        """The outcome to report instead, the key whose bytes to give instead, or None: nothing is wrong."""
        with self._lock:
            for rule in self._rules:
                if rule.op != op or (rule.keys is not None and key not in rule.keys):
                    continue
                answer = rule.outcome or rule.other
                if answer is not None and self._strikes(rule):
                    return answer
            return None

    async def pass_gate(self, op: Op) -> bool:
        """Wait while ``op`` hangs; True if the call was cancelled meanwhile but must still run to its end."""
        with self._lock:
            gate = self._gates.get(op)
            if gate is None:
                return False
            opened = gate.enter()
            reached = [w for w in self._watchers if w[0] == op and w[1] <= gate.waiting]
            self._watchers = [w for w in self._watchers if w not in reached]
        for *_, watcher in reached:
            if watcher.set_running_or_notify_cancel():
                watcher.set_result(None)
        cancelled = False
        waiter = asyncio.wrap_future(opened)
        try:
            while not waiter.done():
                try:
                    await asyncio.wait((waiter,))
                except asyncio.CancelledError:
                    if gate.cancellable:
                        waiter.cancel()
                        raise
                    cancelled = True
        finally:
            with self._lock:
                gate.leave(opened)
        return cancelled


class FaultyBackend(Backend):
    """``inner`` with the faults of ``plan``. With an empty plan it is ``inner``, and passes the same conformance kit.

    ``calls``, ``keys`` and ``bytes`` count, per op, the calls that arrived, the keys in them and the bytes of the
    lent views, whatever became of them: "no more reads than blocks" is ``faulty.keys["load"] <= needed``.

    A hung call is in flight: ``aclose`` waits for it, by ``clock``, and raises ``BackendError`` at its deadline; the
    inner backend then stays open, so that a later release lets the late bytes land, and a second ``aclose`` ends it.
    """

    def __init__(self, inner: Backend, plan: FaultPlan, clock: Clock | None = None) -> None:
        self.inner = inner
        self.plan = plan
        self.capabilities = inner.capabilities
        self.calls: Counter[str] = Counter()
        self.keys: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._clock: Clock = clock or SystemClock()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    async def open(self, namespace: Namespace) -> None:
        with self._call("open", (), 0):
            cancelled = await self._suffer("open")
            await _finish(self.inner.open(namespace), cancelled)

    async def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        with self._call("contains", keys, 0):
            return await self._run("contains", keys, self.inner.contains, lambda key: key, lambda _, other: other)

    async def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        with self._call("delete", keys, 0):
            return await self._run("delete", keys, self.inner.delete, lambda key: key, lambda _, other: other)

    async def load(self, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        return await self._move("load", items, self.inner.load)

    async def store(self, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        return await self._move("store", items, self.inner.store)

    async def aclose(self, deadline_s: float) -> None:
        self.calls["aclose"] += 1
        self._closed = True
        cancelled = await self._suffer("aclose")
        if self._in_flight:
            await self._drain(deadline_s)
        await _finish(self.inner.aclose(deadline_s), cancelled)

    def scan(self) -> AsyncIterator[list[ScanEntry]]:
        return self.inner.scan()

    async def usage(self) -> Usage | None:
        return await self.inner.usage()

    def link(self, parents: Mapping[BlockKey, BlockKey]) -> None:
        self.inner.link(parents)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self.inner.touch(keys)

    @contextmanager
    def _call(self, op: Op, keys: Sequence[bytes], view_bytes: int) -> Iterator[None]:
        if self._closed:
            raise ClosedError(f"{op} after aclose")
        self.calls[op] += 1
        self.keys[op] += len(keys)
        self.bytes[op] += view_bytes
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _move(self, op: Op, items: Sequence[Item], inner: Callable[[list[Item]], Call]) -> list[Outcome]:
        with self._call(op, [key for key, _ in items], sum(view.nbytes for _, view in items)):
            return await self._run(op, items, inner, lambda item: item[0], lambda item, other: (other, item[1]))

    async def _run(
        self,
        op: Op,
        items: Sequence[T],
        inner: Callable[[list[T]], Call],
        key_of: Callable[[T], BlockKey],
        with_key: Callable[[T, BlockKey], T],
    ) -> list[Outcome]:
        cancelled = await self._suffer(op)
        answers: list[Outcome | None] = []
        passed: list[T] = []
        for item in items:
            fault = self.plan.take_block(op, key_of(item))
            answers.append(fault if isinstance(fault, Outcome) else None)
            if not isinstance(fault, Outcome):
                passed.append(item if fault is None else with_key(item, fault))
        # Also when nothing is left: the inner backend still says whether it is open.
        rest = iter(await _finish(inner(passed), cancelled))
        return [answer if answer is not None else next(rest) for answer in answers]

    async def _suffer(self, op: Op) -> bool:
        """Be late, hang, raise: as planned. True if the call was cancelled but must still run to its end."""
        seconds, error = self.plan.take_call(op)
        if seconds:
            await self._clock.sleep(seconds)
        cancelled = await self.plan.pass_gate(op)
        if error is not None:
            raise error
        return cancelled

    async def _drain(self, deadline_s: float) -> None:
        idle = asyncio.create_task(self._idle.wait(), name="faulty-drain")
        late = asyncio.create_task(self._clock.sleep(deadline_s), name="faulty-deadline")
        try:
            await asyncio.wait((idle, late), return_when=asyncio.FIRST_COMPLETED)
        finally:
            idle.cancel()
            late.cancel()
            await asyncio.gather(idle, late, return_exceptions=True)
        if self._in_flight:
            raise BackendError(f"{self._in_flight} calls still run after {deadline_s} s", op="aclose")


async def _finish(call: Coroutine[Any, Any, R], cancelled: bool) -> R:
    """The value of ``call``; if the caller is ``cancelled`` already, only to its end and then ``CancelledError``."""
    if not cancelled:
        return await call
    task = asyncio.create_task(call, name="faulty-late")
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            # Reported below, once the buffers are free.
            continue
    raise asyncio.CancelledError("cancelled while it hung") from task.exception()
