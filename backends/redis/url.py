"""Addresses of servers, and the URLs that name them. No message of this module repeats a URL: it may hold a password."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote

DEFAULT_PORT: Final = 6379
_ADDRESS: Final = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:/?#\[\]@]+))(?::(?P<port>[0-9]{1,5}))?")
_FORMS: Final = (
    "write redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH?db=DB, with user:password@ before the host if"
    " needed; percent-encode what is special in a password, or give it as `password:`"
)


class UrlError(ValueError):
    """The URL cannot be used. The message holds nothing of it but what is known to be no secret."""


class Address(NamedTuple):
    """Where a server listens: a host and a port, or a path and port 0."""

    host: str
    port: int

    @property
    def is_path(self) -> bool:
        return self.port == 0

    def __str__(self) -> str:
        if self.is_path:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Credentials:
    """``username`` None is the server's default user. ``password`` None: no authentication."""

    username: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Server:
    """What a URL names."""

    addresses: tuple[Address, ...]
    db: int
    credentials: Credentials
    tls: bool


def parse_url(url: str, username: str | None = None, password: str | None = None) -> Server:
    """The server that ``url`` names; ``username`` and ``password`` are given beside it. Raises ``UrlError``."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("redis", "rediss", "unix"):
        raise UrlError(f"it does not begin with redis://, rediss:// or unix://; {_FORMS}")
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    userinfo, at, hosts = authority.rpartition("@")
    if "#" in rest or "#" in query or " " in url:
        raise UrlError(f"it contains a '#' or a space; {_FORMS}")
    db = _db(query, "")
    if scheme == "unix":
        if hosts or not path:
            raise UrlError(f"unix:// is followed by an absolute path, so by three slashes; {_FORMS}")
        addresses = [Address("/" + unquote(path), 0)]
    else:
        addresses = [_address(part) for part in (hosts or "localhost").split(",")]
        db = _db(query, path)
    return Server(tuple(addresses), db, _credentials(userinfo if at else "", username, password), scheme == "rediss")


def _address(text: str) -> Address:
    found = _ADDRESS.fullmatch(text)
    port = int(found["port"] or DEFAULT_PORT) if found else 0
    if not found or not 1 <= port <= 65535:
        # Not shown: where a password holds a '/' or '@', this is a piece of it.
        raise UrlError(f"its host and port are not understood; {_FORMS}")
    return Address(found["v6"] or found["host"], port)


def _db(query: str, path: str) -> int:
    options = parse_qsl(query, keep_blank_values=True)
    if unknown := sorted({name for name, _ in options} - {"db"}):
        raise UrlError(
            f"it has {len(unknown)} unknown options behind '?'; only db is known, the rest are fields of the tier"
        )
    given = [value for _, value in options] + ([path] if path else [])
    if len(given) > 1 or not all(re.fullmatch(r"[0-9]{1,9}", text) for text in given):
        raise UrlError(f"its database is not one whole number; {_FORMS}")
    return int(given[0]) if given else 0


def _credentials(userinfo: str, username: str | None, password: str | None) -> Credentials:
    user, _, secret = userinfo.partition(":")
    if (user and username) or (secret and password):
        raise UrlError("it holds a user or password that is also given beside it; give each once")
    return Credentials(username or unquote(user) or None, password or unquote(secret) or None)
