"""Making a connection: the address, the socket, TLS, authentication, and words for what is wrong with each."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from dataclasses import dataclass
from typing import Any, Final

from backends.redis.config import RedisConfig
from backends.redis.failures import ConnectionLost, ErrorReply, Rejected, Unreachable, is_passing
from backends.redis.resp import Connection, encode
from backends.redis.url import Address, Credentials
from backends.redis.wire import TlsWire, Wire
from tiering.api import ConfigError

_REMEDIES: Final = {
    "NOAUTH": "it wants a password: give one in `url:` or `password:`",
    "WRONGPASS": "the user name or password is wrong: look at `url:`, `username:` and `password:`",
    "NOPERM": "this user may not do that: give it the right, or another user",
}


@dataclass(frozen=True)
class Dialer:
    """Makes connections to the servers of one kind: the Sentinels, or those that hold blocks."""

    credentials: Credentials
    db: int
    tls: ssl.SSLContext | None
    tls_server_name: str | None
    timeout_s: float

    async def connect(self, address: Address, limit: asyncio.Timeout) -> Connection:
        """A connection that ``greet`` is still to open. Raises ``Unreachable``, past ``limit`` too.

        Cancelled, it leaves nothing behind.
        """
        try:
            async with limit:
                sock = await _socket(address)
        except TimeoutError:
            raise Unreachable(f"{address} did not accept a connection within {self.timeout_s:g} s") from None
        except OSError as error:
            # asyncio's own words for a refused connection are longer and say less.
            words = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
            raise Unreachable(f"{address} cannot be reached: {words}") from error
        if self.tls is None:
            return Connection(Wire(sock, self.timeout_s))
        try:
            return Connection(TlsWire(sock, self.timeout_s, self.tls, self.tls_server_name or address.host))
        except (OSError, ValueError) as error:
            sock.close()
            raise Unreachable(f"{address}: TLS cannot begin: {error}") from error

    def greet(self, connection: Connection, address: Address) -> None:
        """TLS, authentication, database. Blocks. Raises ``Rejected`` and ``ConnectionLost``."""
        try:
            connection.wire.greet()
        except ssl.SSLError as error:
            raise Rejected(f"{address}: {_tls_words(error)}", retryable=False) from error
        except ConnectionLost as lost:
            hint = "if it does not speak TLS, write redis:// instead of rediss://"
            raise ConnectionLost(f"{lost} at the TLS handshake; {hint}", silent=lost.silent) from lost
        steps = {}
        if self.credentials.password is not None:
            user = [self.credentials.username.encode()] if self.credentials.username else []
            steps["AUTH"] = encode(b"AUTH", *user, self.credentials.password.encode())
        if self.db:
            steps[f"SELECT {self.db}"] = encode(b"SELECT", b"%d" % self.db)
        for step, reply in zip(steps, connection.pipeline(list(steps.values())), strict=True):
            if isinstance(reply, ErrorReply):
                raise rejected(address, step, reply)


def rejected(address: Address, step: str, error: ErrorReply) -> Rejected:
    """What an error at the first contact means, with the remedy where there is one."""
    if is_passing(error):
        return Rejected(f"{address} is not ready: {error.text}")
    remedy = _REMEDIES.get(error.code, "")
    if step == "AUTH" and not remedy:
        remedy = _REMEDIES["WRONGPASS"]
    return Rejected(f"{address} refused {step}: {error.text}" + (f"; {remedy}" if remedy else ""), retryable=False)


def tls_context(config: RedisConfig) -> ssl.SSLContext | None:
    """The TLS settings; None without TLS. Reads files, so it blocks. Raises ``ConfigError``."""
    if not config.server.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=config.tls_ca_file)
    except OSError as error:  # an SSLError is one, too
        raise ConfigError(f"tls_ca_file: {config.tls_ca_file}: {error}; name a file of PEM certificates") from error
    if config.tls_cert_file is not None:
        try:
            # Without the callback a key with a pass phrase would be asked for on the terminal.
            context.load_cert_chain(config.tls_cert_file, config.tls_key_file, lambda: "")
        except OSError as error:
            raise ConfigError(
                f"tls_cert_file: {config.tls_cert_file}: {error}; name a PEM certificate and its key, without a pass phrase"
            ) from error
    return context


def _tls_words(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not accepted: {error.verify_message}; set `tls_ca_file:` to who signed it, and"
            " `tls_server_name:` if it is made out for another name"
        )
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if error.reason in ("WRONG_VERSION_NUMBER", "UNEXPECTED_MESSAGE", "RECORD_LAYER_FAILURE"):
        return f"it does not speak TLS ({reason}); if that is right, write redis:// instead of rediss://"
    return f"TLS failed: {reason}; a server that asks for a certificate needs `tls_cert_file:`"


async def _socket(address: Address) -> socket.socket:
    """A connected socket to the first of the address's ways that works. Raises ``OSError``."""
    if address.is_path:
        return await _connected(socket.AF_UNIX, address.host)
    loop = asyncio.get_running_loop()
    ways = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    failure: OSError | None = None
    for family, _, _, _, place in ways:
        try:
            return await _connected(family, place)
        except OSError as error:
            failure = failure or error
    raise failure or OSError("its name has no address")


async def _connected(family: int, place: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, place)
    except BaseException:
        sock.close()
        raise
    return sock
