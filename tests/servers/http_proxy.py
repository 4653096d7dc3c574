"""An HTTP proxy that goes wrong on demand, between a client and a real server: real bytes, damaged on the wire.

Faults are planned in the test and strike requests whose method matches, in the order in which they were planned.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit


class Body(enum.Enum):
    WHOLE = "whole"
    CUT = "cut"
    """Half of the body, then the connection ends: fewer bytes than were announced."""
    SHORTENED = "shortened"
    """Half of the body, announced as if it were all."""
    EXTENDED = "extended"
    """More than was stored, announced so."""
    FLIPPED = "flipped"
    """One bit, in the middle."""
    HANGS = "hangs"
    """Half of the body; the rest when ``release`` is called."""
    SLOW = "slow"
    """Half of the body; the rest after the fault's ``pause_s``."""


@dataclass
class Fault:
    """What happens to a request. With ``status`` it never reaches the server; ``drop`` ends the connection instead of an answer."""

    method: str
    times: int
    status: int = 0
    code: str = ""
    drop: bool = False
    body: Body = Body.WHOLE
    pause_s: float = 0.0
    path: str = ""
    """Only requests whose path holds it."""


@dataclass
class HttpProxy:
    """``url`` is what the client is given. Counts what it saw, for the bounds that a test asserts."""

    upstream_host: str
    upstream_port: int
    url: str = ""
    requests: Counter[str] = field(default_factory=Counter)
    most_under_way: int = 0
    most_connections: int = 0
    connections: int = 0
    faults: list[Fault] = field(default_factory=list)
    _under_way: int = 0
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    _hung: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _gate: asyncio.Event | None = None
    _held: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    def plan(self, method: str, *, times: int = 1, **what: object) -> None:
        self.faults.append(Fault(method, times, **what))  # type: ignore[arg-type]

    def release(self) -> None:
        """Bodies that hang go on."""
        self._released.set()

    async def hung(self) -> None:
        """Returns when one more body hangs."""
        await self._hung.acquire()

    def hold(self) -> Callable[[], None]:
        """Requests wait before they reach the server, until the returned function is called."""
        self._gate = gate = asyncio.Event()
        return gate.set

    async def held(self) -> None:
        """Returns when one more request waits."""
        await self._held.acquire()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self.most_connections = max(self.most_connections, self.connections)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client went, or the test ends
        finally:
            self.connections -= 1
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request. False: the connection ends."""
        head = await reader.readuntil(b"\r\n\r\n")
        self._under_way += 1
        self.most_under_way = max(self.most_under_way, self._under_way)
        try:
            method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
            self.requests[method] += 1
            headers = _headers(head)
            if "100-continue" in headers.get("expect", ""):
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if self._gate is not None:
                self._held.release()
                await self._gate.wait()
            fault = self._fault(method, path)
            if fault is not None and fault.drop:
                return False
            if fault is not None and fault.status:
                writer.write(_error(method, fault))
                await writer.drain()
                return True
            answer = await self._ask(head, body)
            return await self._answer(writer, answer, fault)
        finally:
            self._under_way -= 1

    def _fault(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.times and fault.method == method and fault.path in path:
                fault.times -= 1
                return fault
        return None

    async def _ask(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection(self.upstream_host, self.upstream_port)
        try:
            writer.write(_with(head, {"Connection": "close", "Expect": None}) + body)
            await writer.drain()
            raw = await reader.read()
        finally:
            writer.close()
        answer_head, _, answer_body = raw.partition(b"\r\n\r\n")
        return _with(answer_head + b"\r\n\r\n", {"Connection": None}), answer_body

    async def _answer(self, writer: asyncio.StreamWriter, answer: tuple[bytes, bytes], fault: Fault | None) -> bool:
        head, body = answer
        half = len(body) // 2
        how = fault.body if fault is not None else Body.WHOLE
        match how:
            case Body.CUT:
                writer.write(head + body[:half])
                await writer.drain()
                return False
            case Body.SHORTENED:
                body = body[:half]
            case Body.EXTENDED:
                body = body + body[:64]
            case Body.FLIPPED:
                body = body[:half] + bytes((body[half] ^ 1,)) + body[half + 1 :]
            case Body.HANGS:
                writer.write(head + body[:half])
                await writer.drain()
                self._hung.release()
                await self._released.wait()
                head, body = b"", body[half:]
            case Body.SLOW:
                writer.write(head + body[:half])
                await writer.drain()
                await asyncio.sleep(fault.pause_s if fault is not None else 0.0)
                head, body = b"", body[half:]
            case Body.WHOLE:
                pass
        if how in (Body.SHORTENED, Body.EXTENDED):
            head = _with(head, {"Content-Length": str(len(body)), "Content-Range": None})
            head = head.replace(b" 206 Partial Content", b" 200 OK", 1) if how is Body.EXTENDED else head
        writer.write(head + body)
        await writer.drain()
        return True


@asynccontextmanager
async def http_proxy(upstream_url: str, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[HttpProxy]:
    """A proxy in front of ``upstream_url``, on a free port unless one is named."""
    parts = urlsplit(upstream_url)
    assert parts.hostname
    assert parts.port
    proxy = HttpProxy(parts.hostname, parts.port)
    server = await asyncio.start_server(proxy._serve, host, port)
    proxy.url = f"http://{host}:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        tasks = list(proxy._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await server.wait_closed()


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}


def _with(head: bytes, changes: dict[str, str | None]) -> bytes:
    """``head`` with headers replaced, or removed where the new value is None."""
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    names = {name.lower() for name in changes}
    kept = [line for line in lines if line.partition(":")[0].lower() not in names]
    new = [f"{name}: {value}" for name, value in changes.items() if value is not None]
    return "\r\n".join([first, *kept, *new, "", ""]).encode("latin-1")


def _error(method: str, fault: Fault) -> bytes:
    xml = f"<?xml version='1.0' encoding='UTF-8'?>\n<Error><Code>{fault.code}</Code><Message>no</Message></Error>"
    body = b"" if method == "HEAD" else xml.encode()
    # A HEAD's answer announces the body that it has not; an empty one is legal too.
    head = f"HTTP/1.1 {fault.status} Planned\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
