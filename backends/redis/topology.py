"""Which server has which key: one server, or the one that the Sentinels name. ``cluster.py`` is the third answer."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from backends.redis.batch import Redirect
from backends.redis.dial import rejected
from backends.redis.failures import ErrorReply, RedisFailure, Rejected, Unreachable
from backends.redis.node import Node
from backends.redis.resp import Connection
from backends.redis.url import Address

MakeNode: TypeAlias = Callable[[Address], Node]


class Topology(abc.ABC):
    """Finds servers. Everything here happens on the I/O loop; what has to be asked for is asked within a call."""

    @property
    @abc.abstractmethod
    def nodes(self) -> Sequence[Node]:
        """The servers that hold blocks, as far as known."""

    @abc.abstractmethod
    async def route(self, keys: Sequence[bytes]) -> list[tuple[Node, list[int]]]:
        """The server of each key: the places in ``keys`` by server. Raises ``RedisFailure``."""

    @abc.abstractmethod
    def doubt(self) -> None:
        """A server failed, or sent us elsewhere: ask anew before the next ``route``."""

    def learn(self, key: bytes, redirect: Redirect, origin: Address) -> Node:
        """The server that ``redirect`` names. Raises ``Rejected`` where redirects make no sense."""
        raise Rejected(f"{origin} is a member of a cluster; set `mode: cluster`", retryable=False)

    @abc.abstractmethod
    def everything(self) -> Sequence[Node]:
        """``nodes``, and those that only tell where they are: what is to be closed."""


class Standalone(Topology):
    def __init__(self, address: Address, make_node: MakeNode) -> None:
        self._node = make_node(address)

    @property
    def nodes(self) -> Sequence[Node]:
        return [self._node]

    async def route(self, keys: Sequence[bytes]) -> list[tuple[Node, list[int]]]:
        return [(self._node, list(range(len(keys))))]

    def doubt(self) -> None:
        """There is no other server."""

    def everything(self) -> Sequence[Node]:
        return self.nodes


class Sentinel(Topology):
    """Asks the Sentinels, one after the other, which server is the master of ``service``."""

    def __init__(
        self, service: str, sentinels: Sequence[Address], make_sentinel: MakeNode, make_node: MakeNode
    ) -> None:
        self._service = service
        self._sentinels = [make_sentinel(address) for address in sentinels]
        self._make_node = make_node
        self._master: Node | None = None
        self._doubtful = True
        self._asked = 0
        """Counts the times that the Sentinels were asked, so that of many calls in doubt one asks."""
        self._asking = asyncio.Lock()

    @property
    def nodes(self) -> Sequence[Node]:
        return [self._master] if self._master is not None else []

    def everything(self) -> Sequence[Node]:
        return [*self._sentinels, *self.nodes]

    def doubt(self) -> None:
        self._doubtful = True

    async def route(self, keys: Sequence[bytes]) -> list[tuple[Node, list[int]]]:
        if self._doubtful:
            seen = self._asked
            async with self._asking:
                if seen == self._asked:
                    await self._find()
        if self._master is None:
            raise Unreachable(f"no master of {self._service} is known")
        return [(self._master, list(range(len(keys))))]

    async def _find(self) -> None:
        try:
            address = await self._ask_all()
        except RedisFailure:
            self._asked += 1
            if self._master is None:
                raise
            return  # the master may be well all the same; the doubt stays
        self._asked += 1
        if self._master is None or self._master.address != address:
            former, self._master = self._master, self._make_node(address)
            if former is not None:
                former.leave()
        self._doubtful = False

    async def _ask_all(self) -> Address:
        failures: list[RedisFailure] = []
        for sentinel in sorted(self._sentinels, key=lambda node: node.failing):
            try:
                return await sentinel.run(partial(self._ask, sentinel.address))
            except RedisFailure as failure:
                failures.append(failure)
        # What an operator must act upon says more than a Sentinel that is down.
        raise min(failures, key=lambda failure: failure.retryable)

    def _ask(self, sentinel: Address, connection: Connection) -> Address:
        """In a thread."""
        reply = connection.command(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._service.encode())
        match reply:
            case [bytes(host), bytes(port)] if port.isdigit():
                return Address(host.decode(), int(port))
            case None:
                raise Rejected(
                    f"the Sentinel {sentinel} knows no {self._service!r}; correct `sentinel_service:`", retryable=False
                )
            case ErrorReply(text=text) if "unknown command" in text.lower():
                raise Rejected(f"{sentinel} is no Sentinel; set `mode: standalone` or correct `url:`", retryable=False)
            case ErrorReply():
                raise rejected(sentinel, "SENTINEL", reply)
        raise Rejected(f"the Sentinel {sentinel} answered with {reply!r:.80}")
