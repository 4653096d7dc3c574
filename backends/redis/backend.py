"""The Redis tier: shared by every process that knows the server, bounded by the server's own means.

Blocks go between the caller's buffers and the socket in threads, one a connection. Redis knows no errors that are not
about a whole command, so a batch is made of single-key commands, in few round trips.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from backends.redis.batch import Batch, Load, Lookup, Redirect, Store
from backends.redis.check import VALUE_BYTES_MAX, look_at_all
from backends.redis.config import RedisConfig
from backends.redis.connect import make_topology, operators_words
from backends.redis.failures import RedisFailure
from backends.redis.inspect import inspect_servers
from backends.redis.node import Node
from backends.redis.topology import Topology
from tiering.api import (
    HEADER_BYTES,
    Backend,
    BackendCapabilities,
    BackendError,
    BlockKey,
    ClosedError,
    ConfigError,
    InspectedBlock,
    Namespace,
    Outcome,
    ShapeError,
)

KEY_BYTES_MAX: Final = 36
HOPS_MAX: Final = 4
"""Redirects that a call follows for one block; a cluster needs one, and two while slots move."""
SPREAD_BYTES_MIN: Final = 4 << 20
"""Payload that makes a further connection of one call worth its thread: a millisecond's transfer or more."""
CUT_SHARE, CUT_S_MAX = 0.25, 1.0
"""Of the deadline of ``aclose``, the end in which calls that still run are cut off and their threads return."""


class RedisBackend(Backend):
    """Shared and persistent. A block's key is ``PREFIX:NAMESPACE DIGEST IN HEX:BLOCK KEY``, its value is header and payload.

    State changes on the I/O loop alone. A call takes a connection from its server's pool, and further ones if they are
    free; what it has not done when a connection breaks goes over a new one.
    """

    def __init__(self, config: RedisConfig) -> None:
        self.config = config
        self.capabilities = BackendCapabilities(
            persistent=True, shared=True, exclusive=False, value_bytes_max=VALUE_BYTES_MAX - HEADER_BYTES
        )
        self._tier = config.name or config.type
        self._namespace: Namespace | None = None
        self._topology: Topology | None = None
        self._root = b""
        """What the keys of this namespace begin with."""
        self._begun = False
        self._closed = False
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # Life.

    async def open(self, namespace: Namespace) -> None:
        if self._closed:
            raise ClosedError(f"{self._tier}: open after aclose; make a new backend")
        if self._begun:
            raise BackendError("open was called a second time; make a new backend", tier=self._tier, op="open")
        self._begun = True
        self._require_fit(namespace, VALUE_BYTES_MAX, "Redis takes")
        self._root = b"%b:%b:" % (self.config.prefix.encode(), namespace.digest.hex().encode())
        with self._counted():
            self._topology = await make_topology(self.config)
            with operators_words(self.config, "open"):
                for facts in await look_at_all(self._topology, self.config, self._root):
                    self._require_fit(namespace, facts.value_bytes_max, f"proto-max-bulk-len of {facts.address} allows")
        self._namespace = namespace

    def _require_fit(self, namespace: Namespace, value_bytes_max: int, whose: str) -> None:
        largest = max(namespace.payload_bytes)
        if largest + HEADER_BYTES > value_bytes_max:
            raise ConfigError(
                f"{self._tier}: a block of {largest} bytes and its header of {HEADER_BYTES} are more than the"
                f" {value_bytes_max} bytes that {whose} in one value; use fewer tokens a block"
            )

    async def aclose(self, deadline_s: float) -> None:
        """Calls still running shortly before the deadline are cut off: their blocks come back FAILED."""
        self._closed = True
        cut_s = min(CUT_S_MAX, CUT_SHARE * deadline_s)
        if not await self._ended(deadline_s - cut_s):
            for node in self._nodes():
                node.interrupt()
            if not await self._ended(cut_s):
                raise BackendError(f"{self._calls} calls outlast the deadline", tier=self._tier, op="aclose")
        for node in self._nodes():
            node.leave()

    def _nodes(self) -> Sequence[Node]:
        return self._topology.everything() if self._topology is not None else []

    async def _ended(self, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    # Blocks.

    def inspect(self, *, verify: bool) -> AsyncGenerator[list[InspectedBlock], None]:
        """Every block under the prefix, of all namespaces, in the order that the server keeps them in."""
        return inspect_servers(self.config, verify_blocks=verify)

    async def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return await self._call("contains", lambda _: Lookup(b"EXISTS", self._names(keys)))

    async def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        return await self._call("delete", lambda _: Lookup(b"UNLINK", self._names(keys)))

    async def load(self, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        return await self._call(
            "load", lambda namespace: Load(namespace, self._names([key for key, _ in items]), items)
        )

    async def store(self, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        return await self._call(
            "store",
            lambda namespace: Store(namespace, self._names([key for key, _ in items]), items, self.config.ttl_s),
        )

    # Calls.

    def _names(self, keys: Sequence[BlockKey]) -> list[bytes]:
        for key in keys:
            if not 1 <= len(key) <= KEY_BYTES_MAX:
                raise ShapeError(f"the key has {len(key)} bytes; a block key has 1 to {KEY_BYTES_MAX}")
        return [self._root + key for key in keys]

    async def _call(self, op: str, make: Callable[[Namespace], Batch]) -> list[Outcome]:
        if self._closed:
            raise ClosedError(f"{self._tier}: {op} after aclose")
        if self._namespace is None or self._topology is None:
            raise BackendError(f"{op} before open", tier=self._tier, op=op)
        batch = make(self._namespace)
        with self._counted():
            await self._settle(batch, self._topology)
        return [_final(result) for result in batch.results]

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """So that ``aclose`` can wait for the call."""
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def _settle(self, batch: Batch, topology: Topology) -> None:
        """Give every block to the server that has it, and follow it if it has moved."""
        pending: Sequence[int] = [at for at, result in enumerate(batch.results) if result is None]
        homes: dict[int, Home] = {}
        for _ in range(HOPS_MAX):
            if not pending:
                return
            try:
                shares = await _shares(batch, pending, homes, topology)
            except RedisFailure as failure:
                batch.fail(pending, Outcome.failed(str(failure), retryable=failure.retryable))
                return
            await _together([self._serve(batch, home, places, topology) for home, places in shares.items()])
            pending, homes = _moved(batch, shares, topology)

    async def _serve(self, batch: Batch, home: Home, places: Sequence[int], topology: Topology) -> None:
        """One server's share of a batch, over as many connections as are free and worth it."""
        todo = deque(places)
        lost: list[Outcome] = []  # and not the failures: their tracebacks would keep the caller's buffers

        async def serve_some() -> None:
            try:
                await home.node.run(lambda connection: batch.work(connection, todo, home.asking), storing=batch.storing)
            except RedisFailure as failure:
                lost.append(Outcome.failed(str(failure), retryable=failure.retryable))

        most = max(1, min(home.node.spare(storing=batch.storing), self.config.connections_max // 2))
        width = min(most, len(places), max(1, batch.payload_bytes // SPREAD_BYTES_MIN))
        await _together([serve_some() for _ in range(width)])
        if todo:
            # Everybody has lost the connection; blocks that only some had are taken over by the others.
            batch.fail(todo, lost[-1])
        if batch.misled:
            home.node.forget_idle()
        if todo or batch.misled:
            topology.doubt()


class Home(NamedTuple):
    """Where a block is to be asked for, and whether as an exception to the map (after ASK)."""

    node: Node
    asking: bool


async def _shares(
    batch: Batch, pending: Sequence[int], homes: Mapping[int, Home], topology: Topology
) -> dict[Home, list[int]]:
    """The places of a batch by home: those in ``homes``, and the topology's for the others. Raises ``RedisFailure``."""
    shares: defaultdict[Home, list[int]] = defaultdict(list)
    for at, home in homes.items():
        shares[home].append(at)
    others = [at for at in pending if at not in homes]
    if others:
        for node, found in await topology.route([batch.keys[at] for at in others]):
            shares[Home(node, False)] += [others[at] for at in found]
    return shares


def _moved(batch: Batch, shares: Mapping[Home, Sequence[int]], topology: Topology) -> tuple[list[int], dict[int, Home]]:
    """The blocks that a server sent elsewhere, and where."""
    homes: dict[int, Home] = {}
    for home, places in shares.items():
        for at in places:
            redirect = batch.results[at]
            if isinstance(redirect, Redirect):
                try:
                    homes[at] = Home(topology.learn(batch.keys[at], redirect, home.node.address), redirect.ask)
                except RedisFailure as failure:
                    batch.fail([at], Outcome.failed(str(failure), retryable=failure.retryable))
    return list(homes), homes


async def _together(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    """All of ``calls``. Cancelled, it returns when all have ended."""
    if len(calls) == 1:
        await calls[0]
        return
    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(call, name="redis-share")


def _final(result: Outcome | Redirect | None) -> Outcome:
    if isinstance(result, Outcome):
        return result
    return Outcome.failed("the members of the cluster send each other's way; its slots are on the move", retryable=True)
