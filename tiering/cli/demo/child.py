"""The ``restart`` phase: a new process that finds the blocks of the one before it.

``python -m tiering.cli.demo.child`` reads one JSON object on stdin (``setup``, ``tiers``) and prints one on stdout,
the ``PhaseResult``. ``run_in_new_process`` is the parent's side.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tiering.cli.demo.options import no_progress
from tiering.cli.demo.phase import PhaseResult, Setup, run_phase

CHILD_DEADLINE_S = 600.0


def run_in_new_process(name: str, setup: Setup, tiers: Mapping[str, Any]) -> PhaseResult:
    """Run a phase in a fresh interpreter. Blocks; the child never outlives the call.

    Raises ``RuntimeError`` with the child's last error lines, or ``TimeoutExpired`` after ten minutes.
    """
    request = json.dumps({"name": name, "setup": setup.to_json(), "tiers": tiers})
    command = [sys.executable, "-m", "tiering.cli.demo.child"]
    done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=CHILD_DEADLINE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the new process of phase {name!r} exited with {done.returncode}:\n{done.stderr[-4000:]}")
    return PhaseResult.from_json(json.loads(done.stdout))


def main() -> None:
    request = json.load(sys.stdin)
    setup = Setup.from_json(request["setup"])
    model = setup.build_model()
    result = run_phase(request["name"], setup, model, request["tiers"], no_progress)
    json.dump(result.to_json(), sys.stdout)


if __name__ == "__main__":
    main()
