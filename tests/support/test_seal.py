from __future__ import annotations

import dataclasses
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tiering.errors import ShapeError
from tiering.support.seal import HEADER_BYTES, SealedHeader, parse_header, seal, verify
from tiering.types import KVLayout, Namespace, Outcome, OutcomeCode

LAYOUT = KVLayout.uniform(model="demo", tokens_per_block=16, block_bytes=4096)
NAMESPACE = Namespace.of(LAYOUT, epoch="0")
KEY = bytes(range(36))


def _payload(seed: int, count: int = 4096) -> bytes:
    return b"".join(xxhash.xxh3_128_digest(f"{seed}.{i}".encode()) for i in range(-(-count // 16)))[:count]


def _header_by_hand(namespace_digest: bytes, key: bytes, payload: bytes, *, version: int = 1) -> bytes:
    body = b"KVTBLOCK" + struct.pack("<II", version, len(key))
    body += struct.pack("<QQ", len(payload), xxhash.xxh3_64(payload).intdigest())
    body += namespace_digest + key.ljust(36, b"\0") + bytes(20)
    return body + struct.pack("<Q", xxhash.xxh3_64(body).intdigest())


@pytest.mark.parametrize("key", [b"k", b"\0", KEY, b"\0" * 36])
@pytest.mark.parametrize("count", [0, 1, 4095, 4097])
def test_the_format_is_the_documented_one(key: bytes, count: int) -> None:
    payload = _payload(1, count)
    header = seal(NAMESPACE, key, memoryview(payload))
    assert len(header) == HEADER_BYTES == 128
    assert header == _header_by_hand(NAMESPACE.digest, key, payload)
    assert verify(NAMESPACE, key, header, memoryview(payload)) is Outcome.OK
    assert verify(NAMESPACE, key, memoryview(header), memoryview(bytearray(payload))) is Outcome.OK
    checksum = xxhash.xxh3_64(payload).intdigest()
    assert parse_header(header) == SealedHeader(NAMESPACE.digest, key, count, checksum)


@pytest.mark.parametrize("key", [b"", b"k" * 37])
def test_a_key_of_illegal_length_is_not_sealed(key: bytes) -> None:
    with pytest.raises(ShapeError, match="1 to 36"):
        seal(NAMESPACE, key, memoryview(b"x"))


def test_a_scattered_payload_is_not_sealed() -> None:
    with pytest.raises(ShapeError, match="contiguous"):
        seal(NAMESPACE, KEY, memoryview(bytes(64))[::2])


def _why(header: bytes, payload: bytes, *, key: bytes = KEY, namespace: Namespace = NAMESPACE) -> str:
    outcome = verify(namespace, key, header, memoryview(payload))
    assert outcome.code is OutcomeCode.CORRUPT
    return outcome.why


def test_wrong_bytes_served() -> None:
    """FAULTS row 13: swapped, truncated, extended, zero-filled and foreign blocks are corrupt, each for its own reason."""
    mine, other = _payload(1), _payload(2)
    header = seal(NAMESPACE, KEY, memoryview(mine))
    other_key = KEY[:-1] + b"x"
    other_header = seal(NAMESPACE, other_key, memoryview(other))

    assert "checksum" in _why(header, other)
    assert "another key" in _why(other_header, other)
    assert "another key" in _why(seal(NAMESPACE, KEY[:35], memoryview(mine)), mine)
    assert "header is damaged" in _why(bytes(128), bytes(4096))
    assert "checksum" in _why(header, bytes(4096))
    assert "header is damaged" in _why(bytes(128), mine)
    for count in (0, 1, 4095):
        assert f"has {count} bytes; 4096 were stored" in _why(header, mine[:count])
    for extra in (b"\0", b"x", mine):
        assert "4096 were stored" in _why(header, mine + extra)
    for part in (b"", header[:1], header[:127], header + b"\0"):
        assert "header is damaged" in _why(part, mine)
    # A torn write: the head of the new block over the tail of the old one, on each boundary of a disk sector.
    for cut in range(512, 4096, 512):
        assert "checksum" in _why(header, mine[:cut] + other[cut:])


def test_wrong_bytes_served_for_any_flipped_bit() -> None:
    """FAULTS row 13: one flipped bit, wherever it is."""
    payload = _payload(3, 100)
    header = seal(NAMESPACE, KEY, memoryview(payload))
    for bit in range(8 * len(header)):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        assert _why(bytes(flipped), payload)
    for bit in range(8 * len(payload)):
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        assert "checksum" in _why(header, bytes(flipped))


@given(st.binary(max_size=300), st.binary(max_size=40))
def test_wrong_bytes_served_never_for_garbage(garbage: bytes, payload: bytes) -> None:
    """FAULTS row 13: a medium may return anything of any length; the answer is a value."""
    assert parse_header(garbage) is None
    assert _why(garbage, payload)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"}, {"revision": "r2"}, {"dtype": "float16"}, {"ranks": 2}, {"epoch": "1"}, {"codec": "zstd"},
        {"tokens_per_block": 32}, {"block_bytes": 8192},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_namespace_too_narrow(change: dict[str, object]) -> None:
    """FAULTS row 14: equal-sized bytes of any other configuration are foreign, one field at a time."""
    fields: dict[str, object] = {
        "model": "demo", "revision": "", "dtype": "uint8", "ranks": 1, "epoch": "0", "codec": "raw",
        "tokens_per_block": 16, "block_bytes": 4096,
    }  # fmt: skip
    fields |= change
    epoch, codec = fields.pop("epoch"), fields.pop("codec")
    other = Namespace.of(KVLayout.uniform(**fields), epoch=epoch, codec=codec)  # type: ignore[arg-type]
    payload = _payload(1)
    assert "another namespace" in _why(seal(other, KEY, memoryview(payload)), payload)


def test_another_format_version_is_not_read() -> None:
    payload = _payload(1)
    header = _header_by_hand(NAMESPACE.digest, KEY, payload, version=2)
    assert parse_header(header) is None
    assert "another format" in _why(header, payload)


def test_a_sound_header_with_an_impossible_key_length_is_not_read() -> None:
    body = bytearray(_header_by_hand(NAMESPACE.digest, KEY, b"x")[:120])
    for key_bytes in (0, 37, 1 << 31):
        body[12:16] = struct.pack("<I", key_bytes)
        header = bytes(body) + struct.pack("<Q", xxhash.xxh3_64(bytes(body)).intdigest())
        assert parse_header(header) is None


def test_a_header_is_a_value() -> None:
    header = parse_header(seal(NAMESPACE, KEY, memoryview(b"x")))
    assert header is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        header.key = b"other"  # type: ignore[misc]
