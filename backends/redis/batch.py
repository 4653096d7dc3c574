"""What one call does to its blocks on a connection. All of it runs in threads, several on one batch at a time.

A batch's ``todo`` holds the places of blocks that nobody works on. Whoever loses its connection puts back what it had
begun, and another connection, or a new one, goes on from there.
"""

from __future__ import annotations

import abc
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from backends.redis.failures import MOVED_AWAY, ConnectionLost, ErrorReply, outcome_of
from backends.redis.resp import Connection, Reply, encode, new_header
from backends.redis.url import Address
from tiering.api import BlockKey, Namespace, Outcome, OutcomeCode, seal, verify

LOADS_AHEAD: Final = 4
"""GETs that are under way on one connection: the server writes the next ones while one is verified."""
LOOKUPS_AHEAD: Final = 1024
"""Short commands that are under way on one connection, in one round trip."""


@dataclass(frozen=True, slots=True)
class Redirect:
    """A cluster's server says that ``address`` is the one to ask: from now on, or (``ask``) for this command alone."""

    address: Address
    ask: bool


def redirect_of(error: ErrorReply) -> Redirect | None:
    """What a MOVED or ASK error says; None for another error, and for one that cannot be understood."""
    words = error.text.split()
    if len(words) < 3 or words[0] not in ("MOVED", "ASK"):
        return None
    host, _, port = words[2].rpartition(":")
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        return None
    return Redirect(Address(host.strip("[]"), int(port)), words[0] == "ASK")


class Batch(abc.ABC):
    """One call's blocks. ``results`` is complete, a value a block, once every share of it is done."""

    storing = False
    payload_bytes = 0
    """Bytes of all its blocks that are to be moved."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """``keys`` as the server knows them."""
        self.keys = keys
        self.results: list[Outcome | Redirect | None] = [None] * len(keys)
        self.misled = False
        """A server said that it is not, or not any more, the one to ask."""

    @abc.abstractmethod
    def work(self, connection: Connection, todo: deque[int], asking: bool) -> None:
        """Take places out of ``todo`` until it is empty, and settle each. Raises ``ConnectionLost``."""

    def fail(self, places: Iterable[int], outcome: Outcome) -> None:
        for at in places:
            self.results[at] = outcome

    def settle_error(self, at: int, error: ErrorReply) -> None:
        self.misled |= error.code in MOVED_AWAY
        self.results[at] = redirect_of(error) or outcome_of(error, store=self.storing)


class Lookup(Batch):
    """A short command a block, answered by 1 or 0: is it there, or was it until now."""

    def __init__(self, verb: bytes, keys: Sequence[bytes]) -> None:
        super().__init__(keys)
        self._verb = verb

    def work(self, connection: Connection, todo: deque[int], asking: bool) -> None:
        while part := take(todo, 1 if asking else LOOKUPS_AHEAD):
            try:
                if asking:
                    connection.ask(encode(self._verb, self.keys[part[0]]), asking=True)
                    replies = [connection.answer(asking=True)]
                else:
                    replies = connection.pipeline([encode(self._verb, self.keys[at]) for at in part])
            except BaseException:
                todo.extendleft(reversed(part))
                raise
            for at, reply in zip(part, replies, strict=True):
                self._settle(at, reply)

    def _settle(self, at: int, reply: Reply) -> None:
        if isinstance(reply, ErrorReply):
            self.settle_error(at, reply)
        elif isinstance(reply, int):
            self.results[at] = Outcome.OK if reply else Outcome.MISSING
        else:
            self.results[at] = Outcome.failed(f"{self._verb.decode()} was answered with {reply!r:.40}")


class Load(Batch):
    """Blocks into their buffers, each verified as soon as it is there. A bad one is deleted."""

    def __init__(
        self, namespace: Namespace, keys: Sequence[bytes], items: Sequence[tuple[BlockKey, memoryview]]
    ) -> None:
        super().__init__(keys)
        self._namespace = namespace
        self._items = items
        self.payload_bytes = sum(view.nbytes for _, view in items)
        self._bad: deque[int] = deque()
        """Where the server holds something bad that is still to be deleted."""

    def work(self, connection: Connection, todo: deque[int], asking: bool) -> None:
        sent: deque[int] = deque()
        header = new_header()
        try:
            while True:
                while len(sent) < LOADS_AHEAD and (part := take(todo, 1)):
                    sent += part
                    connection.ask(encode(b"GET", self.keys[part[0]]), asking=asking)
                if not sent:
                    break
                self._receive(connection, sent[0], header, asking)
                sent.popleft()
                if connection.spent:
                    raise ConnectionLost("a value that is far too long was not read", progress=True)
        except BaseException:
            todo.extendleft(reversed(sent))
            raise
        self._delete(connection, asking)

    def _receive(self, connection: Connection, at: int, header: memoryview, asking: bool) -> None:
        key, dest = self._items[at]
        length = connection.block(header, dest, asking=asking)
        if isinstance(length, ErrorReply):
            if length.code != "WRONGTYPE":
                self.settle_error(at, length)
                return
            outcome = Outcome.corrupt("another program's value stands in the block's place")
        elif length is None:
            outcome = Outcome.MISSING
        elif length != len(header) + len(dest):
            outcome = Outcome.corrupt(f"{length} bytes are stored; the block has {len(header) + len(dest)}")
        else:
            outcome = verify(self._namespace, key, header, dest)
        self.results[at] = outcome
        if outcome.code is OutcomeCode.CORRUPT:
            self._bad.append(at)

    def _delete(self, connection: Connection, asking: bool) -> None:
        # A newer, good value that was stored meanwhile goes too: a miss, which costs little and is rare.
        while part := take(self._bad, 1):
            try:
                connection.ask(encode(b"UNLINK", self.keys[part[0]]), asking=asking)
                connection.answer(asking=asking)
            except BaseException:
                self._bad.extendleft(part)
                raise


class Store(Batch):
    """Blocks from their buffers. A value appears as a whole or not at all: the server runs a SET once it has all of it.

    One SET at a time a connection: several in a row run at less than half the rate, since both sides then stop
    reading while they write.
    """

    storing = True

    def __init__(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        items: Sequence[tuple[BlockKey, memoryview]],
        ttl_s: float | None,
    ) -> None:
        super().__init__(keys)
        self._namespace = namespace
        self._items = items
        self.payload_bytes = sum(view.nbytes for _, view in items)
        expiry = [] if ttl_s is None else [b"EX", b"%d" % math.ceil(ttl_s)]
        self._words = 3 + len(expiry)
        self._expiry = b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in expiry])

    def work(self, connection: Connection, todo: deque[int], asking: bool) -> None:
        while part := take(todo, 1):
            at = part[0]
            size = len(self._items[at][1])
            if size not in self._namespace.payload_bytes:
                self.results[at] = Outcome.failed(f"no block of this namespace has {size} bytes")
                continue
            try:
                reply = self._set(connection, at, asking)
            except BaseException:
                todo.appendleft(at)
                raise
            if isinstance(reply, ErrorReply):
                self.settle_error(at, reply)
            elif reply == b"OK":
                self.results[at] = Outcome.OK
            else:
                self.results[at] = Outcome.failed(f"SET was answered with {reply!r:.40}")

    def _set(self, connection: Connection, at: int, asking: bool) -> Reply:
        key, src = self._items[at]
        header = seal(self._namespace, key, src)
        name = self.keys[at]
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (
            self._words, len(name), name, len(header) + len(src), header,
        )  # fmt: skip
        if asking:
            head = encode(b"ASKING") + head
        connection.send([head, src, b"\r\n" + self._expiry], 1 + asking)
        return connection.answer(asking=asking)


def take(todo: deque[int], most: int) -> list[int]:
    """Up to ``most`` places from the left. Safe beside other threads that do the same."""
    part: list[int] = []
    while len(part) < most:
        try:
            part.append(todo.popleft())
        except IndexError:
            break
    return part
