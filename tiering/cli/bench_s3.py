"""``tiering bench s3``: the fsspec backend and the bare S3 client that it uses, on the same server, in one run."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import numpy as np

from tiering.cli import bench_servers
from tiering.cli.bench_remote import (
    BLOCK_SIZES,
    OURS,
    Item,
    TierWay,
    Way,
    at_a_time,
    compare,
    keys_of,
    opened,
)
from tiering.cli.bench_remote import show as show
from tiering.errors import BackendError, ConfigError

CLIENTS: Final = ("obstore", "s3fs")
OWN_URL: Final = "s3://kvtiering-bench/blocks"
TOTAL_BYTES = 32 << 20
"""Moved by each side in each run."""
REQUESTS: Final = 8
"""Under way at a time, on both sides."""
HEADER: Final = bytes(128)
"""Our objects begin with one, so theirs do too."""


def bench(url: str | None, pairs: int) -> dict[str, Any]:
    """Measure each client and block size below ``url`` (None: on a server started for the run), and remove the objects.

    Credentials, region and endpoint come from the environment (AWS_ENDPOINT_URL and its kin). Raises ``ConfigError`` if
    there is no server to measure, ``BackendError`` if it fails.
    """
    clients = [name for name in CLIENTS if importlib.util.find_spec(name) is not None]
    if not clients:
        raise ConfigError("--url: S3 needs a client; pip install 'kvtiering[s3]'")
    with _server(url) as (place, options, shown):
        sizes = [
            asyncio.run(_bench_size(client, place, options, size, pairs)) for client in clients for size in BLOCK_SIZES
        ]
    return {
        "ok": True,
        "sizes": sizes,
        "server": shown,
        "pairs": pairs,
        "bytes_per_run": TOTAL_BYTES,
        "requests": REQUESTS,
    }


@contextmanager
def _server(url: str | None) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Its URL, storage options, and how it is shown."""
    if url is None:
        with bench_servers.seaweed() as options:
            yield OWN_URL, options, "a server of the run's own, on loopback"
        return
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc:
        raise ConfigError("--url: write s3://BUCKET/PREFIX; the endpoint comes from AWS_ENDPOINT_URL")
    yield url.rstrip("/"), {}, url


async def _bench_size(
    client: str, url: str, options: Mapping[str, Any], block_bytes: int, pairs: int
) -> dict[str, Any]:
    keys = keys_of(block_bytes, TOTAL_BYTES)
    tier = {
        "type": "fsspec",
        "url": url,
        "storage_options": dict(options),
        "s3_client": client,
        "requests_max": REQUESTS,
        # The bucket of a server of the run's own is to be made first; somebody else's is not ours to make.
        "create_bucket": bool(options),
    }
    async with opened(tier, block_bytes, keys) as backend, _bare(client, url, options) as bare:
        ways: dict[str, Way] = {OURS: TierWay(backend, calls=REQUESTS, call_blocks=1), client: bare}
        result = await compare(ways, client, keys, block_bytes, pairs)
        await bare.remove(keys)
    return {"client": client, **result}


class _Bare(Way, Protocol):
    async def remove(self, keys: Sequence[bytes]) -> None: ...


@asynccontextmanager
async def _bare(client: str, url: str, options: Mapping[str, Any]) -> AsyncIterator[_Bare]:
    endpoint = options.get("endpoint_url") or os.environ.get("AWS_ENDPOINT_URL")
    parts = urlsplit(url)
    root = f"{parts.path.strip('/')}/bare".lstrip("/")
    if client == "obstore":
        yield _Obstore(_obstore(parts.netloc, endpoint, options), root)
        return
    filesystem = importlib.import_module("s3fs").S3FileSystem(
        asynchronous=True,
        skip_instance_cache=True,
        endpoint_url=endpoint,
        client_kwargs={"region_name": options["region"]} if "region" in options else {},
        **{name: options[name] for name in ("key", "secret") if name in options},
    )
    session = await filesystem.set_session()
    try:
        yield _S3fs(filesystem, f"{parts.netloc}/{root}")
    finally:
        await session.close()


def _obstore(bucket: str, endpoint: str | None, options: Mapping[str, Any]) -> Any:
    known = {"key": "access_key_id", "secret": "secret_access_key", "region": "region"}
    config: dict[str, Any] = {known[name]: value for name, value in options.items() if name in known}
    if endpoint:
        config["endpoint"] = endpoint
    allow_http = str(endpoint or "").startswith("http://")
    store = importlib.import_module("obstore.store").S3Store
    return store(bucket, config=config, client_options={"allow_http": allow_http})


class _Obstore:
    """Whole objects, by a plain put and get; what comes is copied into its buffer and not checked."""

    def __init__(self, store: Any, root: str) -> None:
        self._store = store
        self._root = root

    async def store(self, items: Sequence[Item]) -> None:
        await at_a_time(self._put, items, REQUESTS)

    async def load(self, items: Sequence[Item]) -> None:
        await at_a_time(self._get, items, REQUESTS)

    async def remove(self, keys: Sequence[bytes]) -> None:
        await self._store.delete_async([self._path(key) for key in keys])

    def _path(self, key: bytes) -> str:
        return f"{self._root}/{key.hex()}"

    async def _put(self, item: Item) -> None:
        await self._store.put_async(self._path(item[0]), HEADER + item[1], use_multipart=False)

    async def _get(self, item: Item) -> None:
        answer = await self._store.get_async(self._path(item[0]))
        _copy(await answer.bytes_async(), item[1])


class _S3fs:
    """The same by s3fs."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs = filesystem
        self._root = root

    async def store(self, items: Sequence[Item]) -> None:
        await at_a_time(self._put, items, REQUESTS)

    async def load(self, items: Sequence[Item]) -> None:
        await at_a_time(self._get, items, REQUESTS)

    async def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            await self._fs._rm_file(self._path(key))

    def _path(self, key: bytes) -> str:
        return f"{self._root}/{key.hex()}"

    async def _put(self, item: Item) -> None:
        await self._fs._pipe_file(self._path(item[0]), HEADER + item[1])

    async def _get(self, item: Item) -> None:
        # Else it asks for the size first, and for parts of what is large.
        _copy(await self._fs._cat_file(self._path(item[0]), max_concurrency=1), item[1])


def _copy(body: Any, dest: memoryview) -> None:
    view = memoryview(body)[len(HEADER) :]
    if len(view) != len(dest):
        raise BackendError(f"the bare client got {len(view)} bytes of {len(dest)}", op="bench")
    np.copyto(np.frombuffer(dest, np.uint8), np.frombuffer(view, np.uint8))
