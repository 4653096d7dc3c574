"""``python -m tiering.testing.simulation --seed N --steps M [--json]``: exit 0 if nothing was found, else 1."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Final

from tiering.testing.simulation.run import Result, simulate

STEPS: Final = 2000
JOURNAL_TAIL: Final = 40
LINE_CHARACTERS_MAX: Final = 400


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tiering.testing.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="fixes everything that happens")
    parser.add_argument("--steps", type=int, default=STEPS, help="how long faults go on (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps: must be at least 1")
    result = simulate(options.seed, options.steps)
    tail = [line[:LINE_CHARACTERS_MAX] for line in result.journal.splitlines()[-JOURNAL_TAIL:]]
    if options.json:
        print(json.dumps({**result.as_dict(), "journal_tail": tail}))
    else:
        print("\n".join(_lines(result, tail)))
    return 0 if result.ok else 1


def _lines(result: Result, tail: list[str]) -> list[str]:
    tally = result.tally
    lines = [
        f"seed {result.seed}, {result.steps} steps: {'good' if result.ok else 'FAILED'}"
        f" ({result.virtual_s:.2f} virtual s, {result.lives} lives, {result.resets} resets)",
        "commands executed: " + _list(tally.commands) + "; blocks in them: " + _list(tally.items),
        "faults injected: " + (_list(result.faults) or "none"),
        f"{tally.loads} loads, {tally.stores} stores, {tally.hits} hits, {tally.misses} misses,"
        f" {tally.reads_failed} reads failed, wrong_bytes {tally.wrong_bytes}",
    ]
    if not result.ok:
        lines += ["", result.failure.rstrip(), "", f"the last {len(tail)} lines of the journal:", *tail]
        again = f"python -m tiering.testing.simulation --seed {result.seed} --steps {result.steps}"
        lines += ["", f"again: {again}"]
    return lines


def _list(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
