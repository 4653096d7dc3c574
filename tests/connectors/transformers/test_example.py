"""The example runs, and reuses what it says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest


def test_the_example_runs(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["transformers_generate.py"])
    runpy.run_path(str(root / "examples/transformers_generate.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    found = [re.search(r"(\d+) tokens computed, (.*) reused", line) for line in lines]
    # 2,047 tokens before the last are 63 full blocks of 32.
    assert [match.groups() for match in found if match] == [("2048", "0"), ("32", "2016 from primary")]
    assert (tmp_path / "kv-cache").is_dir()
