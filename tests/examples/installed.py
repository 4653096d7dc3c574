"""A package as pip installs it, in a directory of its own beside this environment, and programs that see it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

LIMIT_S = 110.0


def install(source: Path, site: Path) -> None:
    """What ``pip install`` does, without an index and without dependencies: they are here."""
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-index", "--no-deps"),
        *("--no-build-isolation", "--no-compile", "--target", str(site), str(source)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr


def run(*words: str | Path, site: Path, cwd: Path) -> str:
    """stdout of a Python that finds ``site``'s packages; warnings are errors. The program must end with 0."""
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def run_kit(tests: Path, *, site: Path, cwd: Path) -> int:
    """How many tests below ``tests`` passed; none may fail or be skipped."""
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", tests, site=site, cwd=cwd)
    (summary,) = re.findall(r"^(\d+) passed in .*$", out, re.MULTILINE)
    return int(summary)
