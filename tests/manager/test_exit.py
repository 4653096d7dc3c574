"""A program that ends without closing its manager ends all the same, and what was acknowledged is found again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.manager.test_restart import found_in

ROOT = Path(__file__).resolve().parents[2]
FORGETS = """
import asyncio, sys
from tests.manager.world import LAYOUT, config, keys_of, rows
from tiering import TieringOffloadingManager

async def main():
    manager = TieringOffloadingManager(
        config(8, {"type": "nvme", "path": sys.argv[1], "capacity": "8MiB"}), LAYOUT
    )
    await manager.open()
    keys = keys_of(4)
    await manager.store(keys, rows(keys))
    await manager.flush()
    if sys.argv[2] == "raises":
        raise SystemExit("no close")

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["returns", "raises"])
def test_no_hang_at_exit_of_a_program_that_forgot_to_close(tmp_path: Path, how: str) -> None:
    """row 8: no thread of ours holds the process up; row 19: the blocks are there for the next one."""
    done = subprocess.run(
        [sys.executable, "-c", FORGETS, str(tmp_path), how], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == (how == "raises")
    assert "Traceback" not in done.stderr
    assert asyncio.run(found_in(tmp_path)) == 4
