"""The state machine behind the random histories. Importing it costs Hypothesis, which children and readers do without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tiering.testing.conformance.base import MISSING, OK, Block, KitBase, Opened, Verdicts, close
from tiering.testing.conformance.rules import require

KEYS: Final = 6
HISTORIES: Final = 12
STEPS: Final = 14

_batches = st.lists(st.integers(0, KEYS - 1), max_size=5)


class BackendMachine(RuleBasedStateMachine):
    """One history on a fresh medium. ``model`` holds the keys that are stored."""

    def __init__(self, kit: KitBase, tmp_path: Path) -> None:
        super().__init__()
        self.kit = kit
        self.tmp_path = tmp_path
        self.blocks = kit.blocks(KEYS)
        self.model: set[Block] = set()
        self.runner = asyncio.Runner()
        self.s = self._open()

    def _open(self) -> Opened:
        backend = self.kit.make_backend(self.tmp_path)
        namespace = self.kit.namespace(self.tmp_path)
        self.runner.run(self.kit.open(backend, namespace))
        return Opened(backend, namespace, self.kit.call_timeout_s)

    def _expected(self, batch: Sequence[Block]) -> Verdicts:
        return Verdicts(OK if block in self.model else MISSING for block in batch)

    @initialize()
    def nothing_is_there(self) -> None:
        """Each history begins with what no history may leave to chance."""
        self.contains(list(range(KEYS)))
        self.load(list(range(KEYS)))

    @rule(picks=_batches)
    def store(self, picks: list[int]) -> None:
        batch = [self.blocks[pick] for pick in picks]
        self.runner.run(self.s.store_all(batch))
        self.model |= set(batch)

    @rule(picks=_batches)
    def load(self, picks: list[int]) -> None:
        batch = [self.blocks[pick] for pick in picks]
        loaded = self.runner.run(self.s.load(batch))
        require(loaded == self._expected(batch), 1, f"load gave {loaded}, the history asks for {self._expected(batch)}")

    @rule(picks=_batches)
    def contains(self, picks: list[int]) -> None:
        batch = [self.blocks[pick] for pick in picks]
        found = self.runner.run(self.s.contains(key for key, _ in batch))
        require(
            found == self._expected(batch), 1, f"contains gave {found}, the history asks for {self._expected(batch)}"
        )

    @rule(picks=_batches)
    def delete(self, picks: list[int]) -> None:
        if not self.s.backend.capabilities.can_delete:
            return
        batch = [self.blocks[pick] for pick in dict.fromkeys(picks)]
        deleted = self.runner.run(self.s.delete(key for key, _ in batch))
        require(deleted == self._expected(batch), 2, f"delete gave {deleted}, not {self._expected(batch)}")
        self.model -= set(batch)

    @rule()
    def reopen(self) -> None:
        self.runner.run(close(self.s.backend))
        self.s = self._open()
        if not self.s.backend.capabilities.persistent:
            self.model.clear()

    def teardown(self) -> None:
        self.runner.run(close(self.s.backend))
        self.runner.close()


def run_histories(fresh: Callable[[], BackendMachine]) -> None:
    """Raises what the shortest failing history found raises; its steps are printed as a program."""
    run_state_machine_as_test(
        fresh,  # type: ignore[arg-type]  # it documents that a function which makes one will do
        settings=settings(
            max_examples=HISTORIES,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
