"""Blocks as objects of an async client: bounded fan-out, a time limit a request, and one outcome a block."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from backends.fsspec.clients import ObjectClient
from backends.fsspec.failures import Kind, Secrets, Trouble, timed_out, trouble_of
from backends.fsspec.names import Names
from backends.fsspec.payloads import in_thread_if_large, unpack
from tiering.api import HEADER_BYTES, BlockKey, Namespace, Outcome, OutcomeCode, ShapeError

T = TypeVar("T")
Work: TypeAlias = Callable[[], Coroutine[Any, Any, Outcome]]

_CLOSING: Final = Trouble(Kind.BUSY, "given up: the tier closes")


class RemoteBlocks:
    """Loads, stores and lookups have their own ``requests_max``: none waits for another kind's hung requests."""

    def __init__(
        self,
        client: ObjectClient,
        namespace: Namespace,
        names: Names,
        secrets: Secrets,
        *,
        tier: str,
        requests_max: int,
        timeout_s: float,
        executor: Executor,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._names = names
        self._secrets = secrets
        self._tier = tier
        self._requests_max = requests_max
        self._timeout_s = timeout_s
        self._executor = executor
        self._loads, self._stores, self._lookups = (asyncio.Semaphore(requests_max) for _ in range(3))
        self._limits: set[asyncio.Timeout] = set()
        """Of the requests under way."""
        self._aborted = False

    async def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return await self._each("contains", self._lookups, [partial(self._contains, key) for key in keys])

    async def load(self, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        return await self._each("load", self._loads, [partial(self._load, key, dest) for key, dest in items])

    async def store(self, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        return await self._each("store", self._stores, [partial(self._store, key, src) for key, src in items])

    async def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        return await self._each("delete", self._lookups, [partial(self._delete, key) for key in keys])

    async def probe(self) -> Trouble | None:
        """What is wrong with the bucket or the credentials, if anything."""
        answer = await self.request("LIST", lambda: self._client.probe(self._names.directory))
        return answer if isinstance(answer, Trouble) else None

    async def request(self, op: str, call: Callable[[], Awaitable[T]]) -> T | Trouble:
        """The client's answer within the time limit, or why there is none. Only our own cancellation is raised."""
        if self._aborted:
            return _CLOSING
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                self._limits.add(limit)
                try:
                    return await call()
                finally:
                    self._limits.discard(limit)
                    del limit  # it knows the task: see _cancelling
        except TimeoutError:
            return self._given_up(op)
        except asyncio.CancelledError:
            if _cancelling():
                raise
            return Trouble(Kind.BUSY, f"{op}: cancelled by the client")
        except Exception as error:
            return trouble_of(op, error, self._secrets)

    def _given_up(self, op: str) -> Trouble:
        return _CLOSING if self._aborted else timed_out(op, self._timeout_s)

    def abort(self) -> None:
        """Give up the requests under way, and those that still wait for their turn. Their calls return soon."""
        self._aborted = True
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(now)

    async def aclose(self) -> None:
        """Nothing is under way. Returns when the client's connections are closed."""
        await self._client.aclose()

    async def _each(self, op: str, turn: asyncio.Semaphore, works: Sequence[Work]) -> list[Outcome]:
        """Every work's outcome. On cancellation it returns when none of them runs any more."""
        if len(works) == 1:
            async with turn:
                return [await works[0]()]
        outcomes = [Outcome.CANCELLED] * len(works)
        todo = iter(enumerate(works))

        async def take_turns() -> None:
            for at, work in todo:
                async with turn:
                    outcomes[at] = await work()

        names = [f"{self._tier}-{op}-{n}" for n in range(min(len(works), self._requests_max))]
        if not await _all_done(take_turns, names):
            raise asyncio.CancelledError
        return outcomes

    async def _contains(self, key: BlockKey) -> Outcome:
        answer = await self.request("HEAD", lambda: self._client.size(self._names.block(key)))
        if isinstance(answer, Trouble):
            return answer.outcome()
        # What has no block's size is none: some servers leave an empty object of an upload that was cut off.
        return Outcome.OK if answer - HEADER_BYTES in self._namespace.payload_bytes else Outcome.MISSING

    async def _load(self, key: BlockKey, dest: memoryview) -> Outcome:
        path = self._names.block(key)
        # One byte more than the block has shows that the object is longer; a huge one is not fetched for that.
        bytes_max = HEADER_BYTES + dest.nbytes + 1
        answer = await self.request("GET", lambda: self._client.get(path, bytes_max))
        if isinstance(answer, Trouble):
            verdict = answer.outcome()
        else:
            body = memoryview(answer)
            if not body.nbytes:
                return Outcome.MISSING  # as for a lookup
            unpacking = partial(unpack, self._namespace, key, body, dest)
            verdict = await in_thread_if_large(unpacking, dest.nbytes, self._executor)
        if verdict.code is OutcomeCode.CORRUPT:
            # Where it cannot be removed it is CORRUPT again next time; a store replaces it either way.
            await self.request("DELETE", lambda: self._client.remove(path))
        return verdict

    async def _store(self, key: BlockKey, src: memoryview) -> Outcome:
        if src.nbytes not in self._namespace.payload_bytes:
            return Outcome.failed(f"no block of this namespace has {src.nbytes} bytes")
        packing = partial(self._client.pack, self._namespace, key, src)
        try:
            body = await in_thread_if_large(packing, src.nbytes, self._executor)
        except ShapeError as error:
            return Outcome.failed(str(error))
        answer = await self.request("PUT", lambda: self._client.put(self._names.block(key), body))
        return answer.store_outcome() if isinstance(answer, Trouble) else Outcome.OK

    async def _delete(self, key: bytes) -> Outcome:
        # A DELETE does not tell whether there was anything to remove.
        found = await self.request("HEAD", lambda: self._client.size(self._names.block(key)))
        if isinstance(found, Trouble):
            return found.outcome()
        answer = await self.request("DELETE", lambda: self._client.remove(self._names.block(key)))
        return answer.outcome() if isinstance(answer, Trouble) else Outcome.OK


async def _all_done(worker: Callable[[], Coroutine[Any, Any, None]], names: Sequence[str]) -> bool:
    """One task a name runs ``worker``. False if this was cancelled meanwhile; the tasks have ended either way.

    The caller raises the cancellation anew: the group's own exception is in a cycle with its frames and the task, which
    would keep alive, until the next collection, whatever views the task's callers hold.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(worker(), name=name)
    except asyncio.CancelledError as error:
        error.__traceback__ = None
        return False
    return True


def _cancelling() -> bool:
    """Whether somebody cancelled this task. A function: the task in a frame of its own traceback would be a cycle."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
