"""The reader of replies against every way in which bytes may arrive, and against bytes that are no replies."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.redis.failures import ConnectionLost, ErrorReply
from backends.redis.resp import Connection, Reply, encode
from backends.redis.wire import Wire

HEADER, DEST = 128, 3000
PAYLOAD = bytes(range(256)) * 12 + b"tail" * 14
assert len(PAYLOAD) == HEADER + DEST


@contextmanager
def peer(*pieces: bytes, timeout_s: float = 5.0) -> Iterator[Connection]:
    """A connection whose other end sends ``pieces`` one by one, and then ends its side."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        with theirs, contextlib.suppress(OSError):  # the reader may have heard enough
            for piece in pieces:
                theirs.sendall(piece)
            theirs.shutdown(socket.SHUT_WR)
            while theirs.recv(1 << 16):
                continue

    sender = threading.Thread(target=send)
    sender.start()
    connection = Connection(Wire(ours, timeout_s))
    try:
        yield connection
    finally:
        connection.wire.close()
        sender.join()


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(places)]


def written(reply: Reply) -> bytes:
    """A reply as the protocol writes it."""
    match reply:
        case None:
            return b"$-1\r\n"
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case int():
            return b":%d\r\n" % reply
        case ErrorReply(text=text):
            return b"-%b\r\n" % text.encode()
        case list():
            return b"*%d\r\n" % len(reply) + b"".join(map(written, reply))
    raise AssertionError(reply)


lines = st.text("abc XYZ", max_size=20)
leaves = st.none() | st.binary(max_size=40) | st.integers(-9, 10**12) | lines.map(ErrorReply)
replies = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4), max_leaves=8)
cuts = st.lists(st.integers(0, 10**6), max_size=12)


@given(st.lists(replies, min_size=1, max_size=5), cuts)
@settings(max_examples=60)
def test_replies_in_any_pieces(expected: list[Reply], cuts: list[int]) -> None:
    with peer(*split(b"".join(map(written, expected)), cuts)) as connection:
        connection._owed = len(expected)
        assert [connection.reply() for _ in expected] == expected
        assert connection.clean


blocks = st.sampled_from(["block", "missing", "error", "short", "long", "asked", "ask refused"])


@given(st.lists(blocks, min_size=1, max_size=5), cuts)
@settings(max_examples=60)
def test_blocks_in_any_pieces(kinds: list[str], cuts: list[int]) -> None:
    """One after the other on one connection, among replies of other kinds: each is whole or a value, and none shifts."""
    texts = {
        "block": written(PAYLOAD),
        "missing": b"$-1\r\n",
        "error": b"-ERR a longer line than the one of a block\r\n",
        "short": written(b"x" * 10),
        "long": written(b"y" * 40_000),
        "asked": b"+OK\r\n" + written(PAYLOAD),
        "ask refused": b"-NOPERM no\r\n" + b"-MOVED 1 a:1\r\n",
    }
    results = {
        "block": len(PAYLOAD),
        "missing": None,
        "error": ErrorReply("ERR a longer line than the one of a block"),
        "short": 10,
        "long": 40_000,
        "asked": len(PAYLOAD),
        "ask refused": ErrorReply("NOPERM no"),
    }
    with peer(*split(b"".join(texts[kind] for kind in kinds), cuts)) as connection:
        for kind in kinds:
            header, dest = bytearray(HEADER), bytearray(DEST)
            connection.ask(encode(b"GET", b"k"), asking=kind.startswith("ask"))
            found = connection.block(memoryview(header), memoryview(dest), asking=kind.startswith("ask"))
            assert found == results[kind]
            assert bytes(header + dest) == (PAYLOAD if found == len(PAYLOAD) else bytes(HEADER + DEST))
        assert connection.clean


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\x15\x03\x01\x00\x02\x02\x50\r\n",
        b"+" + b"x" * 20_000,
        b"$5\r\nhello..",
        b"$99999999999\r\n",
        b"$-2\r\n",
        b"$x\r\n",
        b":one\r\n",
        b"*-2\r\n",
        b"*1\r\n" * 20 + b":1\r\n",
        b"$5\r\nhel",
        b"*3\r\n:1\r\n:2\r\n",
        b"%1\r\n+a\r\n:1\r\n",
    ],
)
def test_what_is_no_reply_ends_the_connection(data: bytes) -> None:
    with peer(data) as connection:
        connection.ask(encode(b"PING"), asking=False)
        with pytest.raises(ConnectionLost):
            connection.answer(asking=False)
        assert not connection.clean


@pytest.mark.parametrize(
    "data", [b"", b"$3128\r\n" + PAYLOAD[:50], written(PAYLOAD)[:-2] + b"..", b"+OK\r\n", b"$-7\r\n"]
)
def test_a_block_that_breaks_off_ends_the_connection(data: bytes) -> None:
    """row 13"""
    with peer(data) as connection:
        connection.ask(encode(b"GET", b"k"), asking=False)
        with pytest.raises(ConnectionLost):
            connection.block(memoryview(bytearray(HEADER)), memoryview(bytearray(DEST)), asking=False)
        assert not connection.clean


def test_a_connection_is_not_clean_while_it_owes_or_holds_something() -> None:
    with peer(b"+OK\r\n+unasked\r\n") as connection:
        assert connection.clean
        connection.ask(encode(b"PING"), asking=False)
        assert not connection.clean
        assert connection.answer(asking=False) == b"OK"
        assert not connection.clean, "somebody else's answer is waiting"


def test_a_value_that_is_far_too_long_is_not_read() -> None:
    with peer(b"$20000000\r\n" + bytes(1000)) as connection:
        connection.ask(encode(b"GET", b"k"), asking=False)
        found = connection.block(memoryview(bytearray(HEADER)), memoryview(bytearray(DEST)), asking=False)
        assert found == 20_000_000
        assert connection.spent
        assert not connection.clean


def test_an_interrupted_connection_fails_at_once_and_for_good() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        connection = Connection(Wire(ours, 60))
        connection.ask(encode(b"GET", b"k"), asking=False)
        told: list[str] = []

        def read() -> None:
            try:
                connection.block(memoryview(bytearray(HEADER)), memoryview(bytearray(DEST)), asking=False)
            except ConnectionLost as lost:
                told.append(str(lost))

        reader = threading.Thread(target=read)
        reader.start()
        theirs.sendall(b"$3128\r\n" + PAYLOAD[:1000])
        connection.wire.interrupt()
        reader.join(5)
        assert not reader.is_alive()
        assert told == ["the call was given up"]
        with pytest.raises(ConnectionLost, match="given up"):
            connection.command(b"PING")
        assert not connection.clean
        connection.wire.close()


def test_a_silent_peer_is_given_up() -> None:
    """row 8: between replies, in a line, and in a block."""
    for data in (b"", b"+O", b"$3128\r\n" + PAYLOAD[:500]):
        ours, theirs = socket.socketpair()
        with theirs:
            connection = Connection(Wire(ours, 0.05))
            theirs.sendall(data)
            connection.ask(encode(b"GET", b"k"), asking=False)
            with pytest.raises(ConnectionLost, match=r"silent for 0\.05 s") as caught:
                connection.block(memoryview(bytearray(HEADER)), memoryview(bytearray(DEST)), asking=False)
            assert caught.value.silent
            connection.wire.close()
