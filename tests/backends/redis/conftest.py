"""Servers that the tests of this directory share. Tests that kill, fill or freeze one start their own.

What child processes need to know of them stands in the environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.redis import rig
from tests.servers import valkey as servers


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("redis")


@pytest.fixture(scope="session")
def environment() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="session")
def server(directory: Path, environment: pytest.MonkeyPatch) -> Iterator[servers.Valkey]:
    with servers.valkey(directory / "server") as started:
        environment.setenv(rig.TCP, started.url)
        environment.setenv(rig.UNIX, f"unix://{started.path}")
        yield started


@pytest.fixture(scope="session")
def cluster(directory: Path, environment: pytest.MonkeyPatch) -> Iterator[list[servers.Valkey]]:
    with servers.cluster(directory / "cluster") as started:
        environment.setenv(rig.CLUSTER, "redis://" + ",".join(f"127.0.0.1:{member.port}" for member in started))
        yield started


@pytest.fixture(scope="session")
def certificates(directory: Path, environment: pytest.MonkeyPatch) -> servers.Certificates:
    made = servers.Certificates(directory / "certificates")
    environment.setenv(rig.CA_FILE, str(made.ca_file))
    return made


@pytest.fixture(scope="session")
def tls_port(
    directory: Path, server: servers.Valkey, certificates: servers.Certificates, environment: pytest.MonkeyPatch
) -> Iterator[int]:
    with servers.tls_proxy(server, certificates.server_file) as port:
        environment.setenv(rig.TLS, f"rediss://127.0.0.1:{port}")
        yield port
