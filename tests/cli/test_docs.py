"""docs/cli.md against the commands: every option with its default, every field of every object."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tests.cli.command import Done, nvme, run, write_config
from tests.cli.test_bench_nvme import WITH_FEW_BYTES
from tests.cli.test_inspect import ONE, fill, flip
from tiering.cli.main import app

Command = Callable[..., Done]


@pytest.fixture(scope="module")
def sections(root: Path) -> dict[str, str]:
    """Heading -> text."""
    found: dict[str, str] = {}
    for part in re.split(r"^## ", (root / "docs/cli.md").read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        found[heading] = text
    return found


def table(text: str, header: str) -> list[list[str]]:
    """The rows below ``header``, cut into cells."""
    found = re.search(rf"^\| {header} \|.*\n\| ---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in found[1].splitlines()] if found else []


def documented_fields(text: str) -> set[str]:
    return {name for cells in table(text, "field") for name in re.findall(r"`([^`]+)`", cells[0])}


def fields_of(value: Any, prefix: str = "") -> set[str]:
    found: set[str] = set()
    for key, item in value.items():
        found.add(prefix + key)
        if isinstance(item, list) and item and isinstance(item[0], dict):
            found |= fields_of(item[0], f"{prefix}{key}[].")
    return found


def commands(group: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        found |= commands(command, f"{prefix}{name} ") if hasattr(command, "commands") else {prefix + name: command}
    return found


def test_every_command_has_its_section(sections: dict[str, str]) -> None:
    assert commands(typer.main.get_command(app)).keys() == sections.keys() - {"Output and exit codes"}


@pytest.mark.parametrize("name", sorted(commands(typer.main.get_command(app))))
def test_every_option_is_documented_with_its_default(sections: dict[str, str], name: str) -> None:
    options = {
        option.opts[0]: option.default
        for option in commands(typer.main.get_command(app))[name].params
        if option.opts[0].startswith("--")
    }
    shown = {option.strip("`"): default for option, default, _ in table(sections[name], "option")}
    assert shown.keys() == options.keys()
    for option, default in options.items():
        if default not in (None, False) and shown[option].startswith("`"):
            assert yaml.safe_load(shown[option].strip("`")) == (default if isinstance(default, int) else str(default))


def test_every_field_is_documented(tiering: Command, sections: dict[str, str], tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", nvme(tmp_path / "kv"))
    assert documented_fields(sections["check"]) == fields_of(tiering("check", config, "--json").object)
    flip(tmp_path / "kv/default", fill(config, ONE, 1)[0], 5000)
    (namespaces_fields,) = re.findall(r"`namespaces\[\].fields` \| (.*); empty", sections["inspect"])
    result = tiering("inspect", config, "nvme", "--verify", "--json").object
    assert set(re.findall(r"`(\w+)`", namespaces_fields)) == result["namespaces"][0]["fields"].keys()
    assert documented_fields(sections["inspect"]) == fields_of(result)
    for words in (["config", "list"], ["config", "init", "--to", tmp_path / "new.yaml"]):
        result = tiering(*words, "--json").object
        assert documented_fields(sections[" ".join(map(str, words[:2]))]) == fields_of(result)
    done = run("bench", "nvme", "--pairs", "3", "--json", cwd=tmp_path, program=WITH_FEW_BYTES)
    assert documented_fields(sections["bench nvme"]) == fields_of(done.object)


def test_the_exit_codes_are_documented(sections: dict[str, str]) -> None:
    codes = ", ".join(cells[0] for cells in table(sections["Output and exit codes"], "code"))
    assert [int(code) for code in codes.split(", ")] == [0, 1, 2, 130, 143, 141]
