"""The header that proves whose a stored block is. It is written beside the payload; the payload is never copied.

Layout, little-endian, ``HEADER_BYTES`` long:

======  =====  ==========================================
offset  bytes  field
======  =====  ==========================================
0       8      magic
8       4      format version
12      4      key length
16      8      payload length
24      8      xxh3_64 of the payload
32      32     namespace digest
64      36     key, zero-padded
100     20     zero
120     8      xxh3_64 of the 120 bytes before
======  =====  ==========================================
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from tiering.errors import ShapeError
from tiering.types import FORMAT_VERSION, KEY_BYTES_MAX, BlockKey, Namespace, Outcome

HEADER_BYTES: Final = 128

_MAGIC: Final = b"KVTBLOCK"
_BODY: Final = struct.Struct("<8sIIQQ32s36s20x")
_TAIL: Final = struct.Struct("<Q")
_BODY_BYTES: Final = _BODY.size
assert _BODY_BYTES + _TAIL.size == HEADER_BYTES


@dataclass(frozen=True, slots=True)
class SealedHeader:
    """A header whose own checksum is right. It says nothing yet about the payload."""

    namespace_digest: bytes
    key: BlockKey
    payload_bytes: int
    payload_checksum: int


def seal(namespace: Namespace, key: BlockKey, payload: memoryview) -> bytes:
    """The header of ``payload``, ``HEADER_BYTES`` long. ``payload`` is contiguous, without padding; it is only read.

    Reads the whole payload (about 20 GiB/s); call it from a thread for large blocks. Raises ``ShapeError`` for a key
    that is not 1-36 bytes long and for a payload that is not contiguous.
    """
    if not 1 <= len(key) <= KEY_BYTES_MAX:
        raise ShapeError(f"the key has {len(key)} bytes; a block key has 1 to {KEY_BYTES_MAX}")
    if not payload.c_contiguous:
        raise ShapeError("the payload is not contiguous; pass a contiguous memoryview")
    body = _BODY.pack(
        _MAGIC, FORMAT_VERSION, len(key), payload.nbytes, xxhash.xxh3_64_intdigest(payload), namespace.digest, key
    )
    return body + _TAIL.pack(xxhash.xxh3_64_intdigest(body))


def verify(namespace: Namespace, key: BlockKey, header: bytes | memoryview, payload: memoryview) -> Outcome:
    """OK if ``header`` and ``payload`` are, bit for bit, what ``seal(namespace, key, ...)`` saw; else CORRUPT and why.

    ``payload`` is contiguous and without padding. Never raises for what a medium may return, of whatever length.
    """
    found = parse_header(header)
    if found is None:
        return Outcome.corrupt("the header is damaged or of another format")
    if found.namespace_digest != namespace.digest:
        return Outcome.corrupt("the block belongs to another namespace")
    if found.key != key:
        return Outcome.corrupt(f"the block belongs to another key ({found.key.hex()})")
    if found.payload_bytes != payload.nbytes:
        return Outcome.corrupt(f"the payload has {payload.nbytes} bytes; {found.payload_bytes} were stored")
    if found.payload_checksum != xxhash.xxh3_64_intdigest(payload):
        return Outcome.corrupt("the payload's checksum differs")
    return Outcome.OK


def parse_header(header: bytes | memoryview) -> SealedHeader | None:
    """What a header says, for scanners that do not know the key; None unless it is whole and of this format."""
    raw = bytes(header[:HEADER_BYTES])
    if len(header) != HEADER_BYTES or not raw.startswith(_MAGIC):
        return None
    body = raw[:_BODY_BYTES]
    if _TAIL.unpack_from(raw, _BODY_BYTES)[0] != xxhash.xxh3_64_intdigest(body):
        return None
    _, version, key_bytes, payload_bytes, checksum, digest, key = _BODY.unpack(body)
    if version != FORMAT_VERSION or not 1 <= key_bytes <= KEY_BYTES_MAX:
        return None
    return SealedHeader(digest, key[:key_bytes], payload_bytes, checksum)
