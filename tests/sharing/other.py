"""The other process, as a test speaks with it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0


class Other:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, *words: object) -> dict[str, Any]:
        """Its answer to one line."""
        assert self._process.stdin is not None
        self._process.stdin.write((" ".join(map(str, words)) + "\n").encode())
        answer: dict[str, Any] = json.loads(await self.line())
        return answer

    async def line(self) -> str:
        assert self._process.stdout is not None
        text = (await asyncio.wait_for(self._process.stdout.readline(), PATIENCE_S)).decode()
        assert text, "the other process ended"
        return text.strip()


@asynccontextmanager
async def other(tier: Mapping[str, Any], *, managers: int = 1, hash_seed: int = 1) -> AsyncIterator[Other]:
    """A process with so many managers on ``tier``; it ends with the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.sharing.child", json.dumps(tier), str(managers), cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed)},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        one = Other(process)
        assert await one.line() == "ready"
        yield one
        assert process.stdin is not None
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
