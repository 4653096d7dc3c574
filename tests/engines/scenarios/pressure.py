"""Too little room: on the GPU, so that requests are preempted, and in the CPU tier."""

from __future__ import annotations

import random

from tests.engines.catalog import Result, once, reference, report, scenario
from tests.engines.engine import UNLIMITED_BLOCKS, Engine, Hits, Setting
from tests.engines.prompts import prompt, prompts

FAMILIES = 8
MEMBERS = 6
MIXED_TOKENS = 40
RATE_TOLERANCE = 0.02


def mixed_requests() -> list[list[int]]:
    """48 prompts of 8 families with a long common beginning each, in an order that mixes them."""
    source = random.Random("mixed")
    beginnings = prompts("family", FAMILIES, 288)
    mixed = [
        prompt(f"member-{family}-{member}", source.randrange(330, 460), prefix=beginnings[family])
        for family in range(FAMILIES)
        for member in range(MEMBERS)
    ]
    source.shuffle(mixed)
    return mixed


@scenario(doors=("connector", "spec", "baseline"))
def preemption(setting: Setting) -> Result:
    """Many requests at once on a GPU that holds three of them; beside it a GPU that holds all."""
    unlimited = setting.but(door="none", gpu_blocks=UNLIMITED_BLOCKS, connector=None)
    expected, everything, _ = once(setting, _mixed, unlimited)
    alone = setting.but(door="none", connector=None)
    _, untiered, _ = once(setting, _mixed, alone)
    found, hits, preemptions = _mixed(setting)
    rate, rate_unlimited = hits.rate, everything.rate
    return report(
        hits,
        identical=expected == found,
        good=preemptions > 0 and rate >= rate_unlimited - RATE_TOLERANCE,
        hit_rate=round(rate, 4),
        hit_rate_unlimited=round(rate_unlimited, 4),
        hit_rate_without_tiers=round(untiered.rate, 4),
        preemptions=preemptions,
    )


def _mixed(setting: Setting) -> tuple[list[list[int]], Hits, int]:
    engine = Engine(setting)
    answers = engine.ask(mixed_requests(), MIXED_TOKENS)
    hits, preemptions = engine.hits(), int(engine.metrics()["vllm:num_preemptions"])
    if setting.door in ("spec", "baseline"):
        # Bytes moved also count what was loaded for preempted requests, and vLLM's metric of hits does not.
        hits = Hits(engine.cached_tokens - hits.local, hits.engine_reported, hits.local, hits.queries)
    engine.close()
    return answers, hits, preemptions


@scenario(doors=("connector", "spec", "baseline"))
def small_primary(setting: Setting) -> Result:
    """The CPU tier is smaller than one prompt: its head is kept and served. (vLLM's own manager keeps nothing.)"""
    a = prompt("a", 500)
    expected = reference(setting, [a])[0]
    engine = Engine(setting.but(primary_bytes=8 * setting.block_bytes))
    first = engine.ask([a])[0]
    engine.settle()
    engine.evict_gpu()
    before = engine.hits()
    second = engine.ask([a])[0]
    hits = engine.hits().since(before)
    engine.close()
    good = hits.tokens > 0 or setting.door == "baseline"
    return report(hits, identical=expected == first == second, good=good)
