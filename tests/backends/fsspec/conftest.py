from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.fsspec.rig import BUCKET, ENDPOINT_VARIABLE
from tests.servers.seaweed import SeaweedServer, seaweed

__all__ = ["seaweed"]


@pytest.fixture(scope="session")
def s3(seaweed: SeaweedServer) -> Iterator[SeaweedServer]:
    """The server with a bucket, and its address in the environment, where child processes find it."""
    seaweed.make_bucket(BUCKET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENDPOINT_VARIABLE, seaweed.endpoint_url)
        yield seaweed
