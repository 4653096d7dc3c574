"""``python -m tests.servers.tls_proxy CERTIFICATE SOCKET [CLIENT_CA]``: TLS in front of a server's unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys

CHUNK_BYTES = 1 << 16


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the one side ends; then the other side ends too."""
    with contextlib.suppress(OSError, ssl.SSLError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


async def serve(certificate: str, path: str, client_ca: str | None) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_ca)
    context.load_cert_chain(certificate)
    if client_ca:
        context.verify_mode = ssl.CERT_REQUIRED

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, away = await asyncio.open_unix_connection(path)
        await asyncio.gather(copy(reader, away), copy(there, writer))

    server = await asyncio.start_server(take, "127.0.0.1", 0, ssl=context)
    print("ready on", server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None))
