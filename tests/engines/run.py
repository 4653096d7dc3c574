"""``python -m tests.engines.run``: every scenario on the real vLLM engine, one after another, each in its own process.

Prints one line a scenario, or with ``--json`` one object: ``{"scenarios": {name: {...}},
"contract": {name: {...}}, "machine": {...}, "ttft": {...}}``.
Exit code 0 only if every scenario is ok.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from tests.engines.catalog import SCENARIOS, Result, Scenario
from tests.engines.children import ChildError, in_child
from tests.engines.contract import CONTRACTS
from tests.engines.engine import Setting, apply_environment, model_directory
from tests.engines.machine import machine
from tests.engines.model import LARGER
from tests.engines.scenarios import register_all
from tests.engines.ttft import TTFT_DOORS, measure_ttft

CONTRACT: Final = "contract"
TTFT: Final = "ttft"
SCENARIO_LIMIT_S: Final = 600.0
"""A hang is a failure. The machine may be busy."""


def main() -> int:
    register_all()
    options = _options()
    usual = [name for name, scenario in SCENARIOS.items() if options.all or not scenario.extra]
    names = [name for name in options.only.split(",") if name] or [CONTRACT, *usual, TTFT]
    unknown = [name for name in names if name not in SCENARIOS and name not in (CONTRACT, TTFT)]
    if unknown:
        print(
            f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}, {CONTRACT} and {TTFT}",
            file=sys.stderr,
        )
        return 2
    apply_environment()
    _import_engine()
    directory = Path(tempfile.mkdtemp(prefix="kvtiering-engines-"))
    say = _quiet if options.json else _say
    try:
        base = Setting(door="none", directory=directory, models=directory / "models")
        model_directory(base)
        contract = _contract(base, say) if CONTRACT in names else {}
        results = {name: _run(SCENARIOS[name], base, say) for name in names if name in SCENARIOS}
        ttft = _ttft(base, say) if TTFT in names else {}
    finally:
        if options.keep:
            print(f"logs and files are kept in {directory}", file=sys.stderr)
        else:
            shutil.rmtree(directory, ignore_errors=True)
    if options.json:
        print(json.dumps({"scenarios": results, "contract": contract, "machine": machine(), "ttft": ttft}, indent=2))
    good = all(result["ok"] for result in (*results.values(), *contract.values())) and ttft.get("ok", True)
    return 0 if good else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.add_argument("--only", default="", metavar="A,B", help="these scenarios alone; `ttft` is one too")
    parser.add_argument("--all", action="store_true", help="also the scenarios that take minutes")
    parser.add_argument("--keep", action="store_true", help="keep the scenarios' files and logs")
    return parser.parse_args()


def _import_engine() -> None:
    """Once, here: each scenario's process is a fork of this one. Nothing is started by it."""
    import transformers
    import vllm
    from vllm import LLM

    import tiering.connectors.vllm

    del transformers, vllm, LLM, tiering.connectors.vllm


def _run(scenario: Scenario, base: Setting, say: Any) -> Result:
    directory = base.directory / scenario.name
    directory.mkdir()
    setting = base.but(door=scenario.door, directory=directory)
    start_s = time.monotonic()
    try:
        result = in_child(scenario.run, setting, log=directory / "scenario.log", limit_s=SCENARIO_LIMIT_S)
    except ChildError as error:
        result = {
            "ok": False,
            "ids_identical": False,
            "hit_tokens": 0,
            "engine_reported_hit_tokens": 0,
            "error": str(error),
        }
    result["seconds"] = round(time.monotonic() - start_s, 1)
    say(scenario.name, result)
    return result


def _contract(base: Setting, say: Any) -> dict[str, Result]:
    """What needs no engine, all in one process."""
    directory = base.directory / CONTRACT
    directory.mkdir()
    try:
        results = in_child(_check_contracts, directory, log=directory / "contract.log")
    except ChildError as error:
        results = {CONTRACT: {"ok": False, "error": str(error)}}
    for name, result in results.items():
        say(f"{CONTRACT} {name}", result)
    return results


def _check_contracts(directory: Path) -> dict[str, Result]:
    results = {}
    for name, check in CONTRACTS.items():
        (directory / name).mkdir()
        results[name] = check(directory / name)
    return results


def _ttft(base: Setting, say: Any) -> Result:
    """For each door; ours must be fast, the others are there to compare."""
    model_directory(base.but(shape=LARGER))
    results: Result = {}
    for door in TTFT_DOORS:
        directory = base.directory / f"ttft-{door}"
        directory.mkdir()
        results[door] = measure_ttft(base.but(door=door, directory=directory, shape=LARGER))
        say(f"ttft {door}", results[door])
    results["ok"] = results["connector"]["ok"]
    return results


def _say(name: str, result: Result) -> None:
    facts = ", ".join(f"{key} {value}" for key, value in result.items() if key not in ("ok", "error"))
    print(f"{'ok  ' if result['ok'] else 'FAIL'} {name}: {facts}", flush=True)
    if "error" in result:
        print(result["error"], flush=True)


def _quiet(name: str, result: Result) -> None:
    print(f"{'ok  ' if result['ok'] else 'FAIL'} {name} ({result.get('seconds', 0)} s)", file=sys.stderr, flush=True)
    if "error" in result:
        print(result["error"], file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
