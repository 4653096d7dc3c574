from __future__ import annotations

from tests.servers.seaweed import seaweed

__all__ = ["seaweed"]
