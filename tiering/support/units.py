"""Sizes, times and shares as people write them in YAML: ``8GiB``, ``200ms``, ``5%``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Final

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

BYTES_MAX: Final = (1 << 63) - 1
"""The largest size accepted: what a file offset can name."""

_DECIMAL: Final = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY: Final = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_BYTE_UNITS: Final[Mapping[str, Fraction]] = {unit: Fraction(size) for unit, size in (_DECIMAL | _BINARY).items()}
_TIME_UNITS: Final[Mapping[str, Fraction]] = {
    "us": Fraction(1, 10**6), "ms": Fraction(1, 10**3), "s": Fraction(1), "m": Fraction(60), "min": Fraction(60),
    "h": Fraction(3600), "d": Fraction(86400),
}  # fmt: skip
_QUANTITY: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z%]*)\s*", re.ASCII)

_BYTES_HELP: Final = (
    "write a whole number of bytes or a number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 8GiB"
)
_SECONDS_HELP: Final = "write a number of seconds or a number with us, ms, s, m (or min), h or d, such as 200ms"
_PERCENT_HELP: Final = (
    "write a percentage from 0% to 100%, such as 5%, or the same share as a number below 1, such as 0.05"
)


def parse_bytes(value: object) -> int:
    """A size in bytes: ``"8GiB"``, ``"64 MB"``, ``"1.5KiB"``, ``4096``. Case does not matter; a part of a byte is dropped.

    Raises ``ValueError`` that names the legal forms.
    """
    amount = _amount(value, _BYTE_UNITS, "size", _BYTES_HELP, fold_case=True)
    if isinstance(value, float) and amount.denominator != 1:
        raise ValueError(f"size {value!r} is not a whole number of bytes; {_BYTES_HELP}")
    if amount > BYTES_MAX:
        raise ValueError(f"size {value!r} is above the limit of {BYTES_MAX} bytes; {_BYTES_HELP}")
    return math.floor(amount)


def parse_seconds(value: object) -> float:
    """A time in seconds: ``"200ms"``, ``"6h"``, ``"2s"``, ``1.5``. Units are lower case (``m`` is a minute).

    Raises ``ValueError`` that names the legal forms.
    """
    return float(_amount(value, _TIME_UNITS, "time", _SECONDS_HELP))


def parse_percent(value: object) -> Fraction:
    """A share of a whole, exactly: ``"5%"`` or ``0.05`` gives 1/20, so that a share of n slots rounds down as on paper.

    A bare ``5`` or ``1`` is refused, since it may mean a percentage or a multiple. Raises ``ValueError`` that names the legal forms.
    """
    if isinstance(value, str):
        amount = _amount(value, {"%": Fraction(1, 100)}, "share", _PERCENT_HELP)
        clear = "%" in value or amount < 1
    else:
        amount = _amount(value, {}, "share", _PERCENT_HELP)
        clear = amount < 1 or isinstance(value, Fraction)
    if not clear or amount > 1:
        raise ValueError(f"share {value!r} is not understood; {_PERCENT_HELP}")
    return amount


def format_bytes(count: int) -> str:
    """``count`` bytes for people, in binary units with at most two decimals: ``8 GiB``, ``1.5 KiB``, ``512 B``."""
    size: float = count
    for unit in ("B", "KiB", "MiB", "GiB"):
        # 1023.995 would print as "1024 KiB".
        if round(abs(size), 2) < 1024:
            return f"{_short(size)} {unit}"
        size /= 1024
    return f"{_short(size)} TiB"


def format_seconds(seconds: float) -> str:
    """``seconds`` for people, in the unit that leaves one to three digits before the point: ``200 ms``, ``1.5 s``, ``6 h``."""
    for unit, size, limit in (("us", 1e-6, 1e-3), ("ms", 1e-3, 1.0), ("s", 1.0, 120.0), ("min", 60.0, 7200.0)):
        if abs(seconds) < limit:
            return f"{_short(seconds / size)} {unit}"
    return f"{_short(seconds / 3600)} h"


def format_percent(share: Fraction) -> str:
    """``share`` as ``parse_percent`` reads it: ``5%``. Exact for every share that it returns."""
    percent = share * 100
    return f"{Decimal(percent.numerator) / percent.denominator:f}%"


def _amount(
    value: object, units: Mapping[str, Fraction], what: str, remedy: str, *, fold_case: bool = False
) -> Fraction:
    if isinstance(value, str) and (found := _QUANTITY.fullmatch(value)):
        number, unit = found.groups()
        scale = units.get(unit.lower() if fold_case else unit) if unit else Fraction(1)
        if scale is None:
            raise ValueError(f"{what} {value!r} has the unknown unit {unit!r}; {remedy}")
        return Fraction(number) * scale
    if isinstance(value, (int, float, Fraction)) and not isinstance(value, bool) and math.isfinite(value):
        # str() of a float is what its author typed: 0.05 becomes 1/20 and not the nearest binary fraction.
        amount = Fraction(str(value)) if isinstance(value, float) else Fraction(value)
        if amount >= 0:
            return amount
    raise ValueError(f"{what} {value!r} is not understood; {remedy}")


def _short(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


ByteCount = Annotated[
    int,
    BeforeValidator(parse_bytes),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*(([KMGTkmgt][Ii]?)?[Bb])?\s*$"},
            ],
            "description": f"A size: {_BYTES_HELP}.",
        }
    ),
]
"""A pydantic field of bytes that takes what ``parse_bytes`` takes."""

Seconds = Annotated[
    float,
    BeforeValidator(parse_seconds),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0},
                {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*(us|ms|s|m|min|h|d)?\s*$"},
            ],
            "description": f"A time: {_SECONDS_HELP}.",
        }
    ),
]
"""A pydantic field of seconds that takes what ``parse_seconds`` takes."""

Percent = Annotated[
    Fraction,
    BeforeValidator(parse_percent),
    PlainSerializer(format_percent, return_type=str),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
                {"type": "string", "pattern": r"^\s*(0(\.[0-9]+)?|[0-9]+(\.[0-9]+)?\s*%)\s*$"},
            ],
            "description": f"A share: {_PERCENT_HELP}.",
        }
    ),
]
"""A pydantic field of a share from 0 to 1, as an exact fraction, that takes what ``parse_percent`` takes."""
