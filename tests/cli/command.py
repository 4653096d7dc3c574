"""The ``tiering`` command as a shell runs it, and tiers that misbehave as an installed plug-in would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

COMMAND = str(Path(sys.executable).with_name("tiering"))
LIMIT_S = 60.0


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def object(self) -> dict[str, Any]:
        """The one JSON object on stdout. Anything beside it is an error here."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        assert self.out == json.dumps(found) + "\n"
        return found


def run(*words: str | Path, cwd: Path, program: tuple[str, ...] = (COMMAND,), **variables: str) -> Done:
    """The real command in a process of its own, where every warning is an error."""
    done = subprocess.run(
        [*program, *map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONWARNINGS": "error", **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


@contextmanager
def started(
    *words: str | Path, cwd: Path, program: tuple[str, ...] = (COMMAND,), **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """The real command while it runs; killed at the end if it still does."""
    with subprocess.Popen(
        [*program, *map(str, words)],
        cwd=cwd,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_heed_interrupts,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _heed_interrupts() -> None:
    """What a shell starts in the background ignores Ctrl-C, and its children inherit that; a terminal's do not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds, which another process brings about."""
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "it never came true"
        os.sched_yield()


def write_config(path: Path, *tiers: dict[str, Any], primary: str = "64MiB", **sections: Any) -> Path:
    """A configuration file; JSON is YAML too."""
    path.write_text(json.dumps({"primary": {"capacity": primary}, "tiers": list(tiers), **sections}))
    return path


def nvme(path: Path, capacity: str = "64MiB", **fields: Any) -> dict[str, Any]:
    return {"type": "nvme", "path": str(path), "capacity": capacity, **fields}


PLUGIN = """
import asyncio, time
from typing import ClassVar, Literal
from backends.memory import MemoryBackend, MemoryConfig
from tiering.api import Outcome, run_blocking

class OddConfig(MemoryConfig):
    backend: ClassVar[str] = "kv_odd:OddBackend"
    type: Literal["odd"] = "odd"
    how: str

class OddBackend(MemoryBackend):
    async def open(self, namespace):
        if self.config.how == "open hangs":
            await asyncio.Event().wait()
        if self.config.how == "open blocks the loop":
            time.sleep(3600)
        if self.config.how == "open raises":
            raise RuntimeError("a defect")
        await super().open(namespace)

    async def store(self, items):
        if self.config.how == "store hangs":
            print("hangs", flush=True)
            await run_blocking(time.sleep, 3600)
        if self.config.how == "store fails":
            return [Outcome.failed("bad sector") for _ in items]
        return await super().store(items)

    async def load(self, items):
        outcomes = await super().load(items)
        if self.config.how == "load lies":
            items[-1][1][:1] = bytes([items[-1][1][0] ^ 1])
        return outcomes
"""


def install_plugin(site: Path) -> Path:
    """What pip leaves behind: tiers of type ``odd``, whose ``how`` says what goes wrong."""
    info = site / "kv_odd-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kv-odd\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tiering.backends]\nodd = kv_odd:OddConfig\n")
    (site / "kv_odd.py").write_text(PLUGIN)
    return site


def odd(how: str, **fields: Any) -> dict[str, Any]:
    return {"type": "odd", "capacity": "64MiB", "how": how, **fields}
