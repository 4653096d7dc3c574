"""The engine's device memory: a bounded, paged pool of KV blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from tiering.types import BlockKey


class DevicePool:
    """``capacity_blocks`` rows of ``block_bytes``; a row is found by its block key.

    The one sequence that runs *holds* the rows that it uses; the others are idle and go least recently used first.
    The pool owns ``rows``; a held row keeps its content until ``release``.
    """

    def __init__(self, capacity_blocks: int, block_bytes: int) -> None:
        self.rows = torch.zeros((capacity_blocks, block_bytes), dtype=torch.uint8)
        self.evicted_blocks = 0
        self._free = list(range(capacity_blocks))
        self._row_of: dict[BlockKey, int] = {}
        self._idle: OrderedDict[BlockKey, None] = OrderedDict()  # subset of _row_of, least recently used first

    def hold_prefix(self, keys: Sequence[BlockKey]) -> list[int]:
        """Hold the longest leading run of ``keys`` that is resident; returns its rows."""
        rows = []
        for key in keys:
            if key not in self._row_of:
                break
            self._idle.pop(key, None)
            rows.append(self._row_of[key])
        return rows

    def hold_new(self, keys: Sequence[BlockKey]) -> list[int]:
        """Give each key a row, held and with undefined content, evicting idle blocks. A resident key keeps its row.

        Raises ``RuntimeError`` if held blocks fill the pool; nothing is taken then.
        """
        absent = [key for key in keys if key not in self._row_of]
        room = len(self._free) + len(self._idle) - sum(key in self._idle for key in keys)
        if len(absent) > room:
            raise RuntimeError(f"the device pool has room for {room} more blocks, the sequence needs {len(absent)}")
        for key in keys:
            self._idle.pop(key, None)
        for key in absent:
            if not self._free:
                victim, _ = self._idle.popitem(last=False)
                self._free.append(self._row_of.pop(victim))
                self.evicted_blocks += 1
            self._row_of[key] = self._free.pop()
        return [self._row_of[key] for key in keys]

    def release(self, keys: Sequence[BlockKey]) -> None:
        """The sequence ``keys`` ended. Its tail becomes the first to go, so that shared heads stay longest."""
        for key in reversed(keys):
            self._idle[key] = None
            self._idle.move_to_end(key)

    def rows_of(self, keys: Sequence[BlockKey]) -> list[int]:
        """The rows of resident ``keys``. Raises ``KeyError``."""
        return [self._row_of[key] for key in keys]
