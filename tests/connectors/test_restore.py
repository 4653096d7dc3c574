"""Re-store through an engine: what the CPU tier evicts of a running request comes back while the GPU holds it."""

from __future__ import annotations

from tests.connectors.rig import prompt, rig
from tiering.connectors.reference import CacheGroup, Request

BLOCK = CacheGroup("full", 256, (0,), 8)
TEN = 10


def _keys(request: Request) -> list[bytes]:
    """The keys of the request's blocks, from the hashes that the engine made."""
    return [content + bytes(4) for content in request.block_hashes]


def _tokens_found(policy: str, *, restore: bool, first_lost: int, others: int) -> int:
    """A request of ten blocks runs on while another stores ``others`` blocks into the one slot that is left. Then both end,
    the GPU forgets, and the first prompt comes again: the tokens that the tiers gave it."""
    config = {"primary": {"policy": policy, "store_when": "computed"}, "restore": {"enabled": restore}}
    with rig([BLOCK], slots=TEN + 1, gpu_blocks=64, config=config, step_tokens=4096) as world:
        long = world.add(prompt(1, TEN * 256), max_tokens=30)
        world.land()
        # All but one are used again, so that it is the first to go.
        world.manager.sync.touch([key for i, key in enumerate(_keys(long)) if i != first_lost])
        world.add(prompt(2, others * 256), max_tokens=1)
        world.land()
        assert 0 < len(long.output_ids) < 30, "it ran all the time"
        world.run()
        world.forget_gpu()
        return world.serve(prompt(1, TEN * 256 + 1)).record.tier_tokens


def test_permanent_hole_the_block_that_lru_evicted_comes_back() -> None:
    """Row 4. Ten blocks of 256 tokens, block 3 evicted while the request runs: two are left of the prefix, or all ten."""
    assert _tokens_found("lru", restore=False, first_lost=2, others=2) == 2 * 256
    assert _tokens_found("lru", restore=True, first_lost=2, others=2) == TEN * 256


def test_an_evicted_tail_comes_back_under_the_prefix_policy() -> None:
    """It leaves no hole, and a re-scan for holes would not find it. The last block is worth no more than the one that would
    have to go for it, and stays away."""
    assert _tokens_found("prefix", restore=False, first_lost=TEN - 1, others=4) == 7 * 256
    assert _tokens_found("prefix", restore=True, first_lost=TEN - 1, others=4) == 9 * 256
