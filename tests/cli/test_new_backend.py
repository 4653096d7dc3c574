"""``tiering new-backend``: what it writes is right as it is, and it writes over nothing."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import Done, run
from tests.cli.test_docs import documented_fields, fields_of
from tests.examples.installed import install, run_kit
from tests.examples.installed import run as run_python
from tiering.testing import BackendTests

Command = Callable[..., Done]

FILES = ["README.md", "kvtiering_my_store.py", "pyproject.toml", "tests/test_my_store.py"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_the_package_installs_passes_the_whole_kit_and_works_from_yaml(tmp_path: Path) -> None:
    assert run("new-backend", "my-store", cwd=tmp_path).code == 0
    made, site = tmp_path / "kvtiering-my-store", tmp_path / "site"
    assert written(made) == FILES
    install(made, site)
    names = [name for name in dir(BackendTests) if name.startswith("test_")]
    assert run_kit(made / "tests", site=site, cwd=tmp_path) == len(names)
    (config,) = re.findall(r"```yaml\n(.*?)```", (made / "README.md").read_text(), re.DOTALL)
    (tmp_path / "kv.yaml").write_text(config)
    result = json.loads(run_python("-m", "tiering", "check", "kv.yaml", "--json", site=site, cwd=tmp_path))
    assert [(tier["name"], tier["type"], tier["ok"]) for tier in result["tiers"]][1:] == [
        ("my-store", "my-store", True)
    ]


@pytest.mark.parametrize(
    ("name", "module", "kind"),
    [("my-store", "kvtiering_my_store", "MyStore"), ("s3x", "kvtiering_s3x", "S3x"),
     ("an-example", "kvtiering_an_example", "AnExample"), ("a" * 40, f"kvtiering_{'a' * 40}", f"A{'a' * 39}")],
)  # fmt: skip
def test_every_place_bears_the_name(name: str, module: str, kind: str, tiering: Command, here: Path) -> None:
    made = here / "new"
    assert tiering("new-backend", name, "--directory", made).code == 0
    project = tomllib.loads((made / "pyproject.toml").read_text())
    assert project["project"]["name"] == f"kvtiering-{name}"
    assert project["project"]["entry-points"]["tiering.backends"] == {name: f"{module}:{kind}Config"}
    source = (made / f"{module}.py").read_text()
    assert f'backend: ClassVar[str] = "{module}:{kind}Backend"' in source
    assert f'type: Literal["{name}"] = "{name}"' in source
    assert f"class {kind}Backend(Backend):" in source
    everything = "\n".join((made / path).read_text() for path in written(made))
    assert "example" not in everything.lower().replace(name, "").replace(module, "").replace(kind.lower(), "")


def test_the_result_is_one_object_with_the_documented_fields(tiering: Command, here: Path, root: Path) -> None:
    done = tiering("new-backend", "my-store", "--json")
    assert (done.code, done.object) == (
        0,
        {
            "ok": True,
            "type": "my-store",
            "package": "kvtiering-my-store",
            "module": "kvtiering_my_store",
            "path": "kvtiering-my-store",
            "files": FILES,
        },
    )
    text = (root / "docs/cli.md").read_text().partition("\n## new-backend\n")[2].partition("\n## ")[0]
    assert documented_fields(text) == fields_of(done.object)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("My_Store", 'did you mean "my-store"?'),
        ("MyStore", 'did you mean "my-store"?'),
        ("my store", 'did you mean "my-store"?'),
        ("-my-store-", 'did you mean "my-store"?'),
        ("3d", "letter"),
        ("", "letter"),
        ("../evil", 'did you mean "evil"?'),
        ("naïve", 'did you mean "na-ve"?'),
        ("a" * 41, "at most 40"),
        ("nvme", 'a backend of type "nvme" is installed already'),
    ],
)
def test_a_name_that_cannot_be_one_is_refused_with_the_remedy(
    name: str, hint: str, tiering: Command, here: Path
) -> None:
    done = tiering("new-backend", "--json", "--", name)
    assert (done.code, done.object["ok"]) == (2, False)
    assert hint in done.object["error"]
    assert len(done.err.splitlines()) == 1
    assert not any(here.iterdir())


@pytest.mark.parametrize("kind", ["empty directory", "full directory", "file", "dangling link"])
def test_what_exists_is_left_alone(kind: str, tiering: Command, here: Path) -> None:
    there = here / "kvtiering-my-store"
    if kind == "file":
        there.write_text("mine")
    elif kind == "dangling link":
        there.symlink_to("nowhere")
    else:
        there.mkdir()
        if kind == "full directory":
            (there / "README.md").write_text("mine")
    before = [(path, path.is_file() and path.read_text()) for path in sorted(here.rglob("*"))]
    done = tiering("new-backend", "my-store")
    assert (done.code, done.out) == (2, "")
    assert (
        done.err == "error: kvtiering-my-store: exists already, and nothing is overwritten; name another --directory\n"
    )
    assert [(path, path.is_file() and path.read_text()) for path in sorted(here.rglob("*"))] == before


@pytest.mark.parametrize("directory", ["absent/new", "/proc/new"])
def test_a_place_where_nothing_can_be_made_is_told(directory: str, tiering: Command, here: Path) -> None:
    done = tiering("new-backend", "my-store", "--directory", directory)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {directory}: No such file or directory; name a new --directory")


def test_a_disk_that_fails_leaves_nothing_half_written(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from tiering.cli.main import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000));"
        "sys.exit(main(['new-backend', 'my-store']))"
    )
    done = run("-c", code, cwd=tmp_path, program=(sys.executable,))
    assert done.code == 2
    assert done.err == "error: kvtiering-my-store: File too large; nothing was written\n"
    assert not any(tmp_path.iterdir())
