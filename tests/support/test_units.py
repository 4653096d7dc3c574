from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tiering.support.units import (
    ByteCount,
    Percent,
    Seconds,
    format_bytes,
    format_percent,
    format_seconds,
    parse_bytes,
    parse_percent,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0), (4096, 4096), (1e9, 1_000_000_000), ("4096", 4096), ("7B", 7), ("1KB", 1000), ("64 MB", 64_000_000),
        ("2GB", 2_000_000_000), ("1TB", 1_000_000_000_000), ("1.5KiB", 1536), ("64MiB", 67_108_864),
        ("8GiB", 8_589_934_592), ("1TiB", 1_099_511_627_776), ("8gib", 8_589_934_592), (" 3 kB ", 3000),
        ("0.1KiB", 102), ("9007199254740993", 9_007_199_254_740_993),
    ],
)  # fmt: skip
def test_a_size_is_read(text: object, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "bad",
    [
        True, -1, "-1", "-4KiB", "8 G", "8Gi", "8Gbit", "8EiB", "", "GiB", "1.5.5KiB", ".5KiB", "1e9", "1_000", "٣KiB", "8GiB!",
        1.5, float("nan"), float("inf"), None, [1], b"8", 1 << 63, "8388608TiB",
    ],
)  # fmt: skip
def test_a_size_that_is_none_is_refused_with_the_legal_forms(bad: object) -> None:
    with pytest.raises(ValueError, match=r"B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"):
        parse_bytes(bad)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("200ms", 0.2), ("6h", 21600.0), ("2s", 2.0), (1.5, 1.5), (3, 3.0), ("3", 3.0), ("1.5 s", 1.5), ("50us", 5e-5),
        ("2m", 120.0), ("2min", 120.0), ("1d", 86400.0), (0, 0.0), ("0.25d", 21600.0), (1e-7, 1e-7),
    ],
)  # fmt: skip
def test_a_time_is_read(text: object, expected: float) -> None:
    assert parse_seconds(text) == expected


@pytest.mark.parametrize(
    "bad", [False, -1, "-2s", "2M", "2 hours", "2w", "", "s", "1h30m", float("inf"), None, "200 MS"]
)
def test_a_time_that_is_none_is_refused_with_the_legal_forms(bad: object) -> None:
    with pytest.raises(ValueError, match=r"us, ms, s, m \(or min\), h or d"):
        parse_seconds(bad)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5%", Fraction(1, 20)), ("0%", Fraction(0)), ("100%", Fraction(1)), ("12.5 %", Fraction(1, 8)), (0.05, Fraction(1, 20)),
        ("0.05", Fraction(1, 20)), (0, Fraction(0)), ("29%", Fraction(29, 100)), (Fraction(1), Fraction(1)),
    ],
)  # fmt: skip
def test_a_share_is_exact(text: object, expected: Fraction) -> None:
    assert parse_percent(text) == expected


@pytest.mark.parametrize("bad", [5, 1, 1.0, "1", "5", "101%", "-1%", True, "5 percent", "5GiB", None, Fraction(3, 2)])
def test_a_share_that_is_unclear_is_refused_with_the_legal_forms(bad: object) -> None:
    with pytest.raises(ValueError, match="such as 5%"):
        parse_percent(bad)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"), (512, "512 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (8 << 30, "8 GiB"), (5 << 40, "5 TiB"),
        (5000 << 40, "5000 TiB"), ((1 << 20) - 1, "1 MiB"), (1_000_000, "976.56 KiB"),
    ],
)  # fmt: skip
def test_a_size_is_written(count: int, expected: str) -> None:
    assert format_bytes(count) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "0 us"),
        (5e-5, "50 us"),
        (0.2, "200 ms"),
        (1.5, "1.5 s"),
        (90.0, "90 s"),
        (600.0, "10 min"),
        (21600.0, "6 h"),
    ],
)
def test_a_time_is_written(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected


@pytest.mark.parametrize("text", ["0%", "5%", "12.5%", "0.001%", "100%"])
def test_a_share_is_written_as_it_is_read(text: str) -> None:
    assert format_percent(parse_percent(text)) == text


@given(st.integers(0, 1 << 44))
def test_what_is_written_reads_back_within_a_hundredth_of_its_unit(count: int) -> None:
    assert abs(parse_bytes(format_bytes(count)) - count) <= max(count / 100, 1)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    capacity: ByteCount = 0
    deadline: Seconds = Field(default=2.0, gt=0)
    reserve: Percent = Fraction(1, 20)


def test_fields_of_a_model_take_units() -> None:
    section = _Section.model_validate({"capacity": "1KiB", "deadline": "200ms", "reserve": "10%"})
    assert (section.capacity, section.deadline, section.reserve) == (1024, 0.2, Fraction(1, 10))
    assert _Section.model_validate(section.model_dump()) == section


@pytest.mark.parametrize(
    ("field", "bad", "said"),
    [("capacity", "8 G", "unknown unit 'G'"), ("deadline", "0s", "greater than 0"), ("reserve", "5", "not understood")],
)
def test_fields_of_a_model_name_the_place_and_the_remedy(field: str, bad: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said) as caught:
        _Section.model_validate({field: bad})
    assert caught.value.errors()[0]["loc"] == (field,)


@pytest.mark.parametrize(
    ("field", "number", "legal", "illegal"),
    [
        ("capacity", "integer", ["8GiB", "64 MB", "4096", "1.5kib", "7B"], ["8G", "8 Gbit", "-1", "GiB"]),
        ("deadline", "number", ["200ms", "6h", "2", "1.5 s"], ["2M", "-1s", "2 hours"]),
        ("reserve", "number", ["5%", "0.05", "0", "12.5 %"], ["5", "1", "-1%"]),
    ],
)
def test_the_json_schema_takes_numbers_and_text(field: str, number: str, legal: list[str], illegal: list[str]) -> None:
    schema: dict[str, Any] = _Section.model_json_schema()["properties"][field]
    assert [option["type"] for option in schema["anyOf"]] == [number, "string"]
    pattern = schema["anyOf"][1]["pattern"]
    assert all(re.search(pattern, text) for text in legal)
    assert not any(re.search(pattern, text) for text in illegal)
