"""A prompt that the GPU has forgotten is found in the tiers, whole or in part, in one process or in several."""

from __future__ import annotations

import os

from tests.engines.catalog import Result, log_of, reference, report, scenario
from tests.engines.children import in_child
from tests.engines.engine import GPU_BLOCK_TOKENS, Engine, Hits, Setting
from tests.engines.model import HYBRID
from tests.engines.prompts import prompt, prompts

PROMPT = 500
WHOLE_BLOCKS = PROMPT // GPU_BLOCK_TOKENS * GPU_BLOCK_TOKENS


@scenario(doors=("connector", "spec", "secondary", "baseline"))
def reuse(setting: Setting) -> Result:
    """A, prompts that push it out of the GPU, A again."""
    a = prompt("a", PROMPT)
    expected = reference(setting, [a])[0]
    engine = Engine(setting.but(nvme_bytes=64 << 20))
    first = engine.ask([a])[0]
    engine.ask_each(prompts("distractor", 6, PROMPT))
    before = engine.hits()
    second = engine.ask([a])[0]
    hits = engine.hits().since(before)
    engine.close()
    good = hits.local == 0 and hits.tokens == WHOLE_BLOCKS
    return report(hits, identical=expected == first == second, good=good)


@scenario()
def shared_prefix(setting: Setting) -> Result:
    """B begins like A; A is gone from the GPU."""
    a = prompt("a", PROMPT)
    b = prompt("b", PROMPT, prefix=a[:300])
    expected = reference(setting, [a, b])
    engine = Engine(setting)
    found = [engine.ask([a])[0]]
    engine.ask_each(prompts("distractor", 6, PROMPT))
    before = engine.hits()
    found.append(engine.ask([b])[0])
    hits = engine.hits().since(before)
    engine.close()
    good = hits.tokens == 300 // GPU_BLOCK_TOKENS * GPU_BLOCK_TOKENS
    return report(hits, identical=expected == found, good=good)


@scenario()
def multiprocess(setting: Setting) -> Result:
    """Scheduler and worker in another process than the one that asks, spawned as a server does."""
    a = prompt("a", PROMPT)
    b = prompt("b", PROMPT, prefix=a[:300])
    expected = reference(setting, [a, b])
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_WORKER_MULTIPROC_METHOD="spawn")
    engine = Engine(setting.but(nvme_bytes=64 << 20))
    found = [engine.ask([a])[0]]
    engine.ask_each(prompts("distractor", 6, PROMPT))
    before = engine.hits()
    again = engine.ask([a])[0]
    engine.ask_each(prompts("more", 6, PROMPT))
    found.append(engine.ask([b])[0])
    hits = engine.hits().since(before)
    engine.close()
    good = hits.tokens >= WHOLE_BLOCKS
    return report(hits, identical=expected == found and again == found[0], good=good)


@scenario(doors=("connector", "spec"))
def hybrid(setting: Setting) -> Result:
    """Groups with a sliding window beside one without: a hit is what all groups can serve, and of a window only its end is
    read (row 32)."""
    setting = setting.but(shape=HYBRID, gpu_blocks=300, max_batch_tokens=256)
    a = prompt("a", PROMPT)
    b = prompt("b", PROMPT, prefix=a[:300])
    expected = reference(setting, [a, b])
    engine = Engine(setting)
    found = [engine.ask([a])[0]]
    engine.settle()
    engine.evict_gpu()
    before, cached = engine.hits(), engine.cached_tokens
    again = engine.ask([a])[0]
    metrics = engine.metrics()
    hits = engine.hits().since(before)
    # Bytes moved tell nothing of tokens here: a group in the middle of the prompt moves none.
    tokens = hits.tokens if setting.door == "connector" else engine.cached_tokens - cached
    engine.settle()
    engine.evict_gpu()
    found.append(engine.ask([b])[0])
    engine.close()
    blocks = metrics.get("vllm:tiering_loaded_blocks", 0) or metrics["vllm:kv_offload_load_bytes"] / (
        setting.block_bytes / 4
    )
    window_blocks = -(-HYBRID.window // GPU_BLOCK_TOKENS)
    at_most = WHOLE_BLOCKS // GPU_BLOCK_TOKENS + 3 * window_blocks
    hits = Hits(tokens, hits.engine_reported, hits.local, hits.queries)
    good = hits.tokens == WHOLE_BLOCKS and 0 < blocks <= at_most
    return report(hits, identical=expected == found and again == found[0], good=good, loaded_blocks=int(blocks))


@scenario(extra=True)
def two_ranks(setting: Setting) -> Result:
    """Two workers in processes of their own, each with its part of every block (row 33). An engine with one rank finds
    nothing of theirs in the same directory (row 14)."""
    a = prompt("a", PROMPT)
    expected = reference(setting, [a])[0]
    disk = setting.but(nvme_bytes=64 << 20)
    found, hits = in_child(_on_two_ranks, disk, a, log=log_of(setting, "two-ranks"))
    alone = Engine(disk)
    found.append(alone.ask([a])[0])
    foreign = alone.hits().engine_reported
    alone.close()
    good = hits.tokens == WHOLE_BLOCKS and foreign == 0
    return report(hits, identical=all(ids == expected for ids in found), good=good, hit_tokens_of_other_ranks=foreign)


def _on_two_ranks(setting: Setting, tokens: list[int]) -> tuple[list[list[int]], Hits]:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_WORKER_MULTIPROC_METHOD="fork", VLLM_CPU_OMP_THREADS_BIND="0|1"
    )
    engine = Engine(setting.but(tensor_parallel=2))
    answers = [engine.ask([tokens])[0]]
    engine.ask_each(prompts("distractor", 6, PROMPT))
    before = engine.hits()
    answers.append(engine.ask([tokens])[0])
    hits = engine.hits().since(before)
    engine.close()
    return answers, hits
