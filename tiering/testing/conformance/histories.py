"""Random histories against a dict: what a list of chosen cases forgets."""

from __future__ import annotations

import itertools
from pathlib import Path

from tiering.testing.conformance.base import KitBase


class HistoryRules(KitBase):
    def test_rule_01_to_06_over_random_histories(self, tmp_path: Path) -> None:
        """The same histories in each run; a failure prints the shortest one found as a program."""
        from tiering.testing.conformance.machine import BackendMachine, run_histories

        number = itertools.count()

        def fresh() -> BackendMachine:
            medium = tmp_path / f"history-{next(number)}"
            medium.mkdir()
            return BackendMachine(self, medium)

        run_histories(fresh)
