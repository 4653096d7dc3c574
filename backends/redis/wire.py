"""Blocking sockets that another thread can interrupt: what a connection sends and receives by.

Blocks move between the caller's buffers and the kernel without a copy between: one ``sendmsg`` a store, and one
``recvmsg_into`` with MSG_WAITALL a load, during which Python's lock is free. Reading on the event loop would take the
lock again for every piece that the kernel has ready, and wait for it wherever the engine computes in Python.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import sys
from collections.abc import Sequence
from typing import Final

from backends.redis.failures import ConnectionLost

Part = bytes | memoryview

_GIVEN_UP: Final = "the call was given up"
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""Half a minute: how long a server that is gone without a word stays unnoticed where nothing is being sent."""


class Wire:
    """A connected socket, used by one thread at a time; ``interrupt`` may be called by any other meanwhile.

    Every method but ``interrupt``, ``quiet`` and ``close`` raises ``ConnectionLost``: the peer closed or reset the
    connection, was silent for ``timeout_s``, or the wire was interrupted.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        """Takes over ``sock``, which is connected. ``timeout_s``: the longest silence within a call."""
        self._sock = sock
        self._timeout_s = timeout_s
        self.interrupted = False
        sock.setblocking(True)
        # SO_RCVTIMEO and not settimeout(), under which the socket does not block and MSG_WAITALL waits for nothing.
        seconds = int(timeout_s)
        timeval = struct.pack("@ll", seconds, int((timeout_s - seconds) * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        if sock.family != socket.AF_UNIX:
            _tune_tcp(sock, timeout_s)

    def greet(self) -> None:
        """What comes before the first byte of the protocol. Blocks."""

    def send(self, parts: Sequence[Part]) -> None:
        """All of ``parts``. They are read until this returns, and not after."""
        self._require_wanted()
        try:
            self._send(parts)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self, view: memoryview) -> int:
        """Some bytes, at least one; their number."""
        self._require_wanted()
        try:
            return _some(self._sock.recv_into(view))
        except OSError as error:
            raise self._lost(error) from error

    def fill(self, views: Sequence[memoryview]) -> None:
        """Exactly as many bytes as ``views`` hold. They are written until this returns, and not after."""
        self._require_wanted()
        try:
            self._fill(views)
        except OSError as error:
            raise self._lost(error) from error

    def _send(self, parts: Sequence[Part]) -> None:
        left = [memoryview(part) for part in parts]
        while left:
            _advance(left, self._sock.sendmsg(left))

    def _fill(self, views: Sequence[memoryview]) -> None:
        left = list(views)
        while left:
            _advance(left, _some(self._sock.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]))

    def interrupt(self) -> None:
        """Make what another thread does on this wire fail at once, and all that it tries later. Any thread."""
        self.interrupted = True
        # The base class's method: an SSLSocket's own would first make the socket forget that it is encrypted. The
        # peer may have closed it already.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def quiet(self) -> bool:
        """Nothing has arrived that nobody asked for: neither bytes nor the end of the connection."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        self._sock.close()

    def _require_wanted(self) -> None:
        if self.interrupted:
            raise ConnectionLost(_GIVEN_UP)

    def _lost(self, error: OSError) -> ConnectionLost:
        if self.interrupted:
            return ConnectionLost(_GIVEN_UP)
        if isinstance(error, (BlockingIOError, TimeoutError)):
            return ConnectionLost(f"the server was silent for {self._timeout_s:g} s", silent=True)
        return ConnectionLost(f"the connection broke: {error.strerror or error}")


class TlsWire(Wire):
    """A ``Wire`` through TLS. Bytes are decrypted into the caller's buffers."""

    def __init__(self, sock: socket.socket, timeout_s: float, context: ssl.SSLContext, server_name: str | None) -> None:
        super().__init__(sock, timeout_s)
        self._tls = context.wrap_socket(sock, server_hostname=server_name, do_handshake_on_connect=False)
        self._sock = self._tls
        # OpenSSL tries again after a timeout of the kernel's; Python's own it reports.
        self._tls.settimeout(timeout_s)

    def greet(self) -> None:
        """The handshake. Also raises ``ssl.SSLError``."""
        self._require_wanted()
        try:
            self._tls.do_handshake()
        except OSError as error:
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError) and not self.interrupted:
                raise
            raise self._lost(error) from error

    def _send(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self._tls.sendall(part)

    def _fill(self, views: Sequence[memoryview]) -> None:
        for view in views:
            left = [view]
            while left:
                _advance(left, _some(self._tls.recv_into(left[0])))


def _tune_tcp(sock: socket.socket, timeout_s: float) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))


def _some(count: int) -> int:
    if not count:
        raise ConnectionResetError("the server closed the connection")
    return count


def _advance(views: list[memoryview], count: int) -> None:
    """Drop the first ``count`` bytes of ``views``, and what is empty."""
    while views and count >= len(views[0]):
        count -= len(views.pop(0))
    if count:
        views[0] = views[0][count:]
