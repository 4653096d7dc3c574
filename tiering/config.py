"""The configuration: frozen models, read from YAML or a mapping, with errors that name the place and the remedy.

In YAML a key has its short name (``capacity``), in Python the name with its unit (``capacity_bytes``). Sizes, times and
shares take units (``8GiB``, ``200ms``, ``5%``); text may hold ``${NAME}`` or ``${NAME:-default}`` from the environment.
``docs/configuration.md`` explains every key.
"""

from __future__ import annotations

import importlib.resources
import os
import re
from collections.abc import Mapping
from fractions import Fraction
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.json_schema import models_json_schema

from tiering import registry
from tiering.api import BackendConfig
from tiering.config_problems import Problem, problems_of
from tiering.document import Document, KeyPath, document_of, read_document
from tiering.errors import ConfigError
from tiering.support.units import ByteCount, Percent, Seconds

TIERS_MAX: Final = 16
_TIER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PRIMARY: Final = "primary"
Model = TypeVar("Model", bound=BaseModel)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, use_attribute_docstrings=True)


class PrimaryConfig(_Section):
    """The primary tier: CPU memory in slots, the only tier that exchanges bytes with the engine."""

    capacity_bytes: ByteCount = Field(alias="capacity", gt=0)
    """Size of the arena. Rounded down to whole slots."""
    policy: str = "prefix"
    """Which idle block goes first: an eviction policy's name."""
    store_when: Literal["computed", "finished", "gpu_evicted", "adaptive"] = "adaptive"
    """When an engine's connector stores a block: as soon as it is computed, when its request finishes or is preempted, when
    the engine is about to drop it, or (``adaptive``) as ``computed`` while slots are free and as ``finished`` once all are taken."""
    store_reserve: Percent = Field(default=Fraction(1, 20), lt=1)
    """Share of the slots that loads leave to stores, rounded down to whole slots."""
    load_bytes_per_request_max: ByteCount = Field(default=256 << 20, alias="load_bytes_per_request", gt=0)
    """Most bytes that are being promoted for one request at a time."""

    def reserve_slots(self, slots: int) -> int:
        """How many of ``slots`` loads leave to stores: the share, exactly, rounded down."""
        return int(self.store_reserve * slots)

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, name: str) -> str:
        return _check_policy(name)


class RestoreConfig(_Section):
    """Re-store: copying back a block that the primary tier evicted while the engine still holds it."""

    enabled: bool = True
    """Whether blocks are re-stored at all."""
    bytes_per_step_max: ByteCount = 64 << 20
    """Most bytes re-stored in one step of the engine."""


class MetricsConfig(_Section):
    """Where the numbers of ``stats()`` are served for Prometheus."""

    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """TCP port of the metrics page; 0 takes any free one, absent serves none."""
    host: str = "127.0.0.1"
    """Address to listen on. The default is reachable from this machine alone."""


class EventsConfig(_Section):
    """KV events: which block came to, or went from, which tier; for routers that send a prompt to where its blocks are."""

    enabled: bool = False
    """Whether events are recorded, for ``manager.events()``. A ``zmq_endpoint`` turns them on by itself."""
    zmq_endpoint: str | None = None
    """ZeroMQ address of a PUB socket: bound if it has a ``*`` or is no ``tcp`` one, else connected to. Needs the ``events`` extra."""
    zmq_replay_endpoint: str | None = None
    """ZeroMQ address of a ROUTER socket that sends missed batches again: bound."""
    topic: str = ""
    """First part of each message."""
    batches_max: Annotated[int, Field(gt=0, le=1_000_000)] = 10_000
    """Newest batches kept for followers and replay. Who is further behind sees a jump in the sequence."""

    @property
    def recorded(self) -> bool:
        """Whether anybody wants them."""
        return self.enabled or self.zmq_endpoint is not None


def _as_text(value: object) -> object:
    # An epoch is often a step count, and YAML reads it as a number. Only whole numbers come back as they were written.
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class TieringConfig(_Section):
    """Everything an operator sets. Frozen. ``from_yaml`` and ``from_dict`` raise ``ConfigError``, the constructor
    pydantic's ``ValidationError``."""

    primary: PrimaryConfig
    """The primary tier."""
    restore: RestoreConfig = RestoreConfig()
    """Re-store of blocks that the engine still holds."""
    tiers: tuple[InstanceOf[BackendConfig], ...] = Field(default=(), max_length=TIERS_MAX)
    """The secondary tiers, near to far. May be empty."""
    metrics: MetricsConfig = MetricsConfig()
    """Metrics for Prometheus."""
    events: EventsConfig = EventsConfig()
    """KV events for routers."""
    epoch: Annotated[str, BeforeValidator(_as_text), Field(min_length=1, max_length=256)] = "0"
    """Which weights are in use: blocks of another epoch are never served."""
    flush_on_close_s: Seconds = Field(default=5.0, alias="flush_on_close")
    """How long a close may take to demote what is still owed to the tiers; 0 does not try."""

    _hidden: dict[KeyPath, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> TieringConfig:
        """The configuration in the YAML file at ``path``. Raises ``ConfigError`` that lists everything wrong with it."""
        return _build(read_document(path))

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], *, where: str = "configuration") -> TieringConfig:
        """The same from a mapping with YAML's keys; a tier may also be a ``BackendConfig``. ``where`` opens each error."""
        return _build(document_of(mapping, where=where))

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Each tier's name in metrics and reports, near to far."""
        return tuple(tier.name or tier.type for tier in self.tiers)

    @field_validator("tiers", mode="after")
    @classmethod
    def _expand_home(cls, tiers: tuple[BackendConfig, ...]) -> tuple[BackendConfig, ...]:
        return tuple(_with_home(tier) for tier in tiers)

    @model_validator(mode="after")
    def _check_tiers(self) -> TieringConfig:
        first: dict[str, int] = {}
        for index, (tier, name) in enumerate(zip(self.tiers, self.tier_names, strict=True)):
            if not _TIER_NAME.fullmatch(name) or name == _PRIMARY:
                legal = f'up to 64 letters, digits, "_", "." and "-", and not "{_PRIMARY}"'
                raise ValueError(f"tiers[{index}].name: got {name!r}; legal: {legal}")
            if name in first:
                raise ValueError(
                    f'tiers[{index}] is called "{name}" like tiers[{first[name]}]; set a `name` of its own for one of them'
                )
            first[name] = index
            if tier.policy is not None:
                try:
                    _check_policy(tier.policy)
                except ValueError as error:
                    raise ValueError(f"tiers[{index}].policy: {error}") from None
        return self

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        # The effective values, except those that came from the environment: they may be secrets.
        return list(_shown(self, (), self._hidden).items())


def json_schema() -> dict[str, Any]:
    """A JSON Schema of the YAML file for editors, with every installed backend's keys. Imports the backends' configs."""
    types: dict[type[BackendConfig], list[str]] = {}
    for name in registry.known_backends():
        types.setdefault(registry.backend_config(name), []).append(name)
    models: list[type[BaseModel]] = [TieringConfig, *types]
    refs, schema = models_json_schema([(model, "validation") for model in models], by_alias=True)
    definitions = schema["$defs"]
    for definition in definitions.values():
        for key, value in definition.get("properties", {}).items():
            definition["properties"][key] = _or_variable(value)
    branches = []
    for config, names in types.items():
        ref = refs[config, "validation"]
        branches.append(ref)
        definition = definitions[ref["$ref"].rsplit("/", 1)[1]]
        definition["properties"]["type"] = {"enum": names, "description": "The kind of tier."}
        definition["required"] = sorted({*definition.get("required", ()), "type"})
    root = refs[TieringConfig, "validation"]
    top = definitions[root["$ref"].rsplit("/", 1)[1]]
    top["properties"]["tiers"]["items"] = {"oneOf": branches}
    definitions.pop(BackendConfig.__name__, None)  # the base of every tier, and no tier itself
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kvtiering",
        **root,
        "$defs": definitions,
    }


def shipped_config_names() -> tuple[str, ...]:
    """The names of the configurations that come with the package, sorted."""
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in _shipped() if entry.name.endswith(".yaml")))


def shipped_config(name: str) -> str:
    """The YAML text of the shipped configuration ``name`` (``local`` or ``local.yaml``).

    Raises ``ConfigError`` with the names there are.
    """
    wanted = name.removesuffix(".yaml")
    for entry in _shipped():
        if entry.name == f"{wanted}.yaml":
            return entry.read_text(encoding="utf-8")
    raise ConfigError(registry.unknown("configuration", wanted, shipped_config_names()))


def _shipped() -> list[Traversable]:
    package = importlib.resources.files("tiering")
    installed = package / "_configs"
    # An editable install has no copy: the checkout's own directory lies beside the package.
    directory = installed if installed.is_dir() else Path(str(package)).parent / "configs"
    return list(directory.iterdir())


def _build(document: Document) -> TieringConfig:
    problems: list[Problem] = []
    rest = dict(document.data)
    written = rest.pop("tiers", [])
    tiers: list[BackendConfig] = []
    if isinstance(written, list):
        tiers = [tier for index, raw in enumerate(written) if (tier := _tier(raw, index, document, problems))]
    # What is not a list is left to the model, which says so.
    values = {**rest, "tiers": tiers if isinstance(written, list) else written}
    config = _validated(TieringConfig, values, (), document, problems)
    if problems or config is None:
        problems.sort(key=lambda problem: document.line(problem.path))
        raise ConfigError("\n".join(f"{document.place(problem.path)}: {problem.text}" for problem in problems))
    config._hidden = dict(document.hidden)
    return config


def _validated(
    model: type[Model], values: Mapping[str, Any], here: KeyPath, document: Document, problems: list[Problem]
) -> Model | None:
    try:
        return model.model_validate(values, by_alias=True, by_name=False)
    except ValidationError as error:
        # Not chained to what is raised in the end: pydantic's own message prints what it was given, secrets included.
        problems += problems_of(error, model, here, document)
        return None


def _tier(raw: Any, index: int, document: Document, problems: list[Problem]) -> BackendConfig | None:
    here: KeyPath = ("tiers", index)
    if isinstance(raw, BackendConfig):
        return raw
    legal = f"legal types: {', '.join(registry.known_backends())}"
    if not isinstance(raw, dict):
        problems.append(Problem(here, f"got {document.shown(here)}; a tier is a mapping with a `type` ({legal})"))
        return None
    at_type: KeyPath = (*here, "type")
    type_ = raw.get("type")
    if not isinstance(type_, str) or (at_type in document.hidden and type_ not in registry.known_backends()):
        got = f"got {document.shown(at_type)}" if "type" in raw else "missing"
        problems.append(Problem(at_type, f"{got}; {legal}"))
        return None
    try:
        config = registry.backend_config(type_)
    except ConfigError as error:
        problems.append(Problem(at_type, str(error)))
        return None
    return _validated(config, raw, here, document, problems)


def _with_home(tier: BackendConfig) -> BackendConfig:
    changed: dict[str, Path] = {}
    for name in type(tier).model_fields:
        value = getattr(tier, name)
        if isinstance(value, Path) and value.parts[:1] and value.parts[0].startswith("~"):
            try:
                changed[name] = value.expanduser()
            except RuntimeError as error:
                raise ValueError(f"{name}: {error}") from None
    return tier.model_copy(update=changed) if changed else tier


def _check_policy(name: str) -> str:
    known = registry.known_policies()
    if name not in known:
        raise ValueError(registry.unknown("eviction policy", name, known))
    return name


def _shown(value: Any, path: KeyPath, hidden: Mapping[KeyPath, str]) -> Any:
    if path in hidden:
        return hidden[path]
    if isinstance(value, BaseModel):
        fields = type(value).model_fields.items()
        return {
            key: _shown(getattr(value, name), (*path, key), hidden)
            for name, field in fields
            if field.repr
            for key in (field.alias or name,)
        }
    if isinstance(value, Mapping):
        return {key: _shown(item, (*path, key), hidden) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shown(item, (*path, index), hidden) for index, item in enumerate(value)]
    return value


def _or_variable(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema``, or text with a variable in it: an editor must not call ``port: ${PORT}`` wrong."""
    plain_text = schema.get("type") == "string" and not schema.keys() & {"enum", "const", "pattern", "format"}
    if plain_text or schema.get("type") in ("array", "object") or "$ref" in schema:
        return schema
    notes: dict[str, Any] = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    rest = {key: value for key, value in schema.items() if key not in notes}
    branches = rest["anyOf"] if rest.keys() == {"anyOf"} else [rest]
    return {**notes, "anyOf": [*branches, {"type": "string", "pattern": r"\$\{[A-Za-z_]"}]}
