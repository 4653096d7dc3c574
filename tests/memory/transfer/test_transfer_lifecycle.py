"""Threads, memory and ends: what an engine holds, and what becomes of its jobs when something ends first."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest
import torch

from tests.memory.transfer.rig import Part, store
from tiering.memory.arena import Arena, PoolShape
from tiering.memory.transfer.blocks import DeviceBlocks, Placement
from tiering.memory.transfer.cpu import CpuEvent, CpuTransferEngine
from tiering.memory.transfer.spec import STORE

ROOT = Path(__file__).resolve().parents[3]


def _engine() -> tuple[Arena, CpuTransferEngine]:
    arena = Arena([PoolShape(8, 4096)])
    blocks = DeviceBlocks((tuple(torch.ones(2, 8, 512, dtype=torch.uint8)),))
    return arena, CpuTransferEngine(STORE, arena, blocks, Placement((1,)))


def _events() -> int:
    gc.collect()
    return sum(type(found) is CpuEvent for found in gc.get_objects())


def test_a_thread_that_dies_fails_its_jobs_and_says_so() -> None:
    """row 34: jobs that were queued, and later ones, end as failed results; one line in the log; close returns.

    In a process of its own: while an exception waits for its thread, Python 3.11 turns in circles if something traces it,
    as the measuring of coverage does.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.memory.transfer.dying_thread"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["before"] is True
    assert told["alive"] is False
    assert [(number, success, moved) for number, success, moved, _ in told["after"]] == [
        (n, False, 0) for n in (1, 2, 3)
    ]
    assert all("tiering-transfer-gpu-cpu died of SystemExit" in error for *_, error in told["after"])
    assert told["logged"] == ["ERROR"]


def test_a_thousand_small_jobs_leave_nothing_behind() -> None:
    arena, engine = _engine()

    def run(first: int, end: int) -> None:
        for job_id in range(first, end, 10):
            for one in range(job_id, job_id + 10):
                engine.submit(one, store(Part((one % 8,), (one % 7,))))
            engine.wait([job_id + 9])
            assert all(result.success for result in engine.poll())

    run(0, 100)
    tracemalloc.start()
    try:
        run(100, 200)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        run(200, 1200)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 16 << 10
    assert _events() <= 20
    engine.close()
    assert _events() == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tiering-transfer")]
    arena.close()
    assert not arena.quarantined


def test_an_open_engine_does_not_keep_the_arena_mapped() -> None:
    arena, engine = _engine()
    engine.submit(1, store(Part((1,), (1,))))
    engine.wait([1])
    engine.poll()
    arena.close()
    assert not arena.quarantined
    engine.close()


FORGETS = """
import sys, torch
from tests.memory.transfer.rig import Part, store
from tiering.memory.arena import Arena, PoolShape
from tiering.memory.transfer.blocks import DeviceBlocks, Placement
from tiering.memory.transfer.factory import open_engines
from tiering.memory.transfer.spec import STORE

arena = Arena([PoolShape(32, 1 << 20)])
blocks = DeviceBlocks(((torch.ones(32, 1 << 20, dtype=torch.uint8),),))
engines = open_engines(arena, blocks, Placement((1,)))
for job in range(20):
    engines[STORE].submit(job, store(Part(tuple(range(31, -1, -1)), tuple(range(32)))))
if sys.argv[1] == "raises":
    raise SystemExit("no close")
"""


@pytest.mark.parametrize("how", ["returns", "raises"])
def test_no_hang_at_exit_of_a_program_that_forgot_to_close(how: str) -> None:
    """row 8: an engine that nobody closed, with copies in flight, does not hold the process up or crash it."""
    done = subprocess.run([sys.executable, "-c", FORGETS, how], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == (how == "raises"), done.stderr
    assert "Traceback" not in done.stderr
