"""What an operator may write, and that no message repeats a secret."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from backends.redis.config import RedisConfig
from backends.redis.url import Address, Credentials, Server, UrlError, parse_url
from tiering.config import TieringConfig
from tiering.errors import ConfigError

SECRET = "hunter2-is-secret"
GOOD = {"type": "redis", "url": "redis://localhost:6379/0"}


def made(**fields: Any) -> RedisConfig:
    return RedisConfig.model_validate(GOOD | fields)


@pytest.mark.parametrize(
    ("url", "addresses", "db", "user", "password", "tls"),
    [
        ("redis://", [("localhost", 6379)], 0, None, None, False),
        ("redis://cache", [("cache", 6379)], 0, None, None, False),
        ("redis://cache:7000/3", [("cache", 7000)], 3, None, None, False),
        ("redis://cache?db=4", [("cache", 6379)], 4, None, None, False),
        ("rediss://10.0.0.1:6380", [("10.0.0.1", 6380)], 0, None, None, True),
        ("redis://[::1]:7000/1", [("::1", 7000)], 1, None, None, False),
        ("redis://:pw@cache", [("cache", 6379)], 0, None, "pw", False),
        ("redis://user:pw@cache", [("cache", 6379)], 0, "user", "pw", False),
        ("redis://us%40er:p%3A%2Fw%25@cache", [("cache", 6379)], 0, "us@er", "p:/w%", False),
        ("redis://user:p@w@cache", [("cache", 6379)], 0, "user", "p@w", False),
        ("redis://a:1,b:2,[::2]:3", [("a", 1), ("b", 2), ("::2", 3)], 0, None, None, False),
        ("unix:///run/redis/a.sock?db=2", [("/run/redis/a.sock", 0)], 2, None, None, False),
        ("unix://user:pw@/run/a%20b.sock", [("/run/a b.sock", 0)], 0, "user", "pw", False),
    ],
)
def test_urls(
    url: str, addresses: list[tuple[str, int]], db: int, user: str | None, password: str | None, tls: bool
) -> None:
    expected = Server(tuple(Address(*address) for address in addresses), db, Credentials(user, password), tls)
    assert parse_url(url) == expected


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("localhost:6379", "does not begin with redis://, rediss:// or unix://"),
        (f"http://:{SECRET}@cache", "does not begin with"),
        (f"redis://:{SECRET}/x@cache", "host and port are not understood; .*percent-encode"),
        (f"redis://:{SECRET}#x@cache", "'#' or a space"),
        (f"redis://:{SECRET}@cache:0", "host and port"),
        (f"redis://:{SECRET}@cache:65536", "host and port"),
        (f"redis://:{SECRET}@cache:port", "host and port"),
        (f"redis://:{SECRET}@cache,", "host and port"),
        (f"redis://:{SECRET}@cache/zero", "database is not one whole number"),
        (f"redis://:{SECRET}@cache/1?db=2", "database is not one whole number"),
        (f"redis://cache?password={SECRET}", "1 unknown options .*fields of the tier"),
        (f"unix://:{SECRET}@host/run/redis.sock", "absolute path"),
        ("unix://", "absolute path"),
    ],
)
def test_wrong_urls_are_refused_without_repeating_them(url: str, words: str) -> None:
    """row 36"""
    with pytest.raises(ValidationError, match=words) as caught:
        made(url=url)
    assert SECRET not in str(caught.value)


def test_addresses_are_printed_as_they_are_written() -> None:
    assert [str(Address(*pair)) for pair in (("cache", 7), ("::1", 7), ("/run/a.sock", 0))] == [
        "cache:7", "[::1]:7", "/run/a.sock",
    ]  # fmt: skip


@given(st.text(max_size=60))
def test_any_text_is_a_url_or_a_clean_error(text: str) -> None:
    for url in (text, "redis://" + text, "unix:///" + text):
        with contextlib.suppress(UrlError):
            parse_url(url)


def test_a_user_and_password_may_stand_beside_the_url() -> None:
    server = made(username="user", password="p:/w%").server
    assert server.credentials == Credentials("user", "p:/w%")
    assert made(password=12345).server.credentials == Credentials(None, "12345")


def test_units_and_defaults() -> None:
    config = made(ttl="6h", timeout="250ms")
    assert (config.ttl_s, config.timeout_s) == (21600.0, 0.25)
    config = made()
    assert (config.ttl_s, config.timeout_s, config.connections_max, config.mode, config.prefix) == (
        None, 5.0, 4, "standalone", "kvtiering",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ulr": "redis://b"}, "Extra inputs are not permitted"),
        ({"url": "redis://a,b"}, "several servers; set `mode: sentinel` or `mode: cluster`"),
        ({"mode": "ring"}, "'standalone', 'sentinel' or 'cluster'"),
        ({"mode": "sentinel"}, "sentinel_service: it goes with `mode: sentinel`"),
        ({"sentinel_service": "x"}, "sentinel_service: it goes with `mode: sentinel`"),
        ({"sentinel_password": SECRET}, "sentinel_password: it goes with `mode: sentinel`"),
        ({"mode": "sentinel", "sentinel_service": "x", "sentinel_username": "u"}, "`sentinel_password:` too"),
        ({"mode": "cluster", "url": "unix:///run/a.sock"}, "reached by host and port"),
        ({"username": "user"}, "username: there is no password"),
        ({"url": "redis://user@cache"}, "username: there is no password"),
        ({"url": f"redis://:{SECRET}@cache", "password": SECRET}, "give each once"),
        ({"tls_ca_file": "ca.pem"}, "write rediss://"),
        ({"url": "rediss://cache", "tls_key_file": "key.pem"}, "set `tls_cert_file:` too"),
        ({"ttl": "10ms"}, "ttl"),
        ({"ttl": "20000d"}, "ttl"),
        ({"prefix": "a b"}, "prefix"),
        ({"prefix": "{tag}"}, "prefix"),
        ({"connections_max": 0}, "connections_max"),
        ({"connections_max": 65}, "connections_max"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_configuration_ignored_never(fields: dict[str, object], words: str) -> None:
    """row 36"""
    with pytest.raises(ValidationError, match=words) as caught:
        RedisConfig.model_validate(GOOD | fields)
    assert SECRET not in str(caught.value)


def test_secrets_are_not_printed() -> None:
    config = made(
        url=f"redis://:{SECRET}1@s", mode="sentinel", sentinel_service="x", sentinel_password=f"{SECRET}2"
    )  # fmt: skip
    beside = made(password=f"{SECRET}3")
    for text in (repr(config), str(config), config.model_dump_json(), repr(config.server), repr(beside), str(beside)):
        assert SECRET not in text


def test_the_manager_reads_it_from_yaml_with_the_password_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIERING_TEST_PASSWORD", SECRET)
    path = tmp_path / "tiers.yaml"
    path.write_text(
        "primary: {capacity: 1GiB}\n"
        "tiers:\n"
        "  - {type: redis, url: 'redis://cache:6379/0', password: '${KVTIERING_TEST_PASSWORD}', ttl: 6h}\n"
    )
    (tier,) = TieringConfig.from_yaml(path).tiers
    assert isinstance(tier, RedisConfig)
    assert tier.server.credentials.password == SECRET
    path.write_text(
        "primary: {capacity: 1GiB}\ntiers:\n  - {type: redis, url: 'redis://:${KVTIERING_TEST_PASSWORD}@cache/x'}\n"
    )
    with pytest.raises(ConfigError, match=r"tiers\.yaml:3: tiers") as caught:
        TieringConfig.from_yaml(path)
    assert SECRET not in str(caught.value)
