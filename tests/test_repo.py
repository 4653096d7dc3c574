"""The repository itself: what is in the wheel, what is declared, and the limits on files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

LINES_MAX = 500

REQUIRED = {
    "aiofiles", "fsspec", "numpy", "prometheus-client", "pydantic", "pyyaml", "redis", "rich", "torch", "typer", "xxhash",
}  # fmt: skip


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    with (root / "pyproject.toml").open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)["project"]
    return table


def distribution(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return found[0].lower()


def sources(root: Path) -> list[Path]:
    return [path for top in ("tiering", "backends", "tests") for path in (root / top).rglob("*.py")]


def test_the_required_dependencies_are_the_agreed_ones(project: dict[str, Any]) -> None:
    assert {distribution(requirement) for requirement in project["dependencies"]} == REQUIRED
    assert all(">=" in requirement for requirement in project["dependencies"])


def test_every_dependency_has_its_line(root: Path, project: dict[str, Any]) -> None:
    explained = (root / "docs/dependencies.md").read_text().lower()
    extras = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *(entry for extra in extras.values() for entry in extra)]:
        assert re.search(rf"^\|.*\b{re.escape(distribution(requirement))}\b", explained, re.MULTILINE), requirement


def test_no_file_is_too_long(root: Path) -> None:
    long = {str(path): count for path in sources(root) if (count := len(path.read_text().splitlines())) > LINES_MAX}
    assert not long


def test_the_licence_is_the_declared_one(root: Path, project: dict[str, Any]) -> None:
    assert project["license"] == "Apache-2.0"
    text = (root / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_holds_the_packages_their_types_and_the_configurations(root: Path, wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(path.relative_to(root)) for top in ("tiering", "backends") for path in (root / top).rglob("*.py")}
    expected |= {"tiering/py.typed", "backends/py.typed"}
    expected |= {f"tiering/_configs/{path.name}" for path in (root / "configs").iterdir()}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_an_installed_user_reaches_the_configurations_and_the_plug_ins(root: Path, wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import tiering.config as config, tiering.registry as registry;"
        "print(config.__file__); print(*config.shipped_config_names());"
        "print(config.shipped_config('local') == open(config.__file__.replace('config.py', '_configs/local.yaml')).read());"
        "print(*registry.known_backends())"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    file, names, same, backends = done.stdout.splitlines()
    assert Path(file) == tmp_path / "tiering/config.py"
    assert set(names.split()) == {path.stem for path in (root / "configs").iterdir()}
    assert same == "True"
    assert {"memory", "nvme"} <= set(backends.split())


def test_an_old_python_is_refused_with_the_remedy(root: Path, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(root / name, tmp_path)
    old = tmp_path / "python-old"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.10 && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(["make", f"PYTHON={old}", "demo"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "Python 3.11 or newer is needed" in done.stderr
    assert "Python 3.8.10" in done.stderr
    assert "make PYTHON=" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_make_help_names_every_target(root: Path) -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert phony
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=root, capture_output=True, text=True, check=True
    )
    assert {line.split()[0] for line in done.stdout.splitlines()} == set(phony[1].split())
