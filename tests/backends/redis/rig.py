"""Tools of these tests: configurations for the servers, blocks of known bytes, and stored values read by another client."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from backends.redis.backend import RedisBackend
from backends.redis.config import RedisConfig
from tests.servers.valkey import Valkey
from tiering.api import Namespace, Outcome, OutcomeCode
from tiering.types import Group, KVLayout

TCP, UNIX, CLUSTER, TLS = (f"KVTIERING_TEST_REDIS_{kind}" for kind in ("TCP", "UNIX", "CLUSTER", "TLS"))
CA_FILE = "KVTIERING_TEST_REDIS_CA_FILE"
"""Names of environment variables with the URLs of the shared servers."""

KIB, MIB = 1 << 10, 1 << 20
HEADER_BYTES: Final = 128
SIZES = (4097, 256 * KIB, MIB)
OK, MISSING, CORRUPT = OutcomeCode.OK, OutcomeCode.MISSING, OutcomeCode.CORRUPT
FAILED, REFUSED = OutcomeCode.FAILED, OutcomeCode.REFUSED


def namespace(*sizes: int, epoch: str = "0", model: str = "m") -> Namespace:
    return Namespace.of(KVLayout([Group("full", 16, size) for size in sizes or SIZES], model=model), epoch=epoch)


def prefix_of(path: Path) -> str:
    """A prefix for one test alone on a server that several share."""
    return "t-" + hashlib.sha256(str(path).encode()).hexdigest()[:16]


def name_of(prefix: str, spoken: Namespace, key: bytes) -> bytes:
    """A block's key on the server, as the documentation gives it."""
    return b"%b:%b:%b" % (prefix.encode(), spoken.digest.hex().encode(), key)


def config(server: Valkey | str, **fields: Any) -> RedisConfig:
    url = server if isinstance(server, str) else server.url
    return RedisConfig.model_validate({"type": "redis", "url": url, **fields})


def shared(variable: str, **fields: Any) -> RedisConfig:
    """For the server that an environment variable names."""
    return config(os.environ[variable], **fields)


@asynccontextmanager
async def opened(server: Valkey | str, spoken: Namespace | None = None, **fields: Any) -> AsyncIterator[RedisBackend]:
    backend = RedisBackend(config(server, **fields))
    try:
        await backend.open(spoken or namespace())
        yield backend
    finally:
        await backend.aclose(10)


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest() + b"\0\0\0\1"


def payload_of(key: bytes, size: int) -> bytes:
    """The bytes of a block; two keys differ in every 32 of them."""
    seed = hashlib.sha256(key).digest()
    return (seed * (size // len(seed) + 1))[:size]


async def eventually(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Let the loop turn until the condition holds: what runs in the background is waited for, not a time."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - it yields, it does not sleep
            await asyncio.sleep(0)


def codes(outcomes: Iterable[Outcome]) -> list[OutcomeCode]:
    return [outcome.code for outcome in outcomes]


async def store(backend: RedisBackend, keys: Sequence[bytes], size: int = 4097) -> list[OutcomeCode]:
    return codes(await backend.store([(key, memoryview(payload_of(key, size))) for key in keys]))


async def load(backend: RedisBackend, keys: Sequence[bytes], size: int = 4097) -> list[OutcomeCode]:
    """Outcomes; whatever is OK was compared with the true bytes."""
    views = [memoryview(bytearray(size)) for _ in keys]
    outcomes = await backend.load(list(zip(keys, views, strict=True)))
    for key, view, outcome in zip(keys, views, outcomes, strict=True):
        if outcome.ok:
            assert view == payload_of(key, size), f"wrong bytes served for {key.hex()}"
    return codes(outcomes)


async def contains(backend: RedisBackend, keys: Sequence[bytes]) -> list[OutcomeCode]:
    return codes(await backend.contains(keys))


async def delete(backend: RedisBackend, keys: Sequence[bytes]) -> list[OutcomeCode]:
    return codes(await backend.delete(keys))
