"""Eviction policies: which resident block of a tier goes first. Pure: no clock, lock, log, randomness or I/O.

They are found by entry point (group ``tiering.policies``), the built-in ones too: ``prefix``, ``lru``, ``arc``.
"""

from tiering.policies.arc import ARCPolicy
from tiering.policies.lru import LRUPolicy
from tiering.policies.prefix import PrefixPolicy

__all__ = ["ARCPolicy", "LRUPolicy", "PrefixPolicy"]
