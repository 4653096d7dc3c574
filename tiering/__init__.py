"""Keeps the KV cache of large-language-model serving alive beyond GPU memory: CPU, NVMe, and plug-in tiers."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiering.config import TieringConfig
    from tiering.errors import (
        BackendError,
        ClosedError,
        ConfigError,
        InvariantViolation,
        NamespaceMismatch,
        ShapeError,
        TieringError,
    )
    from tiering.keys import block_keys
    from tiering.manager import TieringOffloadingManager
    from tiering.types import (
        FlushReport,
        Group,
        KVLayout,
        Outcome,
        OutcomeCode,
        PrefixMatch,
        StoreReport,
        sliding_window,
    )

__all__ = [
    "BackendError",
    "ClosedError",
    "ConfigError",
    "FlushReport",
    "Group",
    "InvariantViolation",
    "KVLayout",
    "NamespaceMismatch",
    "Outcome",
    "OutcomeCode",
    "PrefixMatch",
    "ShapeError",
    "StoreReport",
    "TieringConfig",
    "TieringError",
    "TieringOffloadingManager",
    "block_keys",
    "sliding_window",
]

_HOMES = {"TieringConfig": "config", "block_keys": "keys", "TieringOffloadingManager": "manager"} | dict.fromkeys(
    ("FlushReport", "Group", "KVLayout", "Outcome", "OutcomeCode", "PrefixMatch", "StoreReport", "sliding_window"),
    "types",
)


def __getattr__(name: str) -> object:
    # The manager brings numpy and pydantic, half a second; whoever imports `tiering.errors` or a plug-in's base does not wait.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"tiering.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
