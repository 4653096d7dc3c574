"""Tools for tests, shipped in the wheel: the conformance kit, fault injection, a virtual clock.

``BackendTests`` needs pytest and hypothesis (``kvtiering[test]``); the rest does not, so it is imported on demand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering.testing.clock import VirtualClock
from tiering.testing.faults import FaultPlan, FaultyBackend, InjectedError

if TYPE_CHECKING:
    from tiering.testing.backend_tests import BackendTests

__all__ = ["BackendTests", "FaultPlan", "FaultyBackend", "InjectedError", "VirtualClock"]


def __getattr__(name: str) -> object:
    if name != "BackendTests":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tiering.testing.backend_tests import BackendTests

    return BackendTests
