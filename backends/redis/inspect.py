"""Looks at every block on the servers, for ``tiering inspect``. Changes nothing, and needs the right to SCAN."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Final

from backends.redis.config import RedisConfig
from backends.redis.connect import make_topology, operators_words
from backends.redis.dial import rejected
from backends.redis.failures import ErrorReply, Rejected, outcome_of
from backends.redis.node import Node
from backends.redis.resp import Connection, encode, new_header
from backends.redis.url import Address
from tiering.api import HEADER_BYTES, InspectedBlock, Namespace, Outcome, verify

SCAN_COUNT: Final = 256
"""Keys that a server looks at before it answers and serves others."""
DIGEST_HEX_BYTES: Final = 64


async def inspect_servers(config: RedisConfig, *, verify_blocks: bool) -> AsyncGenerator[list[InspectedBlock], None]:
    """The blocks under the configured prefix, server by server, each once. ``verify_blocks`` reads them all.

    Blocks that come and go meanwhile may be missed. Raises ``ConfigError`` and ``BackendError``.
    """
    topology = await make_topology(config)
    prefix = config.prefix.encode() + b":"
    try:
        with operators_words(config, "inspect"):
            await topology.route([])
        for node in topology.nodes:
            seen: set[bytes] = set()
            cursor: bytes | None = b"0"
            while cursor is not None:
                with operators_words(config, "inspect"):
                    cursor, names = await node.run(partial(_scan, cursor, prefix, node.address))
                    fresh = [name for name in dict.fromkeys(names) if name not in seen]
                    part = await _look_at(node, prefix, fresh, verify_blocks)
                seen.update(fresh)
                if part:
                    yield part
    finally:
        for node in topology.everything():
            node.leave()


def _scan(cursor: bytes, prefix: bytes, server: Address, connection: Connection) -> tuple[bytes | None, list[bytes]]:
    """In a thread: the next cursor, None at the end, and some names."""
    reply = connection.command(b"SCAN", cursor, b"MATCH", prefix + b"*", b"COUNT", b"%d" % SCAN_COUNT)
    match reply:
        case [bytes(following), list(names)]:
            return (None if following == b"0" else following), [name for name in names if isinstance(name, bytes)]
        case ErrorReply():
            raise rejected(server, "SCAN", reply)
    raise Rejected(f"{server} answered SCAN with {reply!r:.40}")


async def _look_at(node: Node, prefix: bytes, names: Sequence[bytes], verify_blocks: bool) -> list[InspectedBlock]:
    lengths = await node.run(lambda connection: connection.pipeline([encode(b"STRLEN", name) for name in names]))
    blocks = []
    for name, length in zip(names, lengths, strict=True):
        digest, key = _parts(name[len(prefix) :])
        if digest is None or not (isinstance(length, ErrorReply) or length):
            continue  # another program's, or gone
        outcome: Outcome | None = None
        stored_bytes = length if isinstance(length, int) else 0
        if verify_blocks or not stored_bytes:
            outcome = await node.run(partial(_verify, digest, key, name, stored_bytes))
        blocks.append(
            InspectedBlock(
                namespace_digest=digest,
                namespace_fields={},
                key=key,
                parent=None,
                stored_bytes=stored_bytes,
                place=f"{node.address} {name.decode(errors='backslashreplace')}",
                outcome=outcome,
            )
        )
    return blocks


def _parts(rest: bytes) -> tuple[bytes | None, bytes]:
    """Namespace digest and block key of what stands behind the prefix; None if it is not of ours."""
    written, key = rest[:DIGEST_HEX_BYTES], rest[DIGEST_HEX_BYTES + 1 :]
    try:
        digest = bytes.fromhex(written.decode())
    except ValueError:
        return None, b""
    ours = len(digest) * 2 == DIGEST_HEX_BYTES and rest[DIGEST_HEX_BYTES : DIGEST_HEX_BYTES + 1] == b":" and key
    return (digest if ours else None), key


def _verify(digest: bytes, key: bytes, name: bytes, stored_bytes: int, connection: Connection) -> Outcome:
    """In a thread."""
    header, payload = new_header(), memoryview(bytearray(max(0, stored_bytes - HEADER_BYTES)))
    connection.ask(encode(b"GET", name), asking=False)
    length = connection.block(header, payload, asking=False)
    match length:
        case None:
            return Outcome.MISSING
        case ErrorReply(code="WRONGTYPE"):
            return Outcome.corrupt("another program's value stands in the block's place")
        case ErrorReply():
            return outcome_of(length)
    if length != len(header) + len(payload):
        return Outcome.corrupt(f"{length} bytes are stored, which is no block")
    return verify(Namespace(digest, (len(payload),), {}), key, header, payload)
