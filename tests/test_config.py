"""The configuration: what it reads, what it refuses and in which words, and what it never prints."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal

import jsonschema
import pytest
import yaml
from pydantic import Field, ValidationError

from tiering.api import BackendConfig
from tiering.config import (
    MetricsConfig,
    PrimaryConfig,
    RestoreConfig,
    TieringConfig,
    json_schema,
    shipped_config,
    shipped_config_names,
)
from tiering.errors import ConfigError

MINIMAL = "primary: {capacity: 1GiB}\n"
NVME = "type: nvme, path: kv, capacity: 4GiB"


class SomeTier(BackendConfig):
    backend: ClassVar[str] = "nowhere:Nothing"
    type: Literal["some"] = "some"
    path: Path = Field(default=Path("kv"))


def read(tmp_path: Path, text: str) -> TieringConfig:
    path = tmp_path / "kv.yaml"
    path.write_text(text)
    return TieringConfig.from_yaml(path)


def refusal(tmp_path: Path, text: str) -> str:
    """The message of the ``ConfigError`` that ``text`` must cause, without the directory."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value).replace(f"{tmp_path}/", "")


# --- what it reads


def test_defaults_are_the_documented_ones(tmp_path: Path) -> None:
    config = read(tmp_path, MINIMAL)
    assert config.primary.capacity_bytes == 1 << 30
    assert config.primary.policy == "prefix"
    assert config.primary.store_reserve == Fraction(1, 20)
    assert config.primary.load_bytes_per_request_max == 256 * 1024 * 1024
    assert config.restore == RestoreConfig(enabled=True, bytes_per_step_max=64 * 1024 * 1024)
    assert config.metrics == MetricsConfig(prometheus_port=None, host="127.0.0.1")
    assert config.tiers == ()
    assert config.epoch == "0"
    assert config.flush_on_close_s == 5.0


def test_every_key_is_read(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        """
primary: {capacity: 1.5GiB, policy: arc, store_reserve: 10%, load_bytes_per_request: 1MiB}
restore: {enabled: off, bytes_per_step_max: 8MiB}
tiers:
  - {type: memory, name: near, capacity: 2MiB, demote_when: {after_hits: 2}, deadline: 200ms, policy: lru, ops_max: 9}
  - {type: nvme, path: kv, capacity: 4GB, demote_when: on_evict, queue_bytes: 1MiB, batch_blocks_max: 3}
metrics: {prometheus_port: 9400, host: 0.0.0.0}
epoch: 31
flush_on_close: 1m
""",
    )
    assert config.primary == PrimaryConfig(
        capacity_bytes=3 << 29, policy="arc", store_reserve=Fraction(1, 10), load_bytes_per_request_max=1 << 20
    )
    assert config.restore == RestoreConfig(enabled=False, bytes_per_step_max=8 << 20)
    assert config.metrics == MetricsConfig(prometheus_port=9400, host="0.0.0.0")
    assert (config.epoch, config.flush_on_close_s) == ("31", 60.0)
    near, far = config.tiers
    assert config.tier_names == ("near", "nvme")
    assert (near.type, near.capacity_bytes, near.deadline_s, near.policy, near.ops_max) == (
        "memory", 2 << 20, 0.2, "lru", 9
    )  # fmt: skip
    assert near.demote_when.after_hits == 2  # type: ignore[union-attr]
    assert (far.capacity_bytes, far.demote_when, far.queue_bytes_max, far.batch_blocks_max) == (
        4 * 10**9, "on_evict", 1 << 20, 3
    )  # fmt: skip


def test_a_mapping_and_python_objects_give_the_same(tmp_path: Path) -> None:
    tier = SomeTier(path=Path("kv"))
    from_mapping = TieringConfig.from_dict({"primary": {"capacity": "1GiB"}, "tiers": [tier], "epoch": "7"})
    from_python = TieringConfig(primary=PrimaryConfig(capacity_bytes=1 << 30), tiers=(tier,), epoch="7")
    assert from_mapping == from_python
    assert from_mapping.tiers[0] is tier
    assert pickle.loads(pickle.dumps(from_mapping)) == from_python


def test_it_is_frozen(tmp_path: Path) -> None:
    config = read(tmp_path, MINIMAL)
    with pytest.raises(ValidationError, match="frozen"):
        config.primary.policy = "lru"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("written", "slots", "reserved"),
    [
        ("5%", 100, 5),
        ("5%", 19, 0),
        ("29%", 100, 29),
        ("0.7%", 1000, 7),
        ("0", 100, 0),
        ("0%", 100, 0),
        ("99.9%", 10, 9),
    ],
)
def test_the_store_reserve_is_rounded_down_exactly(tmp_path: Path, written: str, slots: int, reserved: int) -> None:
    config = read(tmp_path, f"primary: {{capacity: 1GiB, store_reserve: {written}}}")
    assert config.primary.reserve_slots(slots) == reserved


@pytest.mark.parametrize(
    ("written", "epoch"),
    [
        ("on", "on"), ("no", "no"), ("1_000", "1_000"), ("12:30", "12:30"), ("010", "010"), ("0x1F", "0x1F"),
        ("2026-01-31", "2026-01-31"), ("12e45", "12e45"), ("17", "17"), ("-3", "-3"), ("6h", "6h"), ("'true'", "true"),
        ("!!str 5", "5"), ("<<", "<<"), ("=", "="),
        ("9" * 19, "9" * 19), ("9" * 200, "9" * 200),
    ],
)  # fmt: skip
def test_plain_text_stays_what_was_written(tmp_path: Path, written: str, epoch: str) -> None:
    assert read(tmp_path, f"{MINIMAL}epoch: {written}\n").epoch == epoch


@pytest.mark.parametrize("word", ["off", "no", "false", "False"])
def test_a_switch_takes_the_usual_words(tmp_path: Path, word: str) -> None:
    assert read(tmp_path, f"{MINIMAL}restore: {{enabled: {word}}}").restore.enabled is False


def test_anchors_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    text = "\ufeffprimary: {capacity: &size 1GiB, load_bytes_per_request: *size}\n"
    assert read(tmp_path, text).primary.load_bytes_per_request_max == 1 << 30


def test_home_is_expanded_and_other_paths_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = read(tmp_path, f"{MINIMAL}tiers: [{{type: nvme, path: ~/kv, capacity: 1GiB}}]")
    assert config.tiers[0].path == tmp_path / "kv"  # type: ignore[attr-defined]
    home = TieringConfig(primary=PrimaryConfig(capacity_bytes=1), tiers=(SomeTier(path=Path("~")),))
    assert home.tiers[0].path == tmp_path  # type: ignore[attr-defined]
    relative = TieringConfig(primary=PrimaryConfig(capacity_bytes=1), tiers=(SomeTier(path=Path("./a/~b")),))
    assert relative.tiers[0].path == Path("a/~b")  # type: ignore[attr-defined]


# --- what it refuses


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("primary: {capacity: 1GiB}\ntiers:\n  - type: nvme\n    path: kv\n    capactiy: 4GiB\n",
         ["kv.yaml:5: tiers[0].capactiy: unknown key", 'did you mean "capacity"?']),
        ("primary: {capacity: 1GiB, polcy: lru}", ["kv.yaml:1: primary.polcy", '"policy"', "legal here: capacity, policy"]),
        ("primary: {capacity: 1GiB}\nmetric: {}", ["kv.yaml:2: metric: unknown key", '"metrics"']),
        ("primary: {capacity_bytes: 1GiB}", ["primary.capacity_bytes: unknown key", '"capacity"']),
        ("primary: {policy: lru}", ["kv.yaml:1: primary.capacity: missing", "8GiB"]),
        ("primary: {capacity: 1XB}", ["primary.capacity", "'1XB'", "GiB"]),
        ("primary: {capacity: -1}", ["primary.capacity", "-1", "GiB"]),
        ("primary: {capacity: 0}", ["primary.capacity: got 0", "greater than 0"]),
        ("primary: {capacity: 1GiB, store_reserve: 5}", ["primary.store_reserve", "5%"]),
        ("primary: {capacity: 1GiB, store_reserve: 100%}", ["primary.store_reserve: got '100%'", "less than 1"]),
        ("primary: {capacity: 1GiB, policy: lruu}", ["primary.policy", '"lru"', "arc", "prefix"]),
        ("primary: 8GiB", ["kv.yaml:1: primary: got '8GiB'", "a mapping with capacity"]),
        (f"{MINIMAL}metrics:", ["kv.yaml:2: metrics: got nothing", "prometheus_port"]),
        (f"{MINIMAL}metrics: {{prometheus_port: abc}}", ["metrics.prometheus_port: got 'abc'", "valid integer"]),
        (f"{MINIMAL}metrics: {{prometheus_port: 65536}}", ["metrics.prometheus_port: got 65536", "65535"]),
        (f"{MINIMAL}epoch: true", ["epoch: got True", "quotes"]),
        (f"{MINIMAL}epoch: 1.10", ["epoch: got 1.1", "quotes"]),
        (f"{MINIMAL}epoch: ''", ["epoch", "at least 1"]),
        (f"{MINIMAL}flush_on_close: 1:30", ["kv.yaml:2: flush_on_close", "'1:30'", "200ms"]),
        (f"{MINIMAL}restore: {{enabled: perhaps}}", ["restore.enabled: got 'perhaps'"]),
        (f"{MINIMAL}tiers:", ["kv.yaml:2: tiers: got nothing", "[]"]),
        (f"{MINIMAL}tiers: {{type: nvme}}", ["kv.yaml:2: tiers: got a mapping", "a list"]),
        (f"{MINIMAL}tiers: [nvme]", ["tiers[0]: got 'nvme'", "`type`", "memory, nvme"]),
        (f"{MINIMAL}tiers:\n  - {{path: x}}", ["kv.yaml:3: tiers[0].type: missing", "memory, nvme, redis"]),
        (f"{MINIMAL}tiers: [{{type: 5}}]", ["tiers[0].type: got 5"]),
        (f"{MINIMAL}tiers: [{{type: nvm}}]", ["tiers[0].type: unknown backend type", '"nvme"', "known: fsspec, memory, nvme, redis"]),
        (f"{MINIMAL}tiers: [{{{NVME}}}, {{{NVME}}}]", ["tiers[1]", "tiers[0]", "`name`"]),
        (f"{MINIMAL}tiers: [{{{NVME}, name: primary}}]", ["tiers[0].name", "'primary'"]),
        (f"{MINIMAL}tiers: [{{{NVME}, name: a b}}]", ["tiers[0].name", "'a b'", "letters"]),
        (f"{MINIMAL}tiers: [{{{NVME}, policy: lri}}]", ["tiers[0].policy", '"lri"', '"lru"']),
        (f"{MINIMAL}tiers: [{{{NVME}, demote_when: now}}]", ["tiers[0].demote_when: got 'now'", "'on_store'", "after_hits"]),
        (f"{MINIMAL}tiers: [{{{NVME}, demote_when: {{after_hit: 2}}}}]", ["tiers[0].demote_when.after_hit: unknown", '"after_hits"']),
        (f"{MINIMAL}tiers: [{{{NVME}, demote_when: {{after_hits: 0}}}}]", ["tiers[0].demote_when.after_hits: got 0"]),
        (f"{MINIMAL}tiers: [{{type: nvme, path: 3, capacity: 1GiB}}]", ["tiers[0].path: got 3", "quotes"]),
        (f"{MINIMAL}tiers: [{', '.join(f'{{{NVME}, name: t{n}}}' for n in range(17))}]", ["tiers", "16"]),
    ],
)  # fmt: skip
def test_configuration_ignored_kind_a_wrong_key_or_value_names_its_place_and_remedy(
    tmp_path: Path, text: str, parts: list[str]
) -> None:
    """Row 36: nothing is dropped silently; the message tells file, line, key path, what was got and what is legal."""
    message = refusal(tmp_path, text)
    assert message.startswith("kv.yaml")
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_all_problems_are_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Row 36."""
    message = refusal(
        tmp_path,
        "tiers:\n  - {type: nvm}\n  - {type: nvme, path: kv, capacity: 1XB}\nmetrics: {port: 1}\nprimary: {capacity: x}\n",
    )
    assert [line.split(": ")[1] for line in message.splitlines()] == [
        "tiers[0].type", "tiers[1].capacity", "metrics.port", "primary.capacity"
    ]  # fmt: skip
    assert [line.split(":")[1] for line in message.splitlines()] == ["2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("primary: {capacity: 1GiB}\nepoch: a\nepoch: b\n", ["kv.yaml:3: epoch: given twice", "line 2"]),
        ("primary:\n  capacity: 1GiB\n  capacity: 1GiB\n", ["kv.yaml:3: primary.capacity: given twice"]),
        ("primary: [\n", ["kv.yaml:2: not valid YAML"]),
        ("a: b: c", ["kv.yaml:1: not valid YAML"]),
        ("\tprimary: 1", ["kv.yaml:1: not valid YAML"]),
        ("a: {b: ${X}}", ["kv.yaml:1: not valid YAML", '"${NAME}"']),
        ("a: 1\n---\nb: 2\n", ["kv.yaml:2: not valid YAML"]),
        ("a: \x00", ["kv.yaml: not valid YAML"]),
        ("", ["kv.yaml: the file is empty", "capacity"]),
        ("# only a comment\n", ["kv.yaml: the file is empty"]),
        ("- primary\n", ["kv.yaml: holds a list", "mapping"]),
        ("primary\n", ["kv.yaml: holds 'primary'", "mapping"]),
        ("? [a, b]\n: c\n", ["kv.yaml:1: a key must be plain text"]),
        ("a: !!python/object/apply:os.getcwd []", ["kv.yaml:1: a: the tag", "plain YAML"]),
        ("a: !!int x", ["kv.yaml:1: a: the tag"]),
        ("a: !!null [1]", ["kv.yaml:1: a: the tag"]),
        ("a: &a [*a]", ["kv.yaml:1: a", "32 deep"]),
        ("a: " + "[" * 1500 + "]" * 1500, ["kv.yaml: values are nested", "32 deep"]),
        ("".join(f"k{n}: &k{n} [{','.join([f'*k{n - 1}' if n else '1'] * 10)}]\n" for n in range(9)), ["10000 values"]),
        ("#" * (1 << 20) + "\n", ["kv.yaml: larger than 1048576 bytes"]),
    ],
)
def test_a_file_that_is_no_configuration_says_where_and_why(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = refusal(tmp_path, text)
    assert message.startswith("kv.yaml")
    for part in parts:
        assert part in message


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: no such file \(looked from "):
        TieringConfig.from_yaml(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        TieringConfig.from_yaml(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"# ok\nepoch: \xff\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml:2: not UTF-8"):
        TieringConfig.from_yaml(tmp_path / "latin.yaml")
    with pytest.raises(ConfigError, match=r"~no-such-user-here.*cannot be read"):
        TieringConfig.from_yaml("~no-such-user-here/kv.yaml")


def test_a_mapping_is_checked_as_a_file_is() -> None:
    with pytest.raises(ConfigError, match=r'^mine: primary\.capactiy: unknown key; did you mean "capacity"\?'):
        TieringConfig.from_dict({"primary": {"capactiy": 1}}, where="mine")
    with pytest.raises(ConfigError, match="primary: the key 1 is not text"):
        TieringConfig.from_dict({"primary": {1: 2}})
    with pytest.raises(ConfigError, match="configuration: got nothing"):
        TieringConfig.from_dict(None)  # type: ignore[arg-type]
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(ConfigError, match="32 deep"):
        TieringConfig.from_dict({"tiers": circle})


# --- the environment, and what is never printed

SECRET = "hunter2-\\'quoted\""


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KV_SECRET", SECRET)
    monkeypatch.setenv("KV_EMPTY", "")
    monkeypatch.delenv("KV_UNSET", raising=False)
    return SECRET


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("${KV_SECRET}", SECRET),
        ("'x-${KV_SECRET}-${KV_SECRET}'", f"x-{SECRET}-{SECRET}"),
        ("${KV_UNSET:-deflt}", "deflt"),
        ("${KV_EMPTY:-deflt}", "deflt"),
        ("${KV_SECRET:-deflt}", SECRET),
        ("a${KV_EMPTY}b", "ab"),
        ("$KV_SECRET", "$KV_SECRET"),
    ],
)
@pytest.mark.usefixtures("secret")
def test_variables_are_replaced_in_text(tmp_path: Path, written: str, value: str) -> None:
    assert read(tmp_path, f"{MINIMAL}epoch: {written}").epoch == value


def test_variables_may_hold_sizes_and_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_PORT", "9400")
    monkeypatch.setenv("KV_SIZE", "2GiB")
    config = read(tmp_path, "primary:\n  capacity: ${KV_SIZE}\nmetrics:\n  prometheus_port: ${KV_PORT}\n")
    assert (config.primary.capacity_bytes, config.metrics.prometheus_port) == (2 << 30, 9400)


@pytest.mark.usefixtures("secret")
def test_a_missing_variable_names_itself_and_its_key(tmp_path: Path) -> None:
    message = refusal(tmp_path, f"{MINIMAL}tiers:\n  - type: nvme\n    path: ${{KV_UNSET}}\n")
    assert message.startswith("kv.yaml:4: tiers[0].path: the environment variable KV_UNSET is not set")
    assert "${KV_UNSET:-...}" in message
    assert "${NAME}" in refusal(tmp_path, "epoch: ${not a name}")


@pytest.mark.parametrize(
    "text",
    [
        "primary:\n  capacity: ${KV_SECRET}\n",
        "primary:\n  capacity: 1GiB\n  policy: ${KV_SECRET}\n",
        f"{MINIMAL}metrics:\n  prometheus_port: ${{KV_SECRET}}\n",
        f"{MINIMAL}restore:\n  enabled: x${{KV_SECRET}}\n",
        f"{MINIMAL}tiers:\n  - type: ${{KV_SECRET}}\n",
        f"{MINIMAL}tiers:\n  - ${{KV_SECRET}}\n",
        f"{MINIMAL}tiers:\n  - type: nvme\n    path: kv\n    capacity: 1GiB\n    name: ${{KV_SECRET}}\n",
        f"{MINIMAL}tiers:\n  - type: nvme\n    path: kv\n    capacity: 1GiB\n    demote_when: ${{KV_SECRET}}\n",
        f"{MINIMAL}tiers:\n  - type: nvme\n    path: kv\n    capacity: 1GiB\n    policy: ${{KV_SECRET}}\n",
        f"{MINIMAL}epoch: ${{KV_SECRET}}\nmetrics: 1\n",
        f"{MINIMAL}tiers: ${{KV_SECRET}}\n",
    ],
)
def test_an_error_shows_the_variable_and_never_its_value(tmp_path: Path, secret: str, text: str) -> None:
    message = refusal(tmp_path, text)
    assert "hunter2" not in message
    assert secret not in message
    assert "${KV_SECRET}" in message or "metrics" in message


def test_repr_shows_the_variable_and_never_its_value(tmp_path: Path, secret: str) -> None:
    config = read(
        tmp_path,
        f"{MINIMAL}epoch: a-${{KV_SECRET}}\ntiers:\n  - type: nvme\n    path: kv/${{KV_SECRET}}\n    capacity: 1GiB\n",
    )
    assert config.epoch == f"a-{secret}"
    for shown in (repr(config), str(config)):
        assert "hunter2" not in shown
        assert "a-${KV_SECRET}" in shown
        assert "kv/${KV_SECRET}" in shown
        assert "1073741824" in shown


# --- editors


def validator() -> jsonschema.Draft202012Validator:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_json_schema_accepts_what_is_legal() -> None:
    check = validator()
    for name in shipped_config_names():
        check.validate(yaml.safe_load(shipped_config(name)))
    check.validate(
        {
            "primary": {"capacity": "${SIZE}", "store_reserve": "5%"},
            "metrics": {"prometheus_port": "${PORT:-9400}"},
            "restore": {"enabled": "${ON}"},
            "tiers": [{"type": "memory", "capacity": 5, "demote_when": {"after_hits": 2}, "deadline": "200ms"}],
        }
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"primary": {}},
        {"primary": {"capacity_bytes": 1}},
        {"primary": {"capacity": "1XB"}},
        {"primary": {"capacity": 1}, "tiers": [{"path": "x"}]},
        {"primary": {"capacity": 1}, "tiers": [{"type": "nvm", "path": "x", "capacity": 1}]},
        {"primary": {"capacity": 1}, "tiers": [{"type": "memory", "capactiy": 1}]},
        {"primary": {"capacity": 1}, "metrics": {"prometheus_port": "abc"}},
    ],
)
def test_the_json_schema_refuses_what_is_not(wrong: dict[str, Any]) -> None:
    assert not validator().is_valid(wrong)


# --- the shipped files


def test_the_shipped_configurations_are_legal_and_named() -> None:
    assert {"local", "cpu-only", "two-disks"} <= set(shipped_config_names())
    for name in shipped_config_names():
        TieringConfig.from_dict(yaml.safe_load(shipped_config(name)))
    assert shipped_config("local.yaml") == shipped_config("local")
    local = TieringConfig.from_dict(yaml.safe_load(shipped_config("local")))
    assert [tier.type for tier in local.tiers] == ["nvme"]
    assert TieringConfig.from_dict(yaml.safe_load(shipped_config("cpu-only"))).tiers == ()


def test_an_unknown_shipped_configuration_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r'unknown configuration "locla"; did you mean "local"\?'):
        shipped_config("locla")
    with pytest.raises(ConfigError, match="unknown configuration"):
        shipped_config("../pyproject")


def test_reading_a_configuration_imports_no_client_library(root: Path) -> None:
    heavy = ["torch", "redis", "fsspec", "prometheus_client", "transformers", "matplotlib"]
    code = (
        "import sys; from tiering.config import TieringConfig; before = set(sys.modules);"
        f"TieringConfig.from_yaml({str(root / 'configs/local.yaml')!r});"
        f"print([m for m in {heavy} if m in set(sys.modules) - before])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]"
