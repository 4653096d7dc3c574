"""The scenarios by name."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tests.engines.children import in_child
from tests.engines.engine import Door, Engine, Hits, Setting

Result: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scenario:
    """``run(setting)`` in a process of its own."""

    name: str
    door: Door
    run: Callable[[Setting], Result]
    extra: bool
    """Runs only when it is named, or with ``--all``: it takes minutes."""


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    *, doors: tuple[Door, ...] = ("connector",), extra: bool = False
) -> Callable[[Callable[[Setting], Result]], Callable[[Setting], Result]]:
    """Register a function for each door; the connector's name is the function's, others get the door's name behind it."""

    def register(run: Callable[[Setting], Result]) -> Callable[[Setting], Result]:
        for door in doors:
            name = run.__name__ if door == "connector" else f"{run.__name__}_{door}"
            SCENARIOS[name] = Scenario(name, door, run, extra)
        return run

    return register


def log_of(setting: Setting, what: str) -> Path:
    return setting.directory / f"{what}.log"


def reference(setting: Setting, prompts: list[list[int]], tokens: int = 16) -> list[list[int]]:
    """What an engine without any of this answers, each prompt by itself, in a process of its own."""
    plain = setting.but(door="none", gpu_blocks=512, connector=None)
    return once(setting, _answers, plain, prompts, tokens)


def once(setting: Setting, function: Callable[..., Any], plain: Setting, *args: Any) -> Any:
    """``function(plain, *args)`` in a process of its own, and for all scenarios of a run together: it has no tiers."""
    facts = repr((function.__name__, plain.shape, plain.gpu_blocks, plain.max_batch_tokens, args))
    kept = setting.models / f"{hashlib.sha256(facts.encode()).hexdigest()}.pickle"
    if not kept.exists():
        kept.write_bytes(pickle.dumps(in_child(function, plain, *args, log=log_of(setting, "without-tiers"))))
    return pickle.loads(kept.read_bytes())


def _answers(setting: Setting, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    engine = Engine(setting)
    answers = engine.ask_each(prompts, tokens)
    engine.close()
    return answers


def report(hits: Hits, *, identical: bool, good: bool = True, **more: Any) -> Result:
    """``ok`` if the ids are identical, the two counts of hits agree, and whatever else was asked holds."""
    return {
        "ok": identical and hits.tokens == hits.engine_reported and good,
        "ids_identical": identical,
        "hit_tokens": hits.tokens,
        "engine_reported_hit_tokens": hits.engine_reported,
        **more,
    }
