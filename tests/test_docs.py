"""The documents: every YAML block is a legal configuration, marked Python runs, commands and keys exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

from tiering import KVLayout, TieringOffloadingManager
from tiering.cli.main import app
from tiering.config import TieringConfig, json_schema

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
RUNNABLE = "<!-- runnable -->"


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str
    marked: bool

    @property
    def id(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> list[Block]:
    return [block for page in PAGES for block in _blocks(page) if block.language == language]


def _blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if not line.strip().startswith("```"):
            continue
        if start is None:
            start = number
            continue
        fence = lines[start]
        indent = len(fence) - len(fence.lstrip())
        text = "".join(f"{inner[indent:]}\n" for inner in lines[start + 1 : number])
        marked = start > 0 and lines[start - 1].strip() == RUNNABLE
        yield Block(page, start + 1, fence.strip().removeprefix("```"), text, marked)
        start = None
    assert start is None, f"{page}: a code block is not closed"


def commands() -> list[tuple[str, list[str]]]:
    found = []
    for block in blocks("sh"):
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                found.append((block.id, words))
    for page in PAGES:
        cells = re.findall(r"^\| `(tiering [^`]+)` \|", page.read_text(), re.MULTILINE)
        found += [(str(page.relative_to(ROOT)), shlex.split(cell)) for cell in cells]
    return found


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.id)
def test_every_yaml_block_is_a_legal_configuration(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "block.yaml"
    path.write_text(block.text)
    TieringConfig.from_yaml(path)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").iterdir()), ids=lambda path: path.name)
def test_every_shipped_file_is_a_legal_configuration_and_explains_itself(path: Path) -> None:
    TieringConfig.from_yaml(path)
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("block", [block for block in blocks("python") if block.marked], ids=lambda block: block.id)
def test_every_marked_python_block_runs(block: Block, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block.text], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_has_a_python_block_that_runs() -> None:
    assert any(block.marked for block in blocks("python") if block.page.name == "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(("place", "words"), commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_documented_command_exists(place: str, words: list[str]) -> None:
    program, *arguments = words
    if program == "make":
        targets = [word for word in arguments if "=" not in word and word != "..."]
        done = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{place}: {shlex.join(words)}\n{done.stderr}"
    elif program == "tiering":
        # Parsed whole, so an option that does not exist is an error; then the help is shown instead of running it.
        shown = CliRunner().invoke(app, [*arguments, "--help"])
        assert shown.exit_code == 0, f"{place}: {shlex.join(words)}\n{shown.output}"
    else:
        pytest.fail(f"{place}: nothing checks {shlex.join(words)}")


# --- docs/configuration.md against the configuration


def documented() -> dict[str, dict[str, str]]:
    """Heading -> key -> default, from the tables of ``docs/configuration.md``."""
    tables: dict[str, dict[str, str]] = {}
    heading = ""
    for line in (ROOT / "docs/configuration.md").read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif row := re.match(r"\| `(\w+)` \| (`[^`]*`|required) \|", line):
            tables.setdefault(heading, {})[row[1]] = row[2].strip("`")
    return tables


def properties(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json_schema()["$defs"][name]["properties"]
    return found


TIER_MINIMAL: dict[str, dict[str, Any]] = {
    "nvme": {"type": "nvme", "path": "kv", "capacity": "1GiB"},
    "memory": {"type": "memory", "capacity": "1GiB"},
    "redis": {"type": "redis", "url": "redis://localhost"},
    "fsspec": {"type": "fsspec", "url": "memory://kv"},
}
TIER_MODELS = [(type_, f"{type_.capitalize()}Config") for type_ in TIER_MINIMAL]


@pytest.mark.parametrize(
    ("heading", "model"),
    [
        ("Top level", "TieringConfig"),
        ("primary", "PrimaryConfig"),
        ("restore", "RestoreConfig"),
        ("metrics", "MetricsConfig"),
    ],
)
def test_every_key_of_a_section_is_documented_with_its_default(heading: str, model: str) -> None:
    table = documented()[heading]
    assert table.keys() == properties(model).keys()
    base: dict[str, Any] = {"primary": {"capacity": "1GiB"}}
    for key, default in table.items():
        if default == "required":
            assert key in json_schema()["$defs"][model]["required"]
            continue
        value = yaml.safe_load(default)
        section = {key: value} if heading == "Top level" else {heading: {**base.get(heading, {}), key: value}}
        assert TieringConfig.from_dict({**base, **section}) == TieringConfig.from_dict(base), key


@pytest.mark.parametrize(("type_", "model"), TIER_MODELS)
def test_every_key_of_a_tier_is_documented_with_its_default(type_: str, model: str) -> None:
    table = documented()["Every tier"] | documented()[type_]
    assert table.keys() == properties(model).keys()
    minimal = TIER_MINIMAL[type_]
    assert {key for key, default in table.items() if default == "required"} == minimal.keys()
    plain = TieringConfig.from_dict({"primary": {"capacity": 1}, "tiers": [minimal]})
    for key in table.keys() - minimal.keys():
        tier = {**minimal, key: yaml.safe_load(table[key])}
        assert TieringConfig.from_dict({"primary": {"capacity": 1}, "tiers": [tier]}) == plain, key


def test_the_schema_command_prints_the_schema() -> None:
    shown = CliRunner().invoke(app, ["config", "schema"])
    assert json.loads(shown.stdout) == json.loads(json.dumps(json_schema()))


async def test_the_numbers_to_watch_exist() -> None:
    text = (ROOT / "docs/operating.md").read_text().partition("## Watching")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) | {"hit_blocks_by_tier"}
    layout = KVLayout.uniform(model="docs", tokens_per_block=4, block_bytes=4096)
    config = TieringConfig.from_dict({"primary": {"capacity": "64KiB"}, "tiers": [TIER_MINIMAL["memory"]]})
    async with TieringOffloadingManager(config, layout) as manager:
        assert named <= manager.stats().keys()
