"""Loads that fail, and loads that bring the wrong bytes: the first must not be seen in the answers, the second must."""

from __future__ import annotations

from tests.engines.catalog import Result, reference, report, scenario
from tests.engines.engine import Engine, Setting
from tests.engines.prompts import prompt

FAULTY = "tests.engines.faulty"


@scenario()
def load_failure(setting: Setting) -> Result:
    """The first load names a slot that does not exist; its request computes, the next one loads."""
    a = prompt("a", 500)
    expected = reference(setting, [a])[0]
    engine = Engine(setting.but(connector=("FirstLoadFails", FAULTY)))
    answers = [engine.ask([a])[0]]
    before = engine.hits()
    for _ in range(2):
        engine.settle()
        engine.evict_gpu()
        answers.append(engine.ask([a])[0])
    hits, metrics = engine.hits().since(before), engine.metrics()
    failed, loaded = metrics["vllm:tiering_failed_load_jobs"], metrics["vllm:tiering_loaded_blocks"]
    engine.close()
    identical = all(answer == expected for answer in answers)
    return report(hits, identical=identical, good=failed == 1 and loaded == 15, failed_loads=int(failed))


@scenario()
def negative_control(setting: Setting) -> Result:
    """Every load is negated: if the answers were the same, nothing that was loaded had been used."""
    a = prompt("a", 500)
    expected = reference(setting, [a])[0]
    engine = Engine(setting.but(connector=("NegatedLoads", FAULTY)))
    first = engine.ask([a])[0]
    engine.settle()
    engine.evict_gpu()
    before = engine.hits()
    second = engine.ask([a])[0]
    hits = engine.hits().since(before)
    engine.close()
    result = report(hits, identical=expected == first == second)
    counted = hits.tokens == hits.engine_reported == 480
    return {**result, "ok": counted and first == expected and second != expected}
