"""One Redis and one S3 server, each at two network addresses, and tiers on them for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.backends.redis import rig
from tests.servers.http_proxy import http_proxy
from tests.servers.seaweed import SeaweedServer, seaweed
from tests.servers.valkey import Valkey, valkey

__all__ = ["seaweed"]

BUCKET = "kvtiering-sharing"
ADDRESSES = ("127.0.0.1", "127.0.0.2")


@dataclass(frozen=True)
class Medium:
    """One tier, as each of two machines would write it down."""

    name: str
    here: dict[str, Any]
    there: dict[str, Any]


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with valkey(tmp_path_factory.mktemp("shared"), "--bind", *ADDRESSES) as started:
        yield started


@pytest.fixture(scope="session")
def s3_server(seaweed: SeaweedServer) -> SeaweedServer:
    seaweed.make_bucket(BUCKET)
    return seaweed


@pytest.fixture(params=["redis", "s3"])
async def medium(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Medium]:
    prefix = rig.prefix_of(tmp_path)
    here: dict[str, Any]
    there: dict[str, Any]
    if request.param == "redis":
        server: Valkey = request.getfixturevalue("redis_server")
        here, there = (
            {"type": "redis", "url": f"redis://{address}:{server.port}", "prefix": prefix} for address in ADDRESSES
        )
        yield Medium("redis", here, there)
        return
    s3: SeaweedServer = request.getfixturevalue("s3_server")
    async with http_proxy(s3.endpoint_url, host=ADDRESSES[1]) as door:
        here, there = (
            {
                "type": "fsspec",
                "name": "s3",
                "url": f"s3://{BUCKET}/{prefix}",
                "storage_options": s3.storage_options(endpoint_url=endpoint),
                "deadline": "20s",
            }
            for endpoint in (s3.endpoint_url, door.url)
        )
        yield Medium("s3", here, there)
