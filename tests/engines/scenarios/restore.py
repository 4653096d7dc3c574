"""Blocks that the CPU tier evicts while their request runs are copied again, and found by the next request."""

from __future__ import annotations

from tests.engines.catalog import Result, log_of, reference, report, scenario
from tests.engines.children import in_child
from tests.engines.engine import Engine, Hits, Setting, sampling
from tests.engines.prompts import prompt, prompts

PREFIX = 320
LONG_TOKENS = 220
SLOTS = 26


@scenario()
def restore(setting: Setting) -> Result:
    """With re-store on and off: a long request, short ones that push it out of the CPU tier, then one with its prefix."""
    tight = setting.but(primary_bytes=SLOTS * setting.block_bytes, policy="lru")
    b = _follower()
    expected = reference(setting, [b])[0]
    off, off_hits, _ = in_child(_run, tight.but(restore=False), log=log_of(setting, "off"))
    on, on_hits, restored = _run(tight)
    return report(
        on_hits,
        identical=expected == on == off,
        good=on_hits.tokens > off_hits.tokens and restored > 0,
        hit_tokens_on=on_hits.tokens,
        hit_tokens_off=off_hits.tokens,
        restored_blocks=restored,
    )


def _follower() -> list[int]:
    return prompt("follower", PREFIX + 40, prefix=prompt("long", PREFIX))


def _run(setting: Setting) -> tuple[list[int], Hits, int]:
    engine = Engine(setting)
    core = engine.llm.llm_engine
    core.add_request("long", {"prompt_token_ids": prompt("long", PREFIX)}, sampling(LONG_TOKENS))
    for number, tokens in enumerate(prompts("short", 7, 130)):
        for _ in range(12):
            core.step()
        core.add_request(f"short-{number}", {"prompt_token_ids": tokens}, sampling(2))
    while core.has_unfinished_requests():
        core.step()
    engine.settle()
    engine.evict_gpu()
    before = engine.hits()
    answer = engine.ask([_follower()])[0]
    hits = engine.hits().since(before)
    restored = int(engine.metrics().get("vllm:tiering_restored_blocks", 0))
    engine.close()
    return answer, hits, restored
