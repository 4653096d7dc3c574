"""The command line as such: exit codes, what goes to which stream, and how little a start costs."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import COMMAND, Done, run
from tiering import TieringConfig

Command = Callable[..., Done]


@pytest.mark.parametrize("program", [(COMMAND,), (sys.executable, "-m", "tiering")], ids=["tiering", "python -m"])
def test_the_version_is_the_declared_one(program: tuple[str, ...], root: Path, tmp_path: Path) -> None:
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert run("--version", cwd=tmp_path, program=program) == Done(0, f"kvtiering {version}\n", "")


@pytest.mark.parametrize(
    ("words", "place", "message"),
    [
        (["chekc", "x.yaml"], "tiering", "No such command 'chekc'. Did you mean 'check'?"),
        (["check"], "tiering check", "Missing argument"),
        (["check", "x.yaml", "y.yaml"], "tiering check", "unexpected extra argument"),
        (["bench", "nvme", "--pairs", "2"], "tiering bench nvme", "Invalid value for '--pairs'"),
        (["bench", "nvme", "--pairs", "many"], "tiering bench nvme", "Invalid value for '--pairs'"),
        (["inspect", "--verfy", "x.yaml"], "tiering inspect", "No such option: --verfy"),
        (["check", "x.yaml", "--tokens-per-block", "0"], "tiering check", "Invalid value for '--tokens-per-block'"),
    ],
)
def test_a_slip_is_one_line_that_helps(tiering: Command, words: list[str], place: str, message: str) -> None:
    done = tiering(*words)
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert line.startswith(f"error: {place}: ")
    assert message in line
    assert line.endswith(f"see `{place} --help`")
    as_json = tiering(*words, "--json")
    assert (as_json.code, as_json.object["ok"]) == (2, False)
    assert message in as_json.object["error"]


def test_json_errors_are_one_object_beside_the_line(tmp_path: Path) -> None:
    done = run("check", "absent.yaml", "--json", cwd=tmp_path)
    assert done.code == 2
    assert done.object == {"ok": False, "error": f"absent.yaml: no such file (looked from {tmp_path})"}
    assert done.err == f"error: {done.object['error']}\n"


@pytest.mark.parametrize("words", [[], ["bench"], ["config"]])
def test_without_a_command_the_help_is_shown(tiering: Command, words: list[str]) -> None:
    done = tiering(*words)
    assert done.code == 2
    assert "Usage: tiering" in done.out
    assert done.err == ""


def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [COMMAND, "config", "schema"], cwd=tmp_path, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("words", [["config", "list"], ["check", "absent.yaml", "--json"]])
def test_a_full_disk_below_stdout_is_told(words: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [COMMAND, *words], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"error: cannot write the result: {os.strerror(errno.ENOSPC)}"
    assert "Traceback" not in done.stderr


def test_text_that_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    done = run("config", "init", "--to", "küche [x].yaml", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done == Done(0, "wrote k\\xfcche [x].yaml\n", "")
    assert (tmp_path / "küche [x].yaml").exists()


def test_starting_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from tiering.cli.main import main;"
        "assert main(['--help']) == main(['config', 'list']) == main(['config', 'init']) == 0;"
        "print(sorted(sys.modules.keys() & {'torch', 'transformers', 'matplotlib', 'redis', 'fsspec', 'aiofiles'}))"
    )
    done = run(cwd=tmp_path, program=(sys.executable, "-c", code))
    assert done.out.splitlines()[-1] == "[]"


# --- config


def test_the_shipped_configurations_are_listed_and_written(tiering: Command, root: Path, tmp_path: Path) -> None:
    names = sorted(path.stem for path in (root / "configs").iterdir())
    assert tiering("config", "list").out.split() == names
    assert tiering("config", "list", "--json").object == {"ok": True, "names": names}
    for name in names:
        path = tmp_path / f"{name}.yaml"
        assert tiering("config", "init", name, "--to", path, "--json").object == {
            "ok": True,
            "name": name,
            "path": str(path),
        }
        assert path.read_bytes() == (root / f"configs/{name}.yaml").read_bytes()
        TieringConfig.from_yaml(path)


def test_init_writes_the_local_one_here_and_never_over_another(tmp_path: Path, root: Path) -> None:
    assert run("config", "init", cwd=tmp_path) == Done(0, "wrote kvtiering.yaml\n", "")
    path = tmp_path / "kvtiering.yaml"
    assert path.read_text() == (root / "configs/local.yaml").read_text()
    path.write_text("mine")
    done = run("config", "init", cwd=tmp_path)
    assert done.code == 2
    assert done.err == "error: --to kvtiering.yaml: File exists; name a new file in a directory you may write to\n"
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loacl"], 'unknown configuration "loacl"; did you mean "local"? (known: cpu-only, full, local, two-disks)'),
        (["local", "--to", "/proc/absent/x.yaml"], "--to /proc/absent/x.yaml: No such file or directory"),
    ],
)
def test_init_says_what_it_cannot_do(tiering: Command, words: list[str], message: str) -> None:
    done = tiering("config", "init", *words)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_the_schema_is_one_object(tiering: Command) -> None:
    assert tiering("config", "schema", "--json").object["$ref"].endswith("TieringConfig")
