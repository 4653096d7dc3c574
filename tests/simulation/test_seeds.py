"""Seeds with faults, then rest: nothing may be wrong at any step, and everything must drain."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation import defects
from tiering.testing.simulation import Result, scenario, simulate
from tiering.testing.simulation.__main__ import main
from tiering.testing.simulation.injection import CALL_RATES, EVENT_RATES

STEPS = 400
CALM = [seed for seed in range(200) if scenario(seed).calm and scenario(seed).core.tiers][:3]


def run(seed: int, steps: int = STEPS) -> Result:
    result = simulate(seed, steps)
    again = f"python -m tiering.testing.simulation --seed {seed} --steps {steps}"
    assert result.ok, f"{result.failure}\nagain: {again}"
    return result


@pytest.mark.parametrize("seed", range(24))
def test_a_seed_with_faults(seed: int) -> None:
    """Rows 1-8, 12, 13, 16-20, 25, 35."""
    assert run(seed).tally.wrong_bytes == 0


@pytest.mark.parametrize("seed", CALM)
def test_a_calm_seed_serves_what_it_stored(seed: int) -> None:
    """Rows 19 and 35: without faults accounts are right to the byte."""
    result = run(seed)
    assert not result.faults
    assert result.tally.hits > 0


def test_the_faults_happen() -> None:
    """A fault that never strikes tests nothing. A few dozen short runs see nearly every kind, most of them often."""
    seen: Counter[str] = Counter()
    for seed in range(100, 130):
        seen.update(simulate(seed, 250).faults)
    assert len({*CALL_RATES, *EVENT_RATES} - seen.keys()) <= 4
    assert sum(count >= 10 for count in seen.values()) >= 15


def test_the_same_seed_does_the_same() -> None:
    first, second = simulate(9, 300), simulate(9, 300)
    assert first.as_dict() == second.as_dict()
    assert first.as_dict() != simulate(10, 300).as_dict()


def test_another_process_does_the_same(root: Path) -> None:
    """The order of sets and dicts of bytes differs between processes; a seed must not care."""
    outputs = set()
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "tiering.testing.simulation", "--seed", "9", "--steps", "300", "--json"]
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
        outputs.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    (output,) = outputs
    document = json.loads(output)
    assert document["ok"] is True
    assert document["seed"] == 9
    assert document["tally"]["wrong_bytes"] == 0


def test_the_command_prints_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3", "--steps", "200"]) == 0
    out = capsys.readouterr().out
    assert "seed 3, 200 steps: good" in out
    for what in ("commands executed: ", "faults injected: ", "hits", "misses", "wrong_bytes 0"):
        assert what in out


def test_a_failure_comes_with_its_journal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tiering.testing.simulation.__main__.simulate", _broken)
    assert main(["--seed", "0", "--steps", "300"]) == 1
    out = capsys.readouterr().out
    assert "seed 0, 300 steps: FAILED" in out
    assert '{"event": ' in out
    assert "again: python -m tiering.testing.simulation --seed 0 --steps 300" in out
    assert main(["--seed", "0", "--steps", "300", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert document["failure"]
    assert document["journal_tail"]


def _broken(seed: int, steps: int) -> Result:
    return simulate(seed, steps, core=defects.ForgetsReleases)


@pytest.mark.parametrize("arguments", [[], ["--seed", "x"], ["--seed", "1", "--steps", "0"]])
def test_bad_input_is_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: " in capsys.readouterr().err
