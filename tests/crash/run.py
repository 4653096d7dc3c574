"""``kill -9`` of a storing process at random moments, again and again on one directory, and what is found afterwards.

``python -m tests.crash.run --kills 100 --json`` prints one object; exit 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from tests.crash.chains import BLOCK_BYTES, LAYOUT, chain, config, rows
from tiering import TieringOffloadingManager

ROOT = Path(__file__).resolve().parents[2]
CHAINS_LOOKED_FOR = 400
"""Of the newest rounds: more than a child can store before it is killed."""
ROUNDS_LOOKED_FOR = 2


@dataclass
class Result:
    """``wrong_*`` and ``left_*`` must be 0; ``hit_blocks`` must not, or nothing was tested."""

    kills: int = 0
    hit_blocks: int = 0
    wrong_blocks: int = 0
    wrong_usage: int = 0
    over_capacity: int = 0
    left_files: list[str] = field(default_factory=list)
    left_shared_memory: list[str] = field(default_factory=list)
    allocated_bytes_max: int = 0

    @property
    def ok(self) -> bool:
        bad = self.wrong_blocks or self.wrong_usage or self.over_capacity or self.left_files or self.left_shared_memory
        return self.hit_blocks > 0 and not bad


def run(kills: int, seed: int, directory: Path, capacity_bytes: int = 24 << 20) -> Result:
    """Kill ``kills`` children, each between 0 and 0.4 s after it began to store, and look after each."""
    result = Result()
    rng = random.Random(seed)
    shared_before = set(os.listdir("/dev/shm"))
    for round_ in range(kills):
        _kill_one(directory, round_, capacity_bytes, rng.uniform(0.0, 0.4))
        result.kills += 1
        asyncio.run(_look(result, directory, round_, capacity_bytes))
        result.left_shared_memory += sorted(set(os.listdir("/dev/shm")) - shared_before)
    return result


def _kill_one(directory: Path, round_: int, capacity_bytes: int, after_s: float) -> None:
    command = [sys.executable, "-m", "tests.crash.child", str(directory), str(round_), str(capacity_bytes)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        if child.stdout.readline() != "ready\n":
            raise RuntimeError(f"the child ended before it stored anything (exit {child.wait()})")
        try:
            child.wait(after_s)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
        if child.wait() != -signal.SIGKILL:
            raise RuntimeError(f"the child ended by itself with {child.returncode}")


async def _look(result: Result, directory: Path, round_: int, capacity_bytes: int) -> None:
    """Reopen, load every chain that is found, and compare bytes, accounting and files."""
    async with TieringOffloadingManager(config(str(directory), capacity_bytes), LAYOUT) as manager:
        usage = (await manager.usage())["nvme"]
        assert usage is not None
        on_disk = _allocated(directory)
        result.wrong_usage += usage.allocated_bytes != on_disk
        result.over_capacity += on_disk > capacity_bytes
        result.allocated_bytes_max = max(result.allocated_bytes_max, on_disk)
        result.left_files += _temporary(directory)
        for back in range(min(ROUNDS_LOOKED_FOR, round_ + 1)):
            for number in range(CHAINS_LOOKED_FOR):
                keys = chain(round_ - back, number)
                if not (await manager.match(keys)).blocks:
                    continue
                out = np.zeros((len(keys), BLOCK_BYTES), np.uint8)
                n = await manager.load(keys, out)
                result.hit_blocks += n
                right = rows(keys)[:n]
                result.wrong_blocks += int((out[:n] != right).any(axis=1).sum()) + int(out[n:].any())


def _temporary(directory: Path) -> list[str]:
    return [str(path) for path in directory.rglob("*") if path.suffix == ".tmp"]


def _allocated(directory: Path) -> int:
    """What the directory of the owner occupies, by the file system's own word."""
    owner = directory / "default"
    return sum(path.lstat().st_blocks * 512 for path in [owner, *owner.rglob("*")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = run(options.kills, options.seed, Path(directory))
    report = {"ok": result.ok, "seed": options.seed, **asdict(result)}
    sys.stdout.write(json.dumps(report) + "\n" if options.json else "".join(f"{k}: {v}\n" for k, v in report.items()))
    sys.exit(not result.ok)


if __name__ == "__main__":
    main()
