"""Backends and policies by name: the built-in ones, a plug-in's, and each way in which a plug-in can be broken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from tiering import registry
from tiering.api import Backend, BackendConfig, EvictionPolicy
from tiering.errors import ConfigError

PLUGIN = """
from typing import ClassVar, Literal
from tiering.api import BackendConfig, EvictionPolicy

class PluginConfig(BackendConfig):
    backend: ClassVar[str] = "kv_plugin:NoSuchBackend"
    type: Literal["plugin"] = "plugin"

class NewerConfig(PluginConfig):
    api_version: ClassVar[int] = 999

class CurrentConfig(PluginConfig):
    api_version: ClassVar[int] = 1

class NotAConfig:
    pass
"""


def install(site: Path, entries: str, *, name: str = "kv-plugin", module: str = PLUGIN) -> None:
    """What pip leaves behind: a module and a distribution's metadata."""
    info = site / f"{name.replace('-', '_')}-7.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 7.1\n")
    (info / "entry_points.txt").write_text(entries)
    (site / "kv_plugin.py").write_text(module)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kv_plugin", raising=False)
    return tmp_path


def test_the_built_in_names_are_known() -> None:
    assert {"memory", "nvme"} <= set(registry.known_backends())
    assert {"prefix", "lru", "arc"} <= set(registry.known_policies())


@pytest.mark.parametrize("type_", ["memory", "nvme"])
def test_a_built_in_backend_resolves_to_its_classes(type_: str, tmp_path: Path) -> None:
    config = registry.backend_config(type_)
    assert issubclass(config, BackendConfig)
    fields = {"type": type_, "capacity": "1MiB"} | ({"path": tmp_path} if type_ == "nvme" else {})
    assert issubclass(registry.backend_class(config.model_validate(fields)), Backend)


@pytest.mark.parametrize("name", ["prefix", "lru", "arc"])
def test_a_built_in_policy_resolves_and_can_be_made(name: str) -> None:
    policy = registry.policy_class(name)
    assert issubclass(policy, EvictionPolicy)
    assert len(policy(4)) == 0


def test_looking_names_up_imports_no_backend() -> None:
    code = (
        "import sys; from tiering import registry; registry.known_backends();"
        "print([m for m in sys.modules if m.startswith('backends')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_type_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r'unknown backend type "nvmee"; did you mean "nvme"\?.*memory'):
        registry.backend_config("nvmee")
    with pytest.raises(ConfigError, match=r'unknown eviction policy "LRUU" \(known: .*lru'):
        registry.policy_class("LRUU")


def test_a_plug_in_is_found_by_its_entry_point(site: Path) -> None:
    install(site, "[tiering.backends]\nplugin = kv_plugin:PluginConfig\ncurrent = kv_plugin:CurrentConfig\n")
    assert "plugin" in registry.known_backends()
    assert registry.backend_config("plugin").__name__ == "PluginConfig"
    assert registry.backend_config("current").__name__ == "CurrentConfig"


@pytest.mark.parametrize(
    ("target", "module", "reason"),
    [
        ("kv_plugin:Missing", PLUGIN, "AttributeError"),
        ("kv_plugin:PluginConfig", "import a_client_that_is_not_installed", "ModuleNotFoundError: .*a_client_that"),
        ("kv_plugin:PluginConfig", "raise OSError('no such library')", "OSError: no such library"),
        ("kv_plugin:PluginConfig", "class PluginConfig(:", "SyntaxError"),
        ("kv_plugin:NotAConfig", PLUGIN, "not a subclass of tiering.api.BackendConfig"),
        ("kv_plugin:NewerConfig", PLUGIN, "version 999 of tiering.api.*upgrade kvtiering"),
    ],
)
def test_a_broken_backend_plug_in_names_its_distribution_and_why(
    site: Path, target: str, module: str, reason: str
) -> None:
    install(site, f"[tiering.backends]\nplugin = {target}\n", module=module)
    with pytest.raises(ConfigError, match=rf"{target} of kv-plugin 7\.1.*{reason}"):
        registry.backend_config("plugin")


def test_a_broken_policy_plug_in_names_its_distribution(site: Path) -> None:
    install(site, "[tiering.policies]\nmine = kv_plugin:NotAConfig\n")
    with pytest.raises(ConfigError, match=r"kv_plugin:NotAConfig of kv-plugin 7\.1.*EvictionPolicy"):
        registry.policy_class("mine")


def test_two_packages_with_one_name_are_told_apart(site: Path) -> None:
    install(site, "[tiering.backends]\nplugin = kv_plugin:PluginConfig\n")
    install(site, "[tiering.backends]\nplugin = kv_plugin:CurrentConfig\n", name="kv-other")
    with pytest.raises(ConfigError, match=r"kv-plugin 7\.1.*kv-other 7\.1|kv-other 7\.1.*kv-plugin 7\.1"):
        registry.backend_config("plugin")


class Unset(BackendConfig):
    type: str = "unset"


class NoModule(BackendConfig):
    backend: ClassVar[str] = "no_such_module:Thing"
    type: str = "none"


class NoBackend(BackendConfig):
    backend: ClassVar[str] = "pathlib:Path"
    type: str = "path"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Unset(), "set `backend: ClassVar"),
        (NoModule(), "no_such_module:Thing, cannot be imported: ModuleNotFoundError"),
        (NoBackend(), "pathlib:Path, is not a subclass of tiering.api.Backend"),
    ],
)
def test_a_config_whose_backend_is_wrong_says_so(config: BackendConfig, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        registry.backend_class(config)
