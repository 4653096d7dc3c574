"""The example of a backend in a package of its own, as a stranger uses it: installed, tested, named in a YAML file."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.examples.installed import install, run, run_kit
from tiering.testing import BackendTests

LINES_MAX = 150
CHILD = Path(__file__).with_name("child.py")


@pytest.fixture(scope="module")
def example(root: Path) -> Path:
    return root / "examples/backend-sqlite"


@pytest.fixture(scope="module")
def site(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("site")
    install(example, path)
    return path


def test_the_whole_backend_is_short(example: Path) -> None:
    (module,) = example.glob("*.py")
    assert len(module.read_text().splitlines()) < LINES_MAX
    (tests,) = example.glob("tests/*.py")
    assert re.findall(r"^class (\w+)", tests.read_text(), re.MULTILINE) == ["TestSqlite"]


def test_the_installed_backend_passes_the_whole_kit(example: Path, site: Path, tmp_path: Path) -> None:
    names = [name for name in dir(BackendTests) if name.startswith("test_")]
    assert run_kit(example / "tests", site=site, cwd=tmp_path) == len(names)


def test_a_manager_uses_it_from_yaml_across_a_restart(example: Path, site: Path, tmp_path: Path) -> None:
    """The README's own configuration; what one process stored the next one loads, byte for byte, and from that tier."""
    (block,) = re.findall(r"```yaml\n(.*?)```", (example / "README.md").read_text(), re.DOTALL)
    (tmp_path / "kv.yaml").write_text(block)

    def step(name: str) -> Any:
        return json.loads(run(CHILD, name, "kv.yaml", site=site, cwd=tmp_path))

    stored = step("store")
    assert (stored["stored"], stored["acknowledged"], stored["lost"]) == (24, 24, 0)
    assert Path(stored["from"]) == site / "kvtiering_sqlite.py"
    assert (tmp_path / "kv.db").stat().st_size > 24 * 65_536
    loaded = step("load")
    assert (loaded["loaded"], loaded["by_tier"]) == (24, {"sqlite": 24})
    true_bytes = np.random.default_rng(7).integers(0, 256, (24, 65_536), dtype=np.uint8)
    assert loaded["sha256"] == hashlib.sha256(true_bytes.data).hexdigest()


def test_the_command_line_knows_its_type_and_opens_it(site: Path, tmp_path: Path) -> None:
    (tmp_path / "kv.yaml").write_text(
        "primary: {capacity: 64MiB}\ntiers: [{type: sqlite, path: kv.db, capacity: 64MiB}]\n"
    )
    result = json.loads(run("-m", "tiering", "check", "kv.yaml", "--json", site=site, cwd=tmp_path))
    assert [(tier["name"], tier["ok"], tier["error"]) for tier in result["tiers"]][1:] == [("sqlite", True, None)]


def test_reading_its_configuration_imports_no_backend_of_others(site: Path, tmp_path: Path) -> None:
    (tmp_path / "kv.yaml").write_text(
        "primary: {capacity: 64MiB}\ntiers: [{type: sqlite, path: kv.db, capacity: 64MiB}]\n"
    )
    code = (
        "import sys; from tiering.config import TieringConfig; TieringConfig.from_yaml('kv.yaml');"
        "print([m for m in sys.modules if m.startswith('backends.') or m in ('redis', 'fsspec')])"
    )
    assert run("-c", code, site=site, cwd=tmp_path).strip() == "[]"
    assert not (tmp_path / "kv.db").exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [("absent/kv.db", "unable to open database file"), ("kv.yaml", "file is not a database")],
)
def test_what_an_operator_must_fix_is_told(path: str, message: str, site: Path, tmp_path: Path) -> None:
    text = f"primary: {{capacity: 64MiB}}\ntiers: [{{type: sqlite, path: {path}, capacity: 64MiB}}]\n"
    (tmp_path / "kv.yaml").write_text(text + "# " + "x" * 4096)
    code = "import sys; from tiering.cli.main import main; sys.exit(main(['check', 'kv.yaml', '--json']) != 2)"
    result = json.loads(run("-c", code, site=site, cwd=tmp_path))
    assert message in str(result)
    assert "name a writable file" in str(result)
