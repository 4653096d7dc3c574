"""Processes that end, weights that change, and what is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.engines.catalog import Result, log_of, once, reference, report, scenario
from tests.engines.children import in_child
from tests.engines.engine import GPU_BLOCK_TOKENS, Engine, Setting
from tests.engines.prompts import prompt

NVME_BYTES = 128 << 20
PROMPT = 500
WHOLE_BLOCKS = PROMPT // GPU_BLOCK_TOKENS * GPU_BLOCK_TOKENS
SHARED_MEMORY = Path("/dev/shm")


@scenario(doors=("connector", "spec", "secondary", "baseline"))
def restart(setting: Setting) -> Result:
    """One process stores and ends; another, with the same directory, finds the blocks."""
    disk = setting.but(nvme_bytes=NVME_BYTES)
    a = prompt("a", PROMPT)
    expected = reference(setting, [a])[0]
    first = in_child(_store_and_end, disk, a, log=log_of(setting, "first"))
    engine = Engine(disk)
    before = engine.hits()
    second = engine.ask([a])[0]
    hits = engine.hits().since(before)
    engine.close()
    return report(hits, identical=expected == first == second, good=hits.tokens == WHOLE_BLOCKS)


def _store_and_end(setting: Setting, tokens: list[int]) -> list[int]:
    engine = Engine(setting)
    answer = engine.ask([tokens])[0]
    engine.settle()
    engine.close()
    return answer


@scenario(doors=("connector", "spec", "secondary"))
def reset(setting: Setting) -> Result:
    """New weights: no tier may serve blocks of the old ones, and those of the new ones are found."""
    a = prompt("a", PROMPT)
    old_expected = reference(setting, [a])[0]
    new_expected = once(setting, _with_new_weights, setting.but(door="none"), a)
    engine = Engine(setting.but(nvme_bytes=NVME_BYTES))
    old = engine.ask([a])[0]
    engine.settle()
    _update_weights(engine)
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    at_reset = engine.hits()
    stale = engine.ask([a])[0]
    stale_hits = engine.hits().since(at_reset).engine_reported
    engine.settle()
    engine.evict_gpu()
    before = engine.hits()
    new = engine.ask([a])[0]
    hits = engine.hits().since(before)
    engine.close()
    identical = old == old_expected and stale == new == new_expected
    good = old_expected != new_expected and stale_hits == 0 and hits.tokens == WHOLE_BLOCKS
    return report(hits, identical=identical, good=good, hit_tokens_of_old_weights=stale_hits)


def _with_new_weights(setting: Setting, tokens: list[int]) -> list[int]:
    engine = Engine(setting)
    _update_weights(engine)
    answer = engine.ask([tokens])[0]
    engine.close()
    return answer


def _update_weights(engine: Engine) -> None:
    """Change what keys and values are computed from: the second layer's input."""

    def change(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if "layers.1.input_layernorm" in name:
                parameter.data.mul_(-1.0)

    change(engine.core.model_executor.driver_worker.worker.model_runner.model)


@scenario()
def shm(setting: Setting) -> Result:
    """Nothing of an engine that ended, or was killed, is left in shared memory."""
    a = prompt("a", PROMPT)
    expected = reference(setting, [a])[0]
    before = _shared_memory()
    engine = Engine(setting.but(nvme_bytes=NVME_BYTES))
    answers = [engine.ask([a])[0]]
    engine.settle()
    engine.evict_gpu()
    start = engine.hits()
    answers.append(engine.ask([a])[0])
    hits = engine.hits().since(start)
    while_running = _shared_memory() - before
    engine.close()
    ended = _shared_memory() - before
    victim = setting.but(directory=setting.directory / "killed")
    victim.directory.mkdir()
    answers.append(_killed(victim, a))
    left = _shared_memory() - before
    return report(
        hits,
        identical=all(answer == expected for answer in answers),
        good=not (while_running or ended or left),
        left_behind=sorted(while_running | ended | left),
    )


def _shared_memory() -> set[str]:
    """Names that engines or we could have made."""
    return {name for name in os.listdir(SHARED_MEMORY) if any(word in name for word in ("vllm", "tiering", "offload"))}


def _killed(setting: Setting, tokens: list[int]) -> list[int]:
    """An engine in a process that is killed while it has the tiers open; its answer."""
    answer_file = setting.directory / "answer"
    child = os.fork()
    if child == 0:
        try:
            engine = Engine(setting.but(nvme_bytes=NVME_BYTES))
            text = " ".join(map(str, engine.ask([tokens])[0]))
            answer_file.with_suffix(".part").write_text(text, encoding="utf-8")
            answer_file.with_suffix(".part").rename(answer_file)
            time.sleep(60.0)
        finally:
            os._exit(1)
    until_s = time.monotonic() + 120.0
    while not answer_file.exists() and time.monotonic() < until_s:
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return [int(token) for token in answer_file.read_text(encoding="utf-8").split()]
