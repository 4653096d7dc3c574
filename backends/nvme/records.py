"""Two binary formats: the records of the index, and the part of a header page that is this backend's own.

An index record is ``RECORD_BYTES`` long, so that a damaged one costs itself alone, and starts with the CRC32 of its rest:
kind, lengths of key and parent, namespace number, slot, segment, generation, key, parent.

==========  ================================================================================================
kind        meaning
==========  ================================================================================================
START       first of a file; ``generation`` is the file's sequence number, ``key`` tells journal and snapshot apart
NAMESPACE   ``namespace`` stands for the digest in ``key`` from here on
PUT         the block is in (segment, slot), written as ``generation``
DELETE      generations up to this one of the block are gone
TOUCH       the block was used
END         last of a snapshot; ``generation`` counts the records before it
==========  ================================================================================================

A snapshot lists what lived when it was taken, least recently used first. A journal is replayed on top of it in order.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from backends.nvme.limits import PAGE_BYTES, RECORD_BYTES
from tiering.api import HEADER_BYTES

_BODY: Final = struct.Struct("<BBBxHHIQ36s36s")
_RECORD: Final = struct.Struct("<IBBBxHHIQ36s36s")
_CRC: Final = struct.Struct("<I")
assert _RECORD.size == RECORD_BYTES == _CRC.size + _BODY.size

JOURNAL_MARK: Final = b"kvtiering nvme journal 1"
SNAPSHOT_MARK: Final = b"kvtiering nvme snapshot 1"


class Kind(enum.IntEnum):
    START = 1
    NAMESPACE = 2
    PUT = 3
    DELETE = 4
    TOUCH = 5
    END = 6


Record: TypeAlias = tuple[int, int, int, int, int, bytes, bytes]
"""Kind, namespace number, slot, segment, generation, key, parent. Plain: a directory holds a hundred thousand."""


def pack(
    kind: Kind,
    *,
    key: bytes = b"",
    parent: bytes | None = None,
    namespace: int = 0,
    segment: int = 0,
    slot: int = 0,
    generation: int = 0,
) -> bytes:
    """One record. ``key`` and ``parent`` have at most 36 bytes."""
    parent = parent or b""
    body = _BODY.pack(kind, len(key), len(parent), namespace, slot, segment, generation, key, parent)
    return _CRC.pack(zlib.crc32(body)) + body


def unpack(data: bytes) -> Iterator[Record | None]:
    """The records of a file in order; None for one that is damaged, a cut-off last one included."""
    view = memoryview(data)
    whole = len(data) // RECORD_BYTES * RECORD_BYTES
    crc32, at = zlib.crc32, 0
    for crc, kind, key_bytes, parent_bytes, namespace, slot, segment, generation, key, parent in _RECORD.iter_unpack(
        view[:whole]
    ):
        if crc == crc32(view[at + 4 : at + RECORD_BYTES]):
            yield kind, namespace, slot, segment, generation, key[:key_bytes], parent[:parent_bytes]
        else:
            yield None
        at += RECORD_BYTES
    if whole < len(data):
        yield None


def starts_with(records: Sequence[Record | None], mark: bytes) -> int | None:
    """The sequence number of a file whose first record says ``mark``; else None."""
    if not records or records[0] is None:
        return None
    kind, _, _, _, sequence, key, _ = records[0]
    return sequence if kind == Kind.START and key == mark else None


def is_complete(records: Sequence[Record | None]) -> bool:
    """Whether a snapshot's last record is its END and counts the others right."""
    last = records[-1] if records else None
    return last is not None and last[0] == Kind.END and last[4] == len(records) - 1


_EXTENSION: Final = struct.Struct("<8sBBxxxxxxQQ32s36s36s")
_EXTENSION_MARK: Final = b"KVTNVME1"
_HEADER_USED_BYTES: Final = HEADER_BYTES + _EXTENSION.size + _CRC.size


@dataclass(frozen=True, slots=True)
class Extension:
    """What a header page says beside the sealed header, enough to rebuild the index without the journal."""

    digest: bytes
    key: bytes
    parent: bytes | None
    generation: int
    payload_bytes: int


def header_page(sealed: bytes, extension: Extension) -> bytes:
    """A whole header page, ``PAGE_BYTES`` long: the sealed header, the extension, its CRC32, zeros."""
    parent = extension.parent or b""
    body = _EXTENSION.pack(
        _EXTENSION_MARK,
        len(extension.key),
        len(parent),
        extension.generation,
        extension.payload_bytes,
        extension.digest,
        extension.key,
        parent,
    )
    return (sealed + body + _CRC.pack(zlib.crc32(body))).ljust(PAGE_BYTES, b"\0")


def parse_extension(page: bytes | memoryview) -> Extension | None:
    """The extension in a header page; None unless it is whole."""
    raw = bytes(page[HEADER_BYTES:_HEADER_USED_BYTES])
    if len(raw) != _EXTENSION.size + _CRC.size or not raw.startswith(_EXTENSION_MARK):
        return None
    body = raw[: _EXTENSION.size]
    if _CRC.unpack_from(raw, _EXTENSION.size)[0] != zlib.crc32(body):
        return None
    _, key_bytes, parent_bytes, generation, payload_bytes, digest, key, parent = _EXTENSION.unpack(body)
    return Extension(digest, key[:key_bytes], parent[:parent_bytes] or None, generation, payload_bytes)
