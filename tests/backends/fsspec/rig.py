"""Tools of these tests: configurations of each medium, and objects read and written behind the backend's back."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

from backends.fsspec.backend import FsspecBackend
from backends.fsspec.config import FsspecConfig
from tests.servers.seaweed import ACCESS_KEY, SECRET_KEY
from tiering.api import Namespace, Outcome, OutcomeCode
from tiering.types import Group, KVLayout

OK, MISSING, CORRUPT = OutcomeCode.OK, OutcomeCode.MISSING, OutcomeCode.CORRUPT
FAILED, REFUSED = OutcomeCode.FAILED, OutcomeCode.REFUSED

BUCKET = "kvtiering-tests"
ENDPOINT_VARIABLE = "KVTIERING_TEST_S3_ENDPOINT"
CLIENTS = ("obstore", "s3fs")
SMALL, LARGE = 4096, 1_100_000
"""Payload sizes: copied on the loop, and in a thread."""


def config(url: str, **fields: object) -> FsspecConfig:
    return FsspecConfig.model_validate({"type": "fsspec", "url": url, **fields})


def s3_config(
    prefix: str, *, endpoint: str = "", options: dict[str, object] | None = None, **fields: Any
) -> FsspecConfig:
    """On the test bucket, as an administrator."""
    storage_options: dict[str, object] = {
        "endpoint_url": endpoint or os.environ[ENDPOINT_VARIABLE],
        "region": "us-east-1",
        "key": ACCESS_KEY,
        "secret": SECRET_KEY,
        **(options or {}),
    }
    return config(f"s3://{BUCKET}/{prefix}", storage_options=storage_options, **fields)


def bucket_store() -> S3Store:
    """The bucket itself, for looking and for damage."""
    return S3Store(
        BUCKET,
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        region="us-east-1",
        endpoint=os.environ[ENDPOINT_VARIABLE],
        client_options={"allow_http": True},
    )


def prefix_of(path: Path) -> str:
    """A prefix of this test alone."""
    return hashlib.sha256(str(path).encode()).hexdigest()[:16]


def path_of(prefix: str, spoken: Namespace, key: bytes) -> str:
    """Where the block lies in the bucket."""
    name = key.hex()
    return f"{prefix}/{spoken.digest.hex()}/{name[:2]}/{name}"


def edit_object(path: str, edit: Callable[[bytes], bytes]) -> bool:
    """Replace what the bucket holds at ``path``."""
    store = bucket_store()
    try:
        held = bytes(obstore.get(store, path).bytes())
    except FileNotFoundError:
        return False
    obstore.put(store, path, edit(held))
    return True


def namespace(*sizes: int, epoch: str = "0", model: str = "m") -> Namespace:
    return Namespace.of(
        KVLayout([Group("full", 16, size) for size in sizes or (SMALL, LARGE)], model=model), epoch=epoch
    )


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest() + b"\0\0\0\1"


def payload_of(key: bytes, size: int = SMALL) -> bytes:
    """The bytes of a block; two keys differ everywhere."""
    seed = hashlib.sha256(key).digest()
    return (seed * (size // len(seed) + 1))[:size]


@asynccontextmanager
async def opened(given: FsspecConfig, spoken: Namespace | None = None) -> AsyncIterator[FsspecBackend]:
    backend = FsspecBackend(given)
    try:
        await backend.open(spoken or namespace())
        yield backend
    finally:
        await backend.aclose(10)


def codes(outcomes: Iterable[Outcome]) -> list[OutcomeCode]:
    return [outcome.code for outcome in outcomes]


async def store(backend: FsspecBackend, keys: Sequence[bytes], size: int = SMALL) -> list[Outcome]:
    return await backend.store([(key, memoryview(payload_of(key, size))) for key in keys])


async def load(backend: FsspecBackend, keys: Sequence[bytes], size: int = SMALL) -> list[Outcome]:
    """Outcomes; whatever is OK was compared with the true bytes."""
    views = [memoryview(bytearray(size)) for _ in keys]
    outcomes = await backend.load(list(zip(keys, views, strict=True)))
    for key, view, outcome in zip(keys, views, outcomes, strict=True):
        if outcome.ok:
            assert view == payload_of(key, size), f"wrong bytes served for {key.hex()}"
    return outcomes
