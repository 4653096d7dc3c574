"""What the tiers do behind ``generate``: other processes, other models, wrong bytes, little memory, hung disks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.connectors.transformers.child import HEAD, LENGTHS
from tests.connectors.transformers.models import NEW, TOKENS, cache_name, config, model, nvme, prompts
from tests.manager.world import faulty
from tiering import ClosedError
from tiering.connectors.transformers import CallReport, TieredPrefixCache

GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
BLOCK_BYTES = 2 * 2 * 2 * TOKENS * 32 * 4
"""Of the small Llama: layers, keys and values, heads, tokens, head_dim, fp32."""


def last(cache: TieredPrefixCache) -> CallReport:
    assert cache.last is not None
    return cache.last


def test_lost_on_restart_a_new_process_goes_on(tmp_path: Path, root: Path) -> None:
    """rows 15, 19: another process with another hash seed finds the blocks, and its answer is the same."""
    lm = model()
    ids, mask = prompts(LENGTHS, head=HEAD)
    with TieredPrefixCache(lm, config(nvme(tmp_path)), tokens_per_block=TOKENS) as cache:
        out = cache.generate(ids, attention_mask=mask, **GREEDY)
        assert cache.flush().lost == 0
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.connectors.transformers.child", str(tmp_path), "0"],
        cwd=root, env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["ids"] == out.tolist() == lm.generate(ids, attention_mask=mask, **GREEDY).tolist()
    assert told["reused"] == {"nvme": 96 + 79}  # 96 columns, of which the second prompt lacks 17


def test_namespace_too_narrow_another_model_never_hits(tmp_path: Path) -> None:
    """row 14: other weights, one changed element, another dtype, another epoch, salt or adapter: nothing is shared."""
    ids, _ = prompts((64,))
    first = model()
    with TieredPrefixCache(first, config(nvme(tmp_path)), tokens_per_block=TOKENS) as cache:
        cache.generate(ids, **GREEDY)
        others: list[dict[str, Any]] = [{"salt": b"tenant"}, {"lora": b"adapter"}]
        for other in others:
            assert torch.equal(cache.generate(ids, **GREEDY, **other), first.generate(ids, **GREEDY))
            assert last(cache).reused_tokens == {}
        cache.flush()
    touched = model()
    with torch.no_grad():
        touched.model.layers[1].self_attn.v_proj.weight[3, 5] += 0.5
    variants: list[tuple[Any, dict[str, Any]]] = [
        (model(seed=1), {}),
        (touched, {}),
        (model(dtype=torch.bfloat16), {}),
        (model(), {"epoch": "weights-2"}),
        (model(), {"revision": "my own"}),
    ]
    for lm, options in variants:
        with TieredPrefixCache(lm, config(nvme(tmp_path)), tokens_per_block=TOKENS, **options) as cache:
            assert torch.equal(cache.generate(ids, **GREEDY), lm.generate(ids, **GREEDY))
            assert last(cache).reused_tokens == {}
    with TieredPrefixCache(model(), config(nvme(tmp_path)), tokens_per_block=TOKENS) as cache:
        cache.generate(ids, **GREEDY)
        assert last(cache).reused_tokens == {"nvme": 48}


def test_stale_weights_are_noticed(tmp_path: Path) -> None:
    """row 16: weights that change under an open cache raise; after a reset nothing old is served."""
    lm = model()
    ids, _ = prompts((64,))
    with TieredPrefixCache(lm, config(nvme(tmp_path)), tokens_per_block=TOKENS) as cache:
        cache.generate(ids, **GREEDY)
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter.mul_(1.01)
        for call in (cache.generate, cache.load):
            with pytest.raises(Exception, match=r"not those that this cache was made for.*reset\(epoch"):
                call(ids)
        cache.reset("trained on")
        assert torch.equal(cache.generate(ids, **GREEDY), lm.generate(ids, **GREEDY))
        assert last(cache).reused_tokens == {}
        cache.generate(ids, **GREEDY)
        assert last(cache).reused_tokens == {"primary": 48}


def test_wrong_bytes_served_a_flipped_byte_is_a_miss(tmp_path: Path) -> None:
    """row 13: one byte of the second block is flipped on the disk: one block is reused, and the answer is right."""
    lm = model()
    ids, _ = prompts((64,))
    plain = lm.generate(ids, **GREEDY, return_dict_in_generate=True)
    with TieredPrefixCache(lm, config(nvme(tmp_path)), tokens_per_block=TOKENS) as cache:
        cache.generate(ids, **GREEDY)
        assert cache.flush().lost == 0
    needle = getattr(plain, cache_name()).layers[0].keys[0, 0, TOKENS : 2 * TOKENS].contiguous().numpy().tobytes()
    flipped = 0
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if (at := data.find(needle)) >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([data[at] ^ 1]))
            flipped += 1
    assert flipped == 1
    with TieredPrefixCache(lm, config(nvme(tmp_path)), tokens_per_block=TOKENS) as cache:
        assert torch.equal(cache.generate(ids, **GREEDY), plain.sequences)
        assert last(cache).computed_tokens == 64 - TOKENS
        assert cache.manager.stats()["corrupt_blocks"] == 1
        # The hole was filled again.
        cache.generate(ids, **GREEDY)
        assert last(cache).computed_tokens == TOKENS


def test_self_thrash_a_prompt_longer_than_the_cpu_tier_is_reused_whole(tmp_path: Path) -> None:
    """rows 1, 3: 12 blocks through 4 slots: all are stored, all come back, each is read once."""
    lm = model()
    ids, _ = prompts((12 * TOKENS + 5,))
    small = config(nvme(tmp_path), capacity=4 * BLOCK_BYTES)
    plain = lm.generate(ids, max_new_tokens=2, do_sample=False)
    with TieredPrefixCache(lm, small, tokens_per_block=TOKENS) as cache:
        cache.generate(ids, max_new_tokens=2, do_sample=False)
        assert (last(cache).stored_blocks, last(cache).refused_blocks) == (12, 0)
        assert cache.flush().lost == 0
    with TieredPrefixCache(lm, small, tokens_per_block=TOKENS) as cache:
        assert cache.manager.stats()["primary"]["slots"] == 4
        assert torch.equal(cache.generate(ids, max_new_tokens=2, do_sample=False), plain)
        assert last(cache).reused_tokens == {"nvme": 12 * TOKENS}
        assert cache.manager.stats()["tiers"]["nvme"]["io"]["submitted_blocks"]["load"] == 12
        assert last(cache).stored_blocks == 0


def test_no_deadline_a_hung_tier_is_a_miss() -> None:
    """row 8: reads hang: after the tier's deadline the prompt is computed, and nothing stays leased."""
    lm = model()
    ids, _ = prompts((64,))
    tier, plan = faulty("far", blocks=1024, deadline="100ms")
    small = config(tier, capacity=4 * BLOCK_BYTES, flush_on_close="0s")
    with TieredPrefixCache(lm, small, tokens_per_block=TOKENS) as cache:
        cache.generate(ids, **GREEDY)
        other, _ = prompts((4 * TOKENS + 1,), seed=9)
        cache.generate(other, **GREEDY)
        assert cache.flush().lost == 0
        plan.hang("load")
        begin = time.monotonic()
        assert torch.equal(cache.generate(ids, **GREEDY), lm.generate(ids, **GREEDY))
        assert time.monotonic() - begin < 10
        assert last(cache).reused_tokens == {}
        plan.release()
        clean(cache)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt], ids=lambda error: error.__name__)
def test_what_is_raised_in_generate_leaves_nothing(error: type[BaseException]) -> None:
    """row 25: an error, or Ctrl-C, in the middle of decoding: no lease, no block, and the next call is as ever."""
    lm = model()
    ids, _ = prompts((64,))

    def fail(batch: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if batch.shape[1] > 66:
            raise error("stop")
        return scores

    with TieredPrefixCache(lm, config(), tokens_per_block=TOKENS) as cache:
        with pytest.raises(error, match="stop"):
            cache.generate(ids, **GREEDY, logits_processor=[fail])
        clean(cache)
        assert cache.last is None
        assert cache.manager.stats()["stored_blocks"] == 0
        cache.generate(ids, **GREEDY)
        with pytest.raises(error, match="stop"):
            cache.generate(ids, **GREEDY, logits_processor=[fail])
        clean(cache)
        assert torch.equal(cache.generate(ids, **GREEDY), lm.generate(ids, **GREEDY))
        assert last(cache).reused_tokens == {"primary": 48}


def clean(cache: TieredPrefixCache) -> None:
    stats = cache.manager.stats()
    assert (stats["primary"]["leases"], stats["open_loads"], stats["open_stores"], stats["holds"]) == (0, 0, 0, 0)


def test_a_closed_cache_says_so() -> None:
    ids, _ = prompts((40,))
    cache = TieredPrefixCache(model(), config(), tokens_per_block=TOKENS)
    with pytest.raises(ClosedError, match="not open"):
        cache.generate(ids, **GREEDY)
    with cache:
        cache.generate(ids, **GREEDY)
    assert cache.close() == []
    calls: list[Any] = [lambda: cache.generate(ids, **GREEDY), lambda: cache.load(ids), cache.flush]
    for call in calls:
        with pytest.raises(ClosedError, match="closed"):
            call()
