"""A block as one object: its header, and the payload behind it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from tiering.api import HEADER_BYTES, BlockKey, Namespace, Outcome, run_blocking, seal, verify

T = TypeVar("T")

Body: TypeAlias = bytes | npt.NDArray[np.uint8]
"""A whole object: a flat buffer of bytes of our own."""

INLINE_BYTES_MAX = 1 << 20
"""A payload up to this size is copied and checked on the loop: in 60 us, where handing it to a thread takes 130 or more."""


def pack_array(namespace: Namespace, key: BlockKey, src: memoryview) -> npt.NDArray[np.uint8]:
    """For clients that take any buffer. The copy leaves the GIL free, and outlives a cancelled store."""
    body = np.empty(HEADER_BYTES + src.nbytes, np.uint8)
    payload = body[HEADER_BYTES:]
    np.copyto(payload, np.frombuffer(src, np.uint8))
    # Sealed from the copy: the header then vouches for the very bytes that are sent.
    body[:HEADER_BYTES] = np.frombuffer(seal(namespace, key, payload.data), np.uint8)
    return body


def pack_bytes(namespace: Namespace, key: BlockKey, src: memoryview) -> bytes:
    """For clients that want ``bytes``."""
    return b"".join((seal(namespace, key, src), src))


def unpack(namespace: Namespace, key: BlockKey, body: memoryview, dest: memoryview) -> Outcome:
    """OK once ``dest`` holds the verified payload of ``body``; else CORRUPT. A body of another length changes nothing."""
    if body.nbytes != HEADER_BYTES + dest.nbytes:
        return wrong_length(body.nbytes, dest.nbytes)
    np.copyto(np.frombuffer(dest, np.uint8), np.frombuffer(body[HEADER_BYTES:], np.uint8))
    return verify(namespace, key, body[:HEADER_BYTES], dest)


def wrong_length(object_bytes: int, payload_bytes: int) -> Outcome:
    """``object_bytes`` may be only what was read of a longer object."""
    than = "more" if object_bytes > HEADER_BYTES + payload_bytes else "fewer"
    return Outcome.corrupt(f"the object has {than} bytes than a block of {payload_bytes} and its header")


async def in_thread_if_large(fn: Callable[[], T], copied_bytes: int, executor: Executor) -> T:
    """``fn()``, where it does not hold up the loop. On cancellation it returns when ``fn`` has."""
    return fn() if copied_bytes <= INLINE_BYTES_MAX else await run_blocking(fn, executor=executor)
