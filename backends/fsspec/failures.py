"""What a client's error means for a block. The clients differ in what they raise; HTTP says the same to all of them."""

from __future__ import annotations

import enum
import errno
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tiering.api import Outcome

WHY_CHARS_MAX: Final = 200

_BUSY_STATUS: Final = {408, 409, 423, 425, 429}
_BUSY_CODES: Final = {"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "OperationAborted"}
_DENIED_ERRNO: Final = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL_ERRNO: Final = {errno.ENOSPC, errno.EDQUOT}
_CLIENTS: Final = {"aiohttp", "botocore", "obstore", "urllib3"}
"""Libraries whose own exceptions, where they tell no HTTP status, are about the network."""
_NO_CREDENTIALS: Final = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
}

_STATUS: Final = re.compile(r"status code: ([1-5]\d\d)")
_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")

_ASKED: Final = re.compile(r"Error performing [A-Z]+ (https?://[^/\s]+)")
_REASON: Final = re.compile(r'^ +(?:message|error): "([^"]+)"', re.MULTILINE)
"""The system's or the resolver's own words, in obstore's account of where an error came from."""

_PLAIN_OPTIONS: Final = {"endpoint_url", "endpoint", "region", "region_name", "profile", "addressing_style"}
_SECRET_VARIABLES: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_SECRET_CHARS_MIN: Final = 4
"""Shorter values are words such as ``true``; hiding them would make a message illegible."""


class Kind(enum.Enum):
    MISSING = "missing"
    DENIED = "denied"
    """The credentials, or the rights of this user, do not suffice."""
    BUSY = "busy"
    """May work a little later: overload, a lost connection, no answer."""
    BROKEN = "broken"
    """Would fail again in the same way."""
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a request failed. ``code`` is the service's word for it, such as ``NoSuchBucket``; empty if it had none."""

    kind: Kind
    why: str
    code: str = ""

    def outcome(self) -> Outcome:
        match self.kind:
            case Kind.MISSING:
                return Outcome.MISSING
            case Kind.FULL:
                return Outcome.refused(self.why)
            case Kind.BUSY:
                return Outcome.failed(self.why, retryable=True)
            case Kind.DENIED | Kind.BROKEN:
                return Outcome.failed(self.why)

    def store_outcome(self) -> Outcome:
        """There, what is missing is the bucket or directory."""
        if self.kind is Kind.MISSING:
            return Outcome.failed(f"{self.why}; is the bucket or directory gone?")
        return self.outcome()


class Secrets:
    """Values that no message may hold."""

    def __init__(self, storage_options: Mapping[str, Any]) -> None:
        values = {*_text_values(storage_options), *(os.environ.get(name, "") for name in _SECRET_VARIABLES)}
        # Longest first: one secret may be a part of another.
        self._values = sorted((value for value in values if len(value) >= _SECRET_CHARS_MIN), key=len, reverse=True)

    def hide(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, "***")
        return text


def timed_out(op: str, timeout_s: float) -> Trouble:
    return Trouble(Kind.BUSY, f"{op}: no answer within {timeout_s:g} s")


def trouble_of(op: str, error: Exception, secrets: Secrets) -> Trouble:
    """``error`` was raised by a client that was asked for ``op``. Server texts are dropped: some echo credentials."""
    status, code = _http(error)
    if status:
        why = f"{op}: HTTP {status} {code}".rstrip()
        return Trouble(_kind_of_status(status, code), why, code)
    why = secrets.hide(f"{op}: {_words(error)}")[:WHY_CHARS_MAX]
    return Trouble(_kind_of_error(error), why, code)


def _words(error: Exception) -> str:
    """What ``error`` says in its first line; obstore tells there whom it asked and for what, and the reason further down."""
    text = str(error)
    asked, reason = _ASKED.search(text), _REASON.search(text)
    if asked and reason:
        return f"{asked[1]}: {reason[1]}"
    first_line = text.partition("\n")[0]
    return f"{type(error).__name__}: {first_line}".rstrip(": ")


def _kind_of_status(status: int, code: str) -> Kind:
    if code in _BUSY_CODES or status in _BUSY_STATUS:
        return Kind.BUSY
    match status:
        case 404 | 410 | 416:
            # 416: an object without bytes, which some servers leave of an upload that was cut off.
            return Kind.MISSING
        case 401 | 403 | 407:
            return Kind.DENIED
        case 507:
            return Kind.FULL
        case _:
            return Kind.BUSY if status >= 500 else Kind.BROKEN


def _kind_of_error(error: Exception) -> Kind:
    if isinstance(error, FileNotFoundError):
        return Kind.MISSING
    if isinstance(error, OSError) and error.errno in _FULL_ERRNO:
        return Kind.FULL
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno in _DENIED_ERRNO):
        return Kind.DENIED
    if type(error).__name__ in _NO_CREDENTIALS:
        return Kind.DENIED
    if isinstance(error, (IsADirectoryError, NotADirectoryError)):
        return Kind.BROKEN
    own = type(error).__module__.partition(".")[0] in _CLIENTS
    return Kind.BUSY if own or isinstance(error, OSError) else Kind.BROKEN


def _http(error: Exception) -> tuple[int, str]:
    """HTTP status and the service's code; 0 and "" where the error tells none."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        if isinstance(response, Mapping):  # botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = str(response.get("Error", {}).get("Code", ""))
            return int(status), "" if code.isdigit() else code
        # aiohttp's parser has a `code` of its own, for what it makes of a broken answer.
        own = type(one).__module__.startswith("aiohttp")
        for name in ("status",) if own else ("status", "status_code", "code"):
            value = getattr(one, name, None)
            if isinstance(value, int) and 100 <= value <= 599:
                return value, ""
    text = str(error)
    if found := _STATUS.search(text):  # obstore tells it in words alone
        code_found = _CODE.search(text)
        return int(found[1]), code_found[1] if code_found else ""
    return 0, ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _text_values(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _text_values(value)
        elif isinstance(value, str) and name not in _PLAIN_OPTIONS:
            yield value
