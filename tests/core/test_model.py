"""Long random histories of one core against the naive model of ``tests.core.model``."""

from __future__ import annotations

from hypothesis import settings

from tests.core.model import CoreMachine

TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
