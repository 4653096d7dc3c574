"""A child process that stores blocks until it is killed, and the parent that kills it.

Run as ``python -m tiering.testing.conformance.crash SPEC``: it imports the author's test class, makes a backend on
the given medium and reports each step as a line on stdout.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from tiering.testing.conformance.base import Block, KitBase

STORES_MAX: Final = 400
"""A child that nobody kills ends after so many blocks."""
LIVE_MAX: Final = 24
"""Blocks that the child leaves on the medium; older ones are deleted."""


@dataclass(frozen=True)
class Story:
    """What a killed child had done: ``acknowledged`` stores that it has not begun to delete, and all it had ``attempted``."""

    acknowledged: list[Block]
    attempted: list[Block]


def kill_a_writer(kit: type[KitBase], tmp_path: Path, attempt: int, stores: int) -> Story:
    """Start a writer on the medium of ``tmp_path``, SIGKILL it when ``stores`` stores are acknowledged. Blocks.

    Raises ``AssertionError`` with the child's stderr if it ends by itself, or if no child can import ``kit``.
    """
    if "<locals>" in kit.__qualname__:
        raise AssertionError(
            f"{kit.__qualname__} is not importable by a child process; define it at module level, or set crash_supported "
            "to False"
        )
    spec = {
        "module": kit.__module__,
        "file": inspect.getfile(kit),
        "qualname": kit.__qualname__,
        "tmp_path": str(tmp_path),
        "sys_path": sys.path,
        "attempt": attempt,
    }
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-m", __name__, json.dumps(spec)]
    complaints = tmp_path / f"crash-child-{attempt}.stderr"
    with complaints.open("w+") as stderr:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
        assert child.stdout is not None
        with child.stdout:
            try:
                lines = _read_until(child.stdout, stores)
            finally:
                child.kill()
                lines_after = child.stdout.readlines()
                child.wait()
        stderr.seek(0)
        words = stderr.read()
    if len([line for line in lines if line.startswith("stored ")]) < stores:
        raise AssertionError(f"the writer to be killed ended by itself, with status {child.returncode}:\n{words}")
    return _story(lines + [line for line in lines_after if line.endswith("\n")])


def _read_until(stdout: IO[str], stores: int) -> list[str]:
    lines: list[str] = []
    seen = 0
    while seen < stores and (line := stdout.readline()):
        lines.append(line)
        seen += line.startswith("stored ")
    return lines


def _story(lines: list[str]) -> Story:
    steps = [line.split() for line in lines]

    def those(step: str) -> list[Block]:
        return [(bytes.fromhex(words[1]), int(words[2])) for words in steps if words[0] == step]

    deleted = set(those("deleting"))
    return Story([block for block in those("stored") if block not in deleted], those("storing"))


def _load_kit(spec: dict[str, Any]) -> KitBase:
    sys.path[:] = spec["sys_path"]
    try:
        module: Any = importlib.import_module(spec["module"])
    except ImportError:
        # pytest's importlib mode gives names that no plain import knows.
        found = importlib.util.spec_from_file_location("kit_under_test", spec["file"])
        if found is None or found.loader is None:
            raise
        module = importlib.util.module_from_spec(found)
        sys.modules["kit_under_test"] = module
        found.loader.exec_module(module)
    for name in spec["qualname"].split("."):
        module = getattr(module, name)
    kit: KitBase = module()
    return kit


async def _write(kit: KitBase, tmp_path: Path, attempt: int) -> None:
    async with kit.opened(tmp_path) as s:
        live: list[Block] = []
        can_delete = s.backend.capabilities.can_delete

        async def store(block: Block) -> None:
            _say("storing", block)
            await s.store_all([block])
            _say("stored", block)

        blocks = kit.blocks(STORES_MAX if can_delete else LIVE_MAX, tag=f"crash-{attempt}-")
        for start in range(0, len(blocks), 4):
            batch = blocks[start : start + 4]
            await asyncio.gather(*(store(block) for block in batch))
            live += batch
            while can_delete and len(live) > LIVE_MAX:
                oldest = live.pop(0)
                _say("deleting", oldest)
                await s.delete([oldest[0]])


def _say(step: str, block: Block) -> None:
    print(step, block[0].hex(), block[1], flush=True)


def _main() -> None:
    spec = json.loads(sys.argv[1])
    asyncio.run(_write(_load_kit(spec), Path(spec["tmp_path"]), spec["attempt"]))


if __name__ == "__main__":
    _main()
