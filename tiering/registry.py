"""Backends and eviction policies by name, found through entry points, so that a plug-in needs no line of ours.

A package offers a backend with an entry point of the group ``tiering.backends`` whose name is the YAML ``type`` and
whose value is a ``BackendConfig`` subclass, and a policy with one of the group ``tiering.policies`` whose value is an
``EvictionPolicy`` subclass. Everything that goes wrong with a plug-in is a ``ConfigError`` that names its distribution.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import pkgutil
from collections.abc import Iterable
from typing import Any, Final

from tiering.api import API_VERSION, Backend, BackendConfig, EvictionPolicy
from tiering.errors import ConfigError

BACKENDS_GROUP: Final = "tiering.backends"
POLICIES_GROUP: Final = "tiering.policies"


def known_backends() -> tuple[str, ...]:
    """Every ``type`` that a tier may have, sorted. Imports nothing."""
    return _names(BACKENDS_GROUP)


def known_policies() -> tuple[str, ...]:
    """Every eviction policy's name, sorted. Imports nothing."""
    return _names(POLICIES_GROUP)


def backend_config(type_: str) -> type[BackendConfig]:
    """The configuration class of the tiers of type ``type_``.

    Raises ``ConfigError``: an unknown type, a plug-in that cannot be imported or is none, one made for a newer API.
    """
    entry = _entry(BACKENDS_GROUP, "backend type", type_)
    config = _load(entry, f"the backend {type_!r}")
    if not (isinstance(config, type) and issubclass(config, BackendConfig)):
        raise ConfigError(f"the backend {type_!r} ({_source(entry)}) is not a subclass of tiering.api.BackendConfig")
    version = getattr(config, "api_version", API_VERSION)
    if not isinstance(version, int) or version > API_VERSION:
        raise ConfigError(
            f"the backend {type_!r} ({_source(entry)}) is made for version {version!r} of tiering.api, this is version"
            f" {API_VERSION}; upgrade kvtiering, or install an older release of that package"
        )
    return config


def backend_class(config: BackendConfig) -> type[Backend]:
    """The backend that ``config`` is for; imports it. Raises ``ConfigError`` if that fails or it is no ``Backend``."""
    path = getattr(type(config), "backend", None)
    what = f"the backend of {type(config).__module__}.{type(config).__qualname__}"
    if not isinstance(path, str) or ":" not in path:
        raise ConfigError(f'{what} is {path!r}; set `backend: ClassVar[str] = "package.module:Class"`')
    try:
        found = pkgutil.resolve_name(path)
    except Exception as error:
        raise ConfigError(f"{what}, {path}, cannot be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise ConfigError(f"{what}, {path}, is not a subclass of tiering.api.Backend")
    return found


def policy_class(name: str) -> type[EvictionPolicy]:
    """The eviction policy called ``name``. Raises ``ConfigError`` as ``backend_config`` does."""
    entry = _entry(POLICIES_GROUP, "eviction policy", name)
    policy = _load(entry, f"the eviction policy {name!r}")
    if not (isinstance(policy, type) and issubclass(policy, EvictionPolicy)):
        raise ConfigError(
            f"the eviction policy {name!r} ({_source(entry)}) is not a subclass of tiering.api.EvictionPolicy"
        )
    return policy


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that ``word`` is most likely a slip for, if any is near."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean "capacity"?``, or nothing if no known word is near."""
    found = nearest(word, known)
    return f'; did you mean "{found}"?' if found else ""


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that nothing answers to: the nearest one, and all there are."""
    names = sorted(known)
    return f'unknown {what} "{name}"{did_you_mean(name, names)} (known: {", ".join(names) or "none"})'


def _names(group: str) -> tuple[str, ...]:
    return tuple(sorted({entry.name for entry in importlib.metadata.entry_points(group=group)}))


def _entry(group: str, what: str, name: str) -> importlib.metadata.EntryPoint:
    entries = list(importlib.metadata.entry_points(group=group))
    found = [entry for entry in entries if entry.name == name]
    if not found:
        remedy = "" if entries else "; kvtiering itself is not installed: run `pip install -e .` in its checkout"
        raise ConfigError(unknown(what, name, {entry.name for entry in entries}) + remedy)
    if len(found) > 1:
        sources = " and ".join(_source(entry) for entry in found)
        raise ConfigError(f'two packages offer the {what} "{name}": {sources}; uninstall one')
    return found[0]


def _load(entry: importlib.metadata.EntryPoint, what: str) -> Any:
    try:
        return entry.load()
    except Exception as error:
        message = f"{what} ({_source(entry)}) cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(message) from error


def _source(entry: importlib.metadata.EntryPoint) -> str:
    made_by = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"
    return f"{entry.value} of {made_by}"
