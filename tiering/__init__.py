"""Keeps the KV cache of large-language-model serving alive beyond GPU memory: CPU, NVMe, and plug-in tiers."""

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
