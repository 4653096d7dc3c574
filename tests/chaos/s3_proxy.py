"""A faulty wire to an S3 server, in a process of its own, so that it costs the process under test nothing.

``python -m tests.chaos.s3_proxy UPSTREAM_URL`` prints its URL, then does what each line on its stdin says (a word of
``WORDS``) to every request from then on, and answers with the word. It ends with its stdin.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from tests.servers.http_proxy import Body, Fault, HttpProxy, http_proxy

ROOT = Path(__file__).resolve().parents[2]
SLOW_S: Final = 1.5
"""Three times the deadline of the tier."""
ALWAYS: Final = 1 << 60
_METHODS: Final = ("GET", "HEAD", "PUT", "DELETE")

WORDS: Final[dict[str, list[dict[str, Any]]]] = {
    "well": [],
    "500": [{"method": method, "status": 500, "code": "InternalError"} for method in _METHODS],
    "403": [{"method": method, "status": 403, "code": "AccessDenied"} for method in _METHODS],
    "slow": [{"method": "GET", "body": Body.SLOW, "pause_s": SLOW_S}],
    "truncated": [{"method": "GET", "body": Body.CUT}],
    "shortened": [{"method": "GET", "body": Body.SHORTENED}],
    "flipped": [{"method": "GET", "body": Body.FLIPPED}],
    "dead": [],
}
"""What happens to requests. ``dead``: nothing listens, and every connection is cut."""


class Proxy:
    """The process, from outside."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.url = url
        self._process = process

    async def say(self, word: str) -> None:
        """Returns when it holds for every request to come."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word}\n".encode())
        answer = await self._process.stdout.readline()
        assert answer.decode().strip() == word, "the proxy died"


@asynccontextmanager
async def proxy(upstream_url: str) -> AsyncIterator[Proxy]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.chaos.s3_proxy", upstream_url, cwd=ROOT,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        assert url, "the proxy did not start"
        yield Proxy(process, url)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _serve(upstream_url: str) -> None:
    lines = await _stdin()
    port = 0
    async with AsyncExitStack() as stack:
        made: HttpProxy | None = None
        word = "well"
        while word:
            if word == "dead":
                await stack.aclose()
                made = None
            elif made is None:
                made = await stack.enter_async_context(http_proxy(upstream_url, port=port))
            if made is not None:
                made.faults[:] = [Fault(times=ALWAYS, **fault) for fault in WORDS[word]]
            answer = word if port or made is None else made.url
            if made is not None:
                port = urlsplit(made.url).port or 0
            sys.stdout.write(f"{answer}\n")
            sys.stdout.flush()
            word = (await lines.readline()).decode().strip()


async def _stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
