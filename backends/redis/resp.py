"""The Redis protocol (RESP2) over one connection: commands out, replies in, blocks straight into their buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from backends.redis.failures import ConnectionLost, ErrorReply
from backends.redis.wire import Part, Wire
from tiering.api import HEADER_BYTES

Reply: TypeAlias = "bytes | int | ErrorReply | list[Reply] | None"

BUFFER_BYTES: Final = 16 << 10
"""Holds replies that are no blocks, a part at a time; so also the most bytes of a line."""
BULK_BYTES_MAX: Final = 64 << 20
"""The longest text in a reply that is no block. The longest in use, INFO and CLUSTER SLOTS, take kilobytes."""
DEPTH_MAX: Final = 8
DRAIN_BYTES_MAX: Final = 8 << 20
"""A value that is longer than its block by more than this costs a new connection instead of its transfer."""

_ASKING: Final = b"*1\r\n$6\r\nASKING\r\n"


def encode(*words: bytes) -> bytes:
    """One command."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


class Connection:
    """One connection, used by one thread at a time.

    Every method raises ``ConnectionLost``, and after that the connection is good for nothing. ``clean`` tells whether
    the next reply would be that of the next command: only then may a connection be used for another call. One that was
    left in the middle of a reply never is, whoever left it and why.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._data = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._data)
        self._end_mark = memoryview(bytearray(2))
        """Where the end of a value goes, which must be CR LF."""
        self._start = self._end = 0
        """What was received and not yet taken: ``_data[_start:_end]``."""
        self._owed = 0
        """Replies that the server has yet to send, or that were not read to their end."""
        self.spent = False
        """The rest of a reply was not worth reading."""

    @property
    def clean(self) -> bool:
        return not (self._owed or self._end > self._start or self.wire.interrupted)

    def send(self, parts: Sequence[Part], replies: int) -> None:
        """``parts`` make whole commands, which will be answered by so many ``replies``."""
        self._owed += replies
        self.wire.send(parts)

    def reply(self) -> Reply:
        """The next reply; an error that the server answers with is a value."""
        reply = self._reply(0)
        self._owed -= 1
        return reply

    def command(self, *words: bytes) -> Reply:
        self.send([encode(*words)], 1)
        return self.reply()

    def pipeline(self, commands: Sequence[bytes]) -> list[Reply]:
        """The replies to encoded ``commands``, all sent before the first is read."""
        self.send([b"".join(commands)], len(commands))
        return [self.reply() for _ in commands]

    # Blocks.

    def ask(self, command: bytes, *, asking: bool) -> None:
        """Send a command that ``answer`` or ``block`` will read the reply of. ``asking``: as ASK redirects demand."""
        self.send([_ASKING + command if asking else command], 1 + asking)

    def answer(self, *, asking: bool) -> Reply:
        """The reply to a command that ``ask`` sent."""
        error = self._asked() if asking else None
        return error or self.reply()

    def block(self, header: memoryview, dest: memoryview, *, asking: bool) -> int | ErrorReply | None:
        """The reply to a GET: the value's length in bytes, or None if there is no such key.

        A value as long as ``header`` and ``dest`` together went into these; any other was thrown away. ``dest`` is
        written until this returns, and not after. A value that is longer by far is not even thrown away: the
        connection is ``spent``, and nothing more can be read from it.
        """
        if asking and (error := self._asked()):
            return error
        expected = len(header) + len(dest)
        wanted = b"$%d" % expected
        # No more than the line: what follows it goes where it belongs, in one call.
        line = self._line(len(wanted) + 2)
        if line == wanted:
            self._fill([header, dest, self._end_mark])
            self._require_end()
            self._owed -= 1
            return expected
        if line[:1] == b"-":
            self._owed -= 1
            return ErrorReply(line[1:].decode(errors="replace"))
        length = self._length(line, b"$")
        if length is not None and length > expected + DRAIN_BYTES_MAX:
            self.spent = True
            return length
        if length is not None:
            self._discard(length)
            self._fill([self._end_mark])
            self._require_end()
        self._owed -= 1
        return length

    def _asked(self) -> ErrorReply | None:
        """Reads the reply to ASKING. The command's own follows in any case."""
        reply = self.reply()
        if isinstance(reply, ErrorReply):
            self.reply()
            return reply
        return None

    # Parsing.

    def _reply(self, depth: int) -> Reply:
        line = self._line(BUFFER_BYTES)
        match line[:1]:
            case b"+":
                return line[1:]
            case b"-":
                return ErrorReply(line[1:].decode(errors="replace"))
            case b":":
                return self._number(line)
            case b"$":
                length = self._length(line, b"$")
                return None if length is None else self._bulk(length)
            case b"*" if depth < DEPTH_MAX:
                length = self._length(line, b"*")
                return None if length is None else [self._reply(depth + 1) for _ in range(length)]
        raise _nonsense(line)

    def _line(self, most: int) -> bytes:
        """The next line without its end. Takes at most ``most`` bytes at a time from the kernel."""
        while (at := self._data.find(b"\r\n", self._start, self._end)) < 0:
            if self._start:
                self._data[: self._end - self._start] = self._data[self._start : self._end]
                self._start, self._end = 0, self._end - self._start
            if self._end == BUFFER_BYTES:
                raise _nonsense(bytes(self._data))
            self._end += self.wire.receive(self._view[self._end : self._end + most])
        line = bytes(self._view[self._start : at])
        self._start = at + 2
        return line

    def _bulk(self, length: int) -> bytes:
        if length > BULK_BYTES_MAX:
            raise ConnectionLost(f"a reply of {length} bytes is above the limit of {BULK_BYTES_MAX}")
        text = bytearray(length)
        self._fill([memoryview(text), self._end_mark])
        self._require_end()
        return bytes(text)

    def _fill(self, views: Sequence[memoryview]) -> None:
        """Fill ``views`` from what was received already, then from the wire."""
        if self._start == self._end:
            self.wire.fill(views)
            return
        left = []
        for view in views:
            count = min(len(view), self._end - self._start)
            view[:count] = self._view[self._start : self._start + count]
            self._start += count
            if count < len(view):
                left.append(view[count:])
        if left:
            self.wire.fill(left)

    def _require_end(self) -> None:
        found = bytes(self._end_mark)
        if found != b"\r\n":
            raise _nonsense(found)

    def _discard(self, length: int) -> None:
        scratch = memoryview(bytearray(min(length, BUFFER_BYTES)))
        while length:
            self._fill([scratch[:length]])
            length -= min(length, BUFFER_BYTES)

    def _length(self, line: bytes, kind: bytes) -> int | None:
        if line[:1] != kind:
            raise _nonsense(line)
        length = self._number(line)
        if length < -1:
            raise _nonsense(line)
        return None if length == -1 else length

    def _number(self, line: bytes) -> int:
        try:
            return int(line[1:])
        except ValueError:
            raise _nonsense(line) from None


def _nonsense(what: bytes) -> ConnectionLost:
    return ConnectionLost(f"the peer does not speak the Redis protocol (it sent {what[:32]!r})")


def new_header() -> memoryview:
    """Room for the header of one block."""
    return memoryview(bytearray(HEADER_BYTES))
