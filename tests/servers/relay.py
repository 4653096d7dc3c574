"""A wire with a valve: passes bytes between a client and a server, stops at a chosen byte, cuts or half-closes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

CHUNK_BYTES = 1 << 16


class Relay:
    """Between clients on ``port`` and a server's unix socket. It runs on the test's own loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.port = 0
        self.connections = 0
        """Accepted so far."""
        self.sent_bytes = 0
        """From clients to the server, so far."""
        self._left: int | None = None
        """Bytes that the server may still send; None: any number."""
        self._open = asyncio.Event()
        self._open.set()
        self.held = asyncio.Event()
        """Set while a byte of the server's waits at the closed valve."""
        self._asked = asyncio.Event()
        self._clients: set[asyncio.StreamWriter] = set()
        self._halved: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def close_valve_after(self, count: int) -> None:
        """Let the server send ``count`` bytes more."""
        self._left = count
        self._open.clear()
        self.held.clear()

    def open_valve(self) -> None:
        self._left = None
        self._open.set()
        self.held.clear()

    async def asked(self) -> None:
        """Returns when a client has sent something since the last call."""
        await self._asked.wait()
        self._asked.clear()

    def cut(self) -> None:
        """Reset every connection, in the middle of whatever it is at."""
        for client in self._clients:
            client.transport.abort()

    def half_close(self) -> None:
        """The server's side of every connection ends; the client's stays open."""
        for client in self._clients - self._halved:
            client.write_eof()
            self._halved.add(client)

    async def inject(self, data: bytes) -> None:
        """Send clients what their server did not say."""
        for client in self._clients:
            client.write(data)
            await client.drain()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._clients.add(writer)
        there, away = await asyncio.open_unix_connection(self._path)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, away, self._note))
                group.create_task(self._pass(there, writer, self._wait))
        finally:
            self._clients.discard(writer)
            self._halved.discard(writer)
            for end in (writer, away):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, before: Callable[[bytes], Awaitable[int]]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                while data:
                    count = await before(data)
                    if writer in self._halved:
                        break
                    writer.write(data[:count])
                    await writer.drain()
                    data = data[count:]
        writer.close()

    async def _note(self, data: bytes) -> int:
        self.sent_bytes += len(data)
        self._asked.set()
        return len(data)

    async def _wait(self, data: bytes) -> int:
        if self._left == 0:
            self.held.set()
            await self._open.wait()
        if self._left is None:
            return len(data)
        count = min(len(data), self._left)
        self._left -= count
        return count


@contextlib.asynccontextmanager
async def relay(path: Path) -> AsyncIterator[Relay]:
    made = Relay(path)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(made._take(reader, writer), name="relay")
        made._tasks.add(task)
        task.add_done_callback(made._tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for task in list(made._tasks):
            task.cancel()
        await asyncio.gather(*made._tasks, return_exceptions=True)
        await server.wait_closed()
