"""Requests that are aborted at every state: waiting, loading, running, finished."""

from __future__ import annotations

import random

from tests.engines.catalog import Result, reference, report, scenario
from tests.engines.engine import Engine, Setting, sampling
from tests.engines.prompts import prompt, prompts

REQUESTS = 160


@scenario(doors=("connector", "spec"))
def abort(setting: Setting) -> Result:
    """A storm, and then: no lease, no job and no request is left, and the cache still gives the right answers."""
    a = prompt("a", 500)
    expected = reference(setting, [a])[0]
    engine = Engine(setting.but(nvme_bytes=64 << 20, primary_bytes=40 * setting.block_bytes))
    answers = [engine.ask([a])[0]]
    _storm(engine)
    engine.settle()
    engine.evict_gpu()
    engine.ask([a])
    engine.settle()
    engine.evict_gpu()
    before = engine.hits()
    answers.append(engine.ask([a])[0])
    hits = engine.hits().since(before)
    engine.settle()
    left = _left(engine)
    engine.close()
    identical = all(answer == expected for answer in answers)
    return report(hits, identical=identical, good=hits.tokens > 0 and not any(left.values()), **left)


def _storm(engine: Engine) -> None:
    source = random.Random("storm")
    beginnings = prompts("storm", 6, 320)
    alive: list[str] = []
    core = engine.llm.llm_engine
    for number in range(REQUESTS):
        name = f"storm-{number}"
        tokens = prompt(name, source.randrange(330, 500), prefix=source.choice(beginnings))
        core.add_request(name, {"prompt_token_ids": tokens}, sampling(source.choice((1, 8, 60))))
        alive.append(name)
        for _ in range(source.choice((0, 0, 1, 1, 2, 5))):
            core.step()
        for _ in range(source.choice((0, 1, 2))):
            if alive:
                core.abort_request([alive.pop(source.randrange(len(alive)))])
    core.abort_request(alive)


def _left(engine: Engine) -> dict[str, int]:
    """What must be nothing once every request has ended."""
    connector = engine.core.scheduler.connector
    if engine.setting.door == "spec":
        manager = connector.connector_scheduler.manager.tiering
        left = {}
    else:
        manager = connector.manager
        stats = connector.scheduler.stats()
        left = {name: stats[name] for name in ("open_jobs", "waiting_loads", "known_requests")}
    snapshot = manager.parts.gate.snapshot()
    return left | {
        "leases": sum(pool["leases"] for pool in snapshot["pools"]),
        "holds": snapshot["holds"],
        "open_loads": snapshot["open_loads"],
        "open_stores": snapshot["open_stores"],
    }
