"""``python -m tests.core.verify [--json]``: explore the core's small worlds and run long random histories.

Prints how many states and transitions each world has, whether all of them were visited, and how many random steps ran.
Takes at most three minutes or so. Exit status 1, with the way that led there, if anything contradicts itself.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.core import model
from tests.core.configs import CONFIGS, LONG_CONFIGS
from tests.core.explore import Result, explore

LONG_S = 30.0
"""Most that one of the longer explorations may take."""

EXAMPLES = 300
STEPS_MAX = 80


def main() -> None:
    as_json = "--json" in sys.argv[1:]
    started_s = time.monotonic()
    results: list[Result] = []
    for config in (*CONFIGS, *LONG_CONFIGS):
        results.append(explore(config, LONG_S if config in LONG_CONFIGS else float("inf")))
        if not as_json:
            _print(results[-1])
    profile = settings(max_examples=EXAMPLES, stateful_step_count=STEPS_MAX, deadline=None, database=None)
    run_state_machine_as_test(model.CoreMachine, settings=profile)
    seconds = time.monotonic() - started_s
    if as_json:
        print(json.dumps({"worlds": [asdict(r) for r in results], "random_steps": model.STEPS, "seconds": seconds}))
        return
    states, transitions = sum(r.states for r in results), sum(r.transitions for r in results)
    print(
        f"\n{states} states, {transitions} transitions, {model.STEPS} random steps in {EXAMPLES} histories, {seconds:.0f} s"
    )


def _print(result: Result) -> None:
    extent = "complete" if result.complete else "cut short"
    print(
        f"{result.name:45} {result.states:7} states {result.transitions:8} transitions"
        f" {result.drains:6} ends  {extent}, {result.seconds:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
