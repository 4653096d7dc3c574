"""docs/backend-author-guide.md: its code runs or is taken from packages that do, and its facts are those of the code."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tiering import registry
from tiering.api import HEADER_BYTES, BackendCapabilities
from tiering.testing import BackendTests
from tiering.testing.conformance.base import KitBase
from tiering.testing.conformance.rules import RULES


@pytest.fixture(scope="module")
def guide(root: Path) -> str:
    return (root / "docs/backend-author-guide.md").read_text()


@pytest.fixture(scope="module")
def sources(root: Path) -> str:
    """Code that other tests run."""
    example = root / "examples/backend-sqlite"
    paths = [*example.glob("*.py"), *example.glob("tests/*.py"), root / "tiering/cli/new_backend_template.py"]
    return "\n".join(path.read_text() for path in paths)


def section(guide: str, heading: str) -> str:
    return guide.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(text: str) -> dict[str, list[str]]:
    """The tables of a section: what stands in code in the first cell, and the other cells."""
    found = re.findall(r"^\| `(\w+)[^`]*` \|(.*)\|$", text, re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in found}


def test_code_that_is_not_run_is_quoted_from_code_that_is(guide: str, sources: str) -> None:
    quoted = re.findall(r"(?<!<!-- runnable -->\n)```python\n(.*?)```", guide, re.DOTALL)
    assert len(quoted) > 5
    for block in quoted:
        assert block in sources, textwrap.indent(block, "> ")


def test_the_rules_have_the_kits_words(guide: str) -> None:
    headings = re.findall(r"^### (\d+)\. (.*)$", guide, re.MULTILINE)
    assert [int(number) for number, _ in headings] == list(RULES)
    for number, words in headings:
        assert words.replace("`", "").replace("(deadline_s)", "").lower() == RULES[int(number)].lower()


def test_every_capability_is_told_with_its_default(guide: str) -> None:
    table = rows(section(guide, "Capabilities"))
    fields = {field.name: field.default for field in dataclasses.fields(BackendCapabilities)}
    assert table.keys() == fields.keys()
    for name, default in fields.items():
        expected = "" if default is dataclasses.MISSING else f"`{default}`"
        assert table[name][0] == expected, name
    assert fields["header_bytes"] == HEADER_BYTES


def test_every_hook_of_the_kit_is_told(guide: str) -> None:
    table = rows(section(guide, "The kit"))
    ours: dict[str, Any] = dict(vars(KitBase))
    helpers = {"namespace", "opened", "open", "blocks", "small", "large", "others_run"}
    assert table.keys() == {name for name in ours if not name.startswith("_")} - helpers
    for name in ("corrupt_supported", "crash_supported"):
        assert table[name][0] == f"`{ours[name]}`"
    assert table["call_timeout_s"][0] == f"`{ours['call_timeout_s']:g}`"
    assert table["payload_sizes"][0] == ", ".join(f"{n:,}" if n > 10**5 else str(n) for n in ours["payload_sizes"])


def test_the_groups_are_those_of_the_registry(guide: str) -> None:
    groups = set(re.findall(r'^\[project\.entry-points\."([\w.]+)"\]$', guide, re.MULTILINE))
    assert groups == {registry.BACKENDS_GROUP, registry.POLICIES_GROUP}


def test_the_numbers_it_tells_are_right(guide: str, root: Path) -> None:
    lines = len((root / "examples/backend-sqlite/kvtiering_sqlite.py").read_text().splitlines())
    assert f"in {lines} lines" in " ".join(guide.split())
    assert 45 <= len([name for name in dir(BackendTests) if name.startswith("test_")]) <= 60, "some fifty tests"
