"""Engines over ``ContentRunner``: groups of every kind, and what must hold after every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiering.connectors.reference import CacheGroup, ContentRunner, ReferenceEngine, Request, RequestState, StepResult
from tiering.connectors.requests import NULL_BLOCK

FULL = CacheGroup("full", 4, (0, 2), 8)
WINDOW = CacheGroup("sliding_window(10)", 4, (1,), 5)
WIDE_WINDOW = CacheGroup("sliding_window(9)", 8, (1,), 5)
RECURRENT = CacheGroup("recurrent", 8, (3,), 3)

WORLDS: dict[str, tuple[CacheGroup, ...]] = {
    "full": (FULL,),
    "window": (FULL, WINDOW),
    "windows alone": (WIDE_WINDOW,),
    "all kinds": (FULL, WIDE_WINDOW, RECURRENT),
}


class World:
    """An engine, its runner, and every request it was given."""

    def __init__(self, groups: Sequence[CacheGroup], num_gpu_blocks: int, **options: Any) -> None:
        self.runner = ContentRunner(groups, num_gpu_blocks=num_gpu_blocks)
        self.engine = ReferenceEngine(self.runner, **options)
        self.requests: list[Request] = []

    def add(self, prompt: Sequence[int], max_tokens: int, salt: bytes = b"") -> Request:
        request = self.engine.add_request(f"r{len(self.requests)}", prompt, max_tokens=max_tokens, salt=salt)
        self.requests.append(request)
        return request

    def step(self) -> StepResult:
        result = self.engine.step()
        read_unfilled = {wrong.block_id for wrong in self.runner.wrong_blocks} - result.invalid_block_ids
        assert not read_unfilled, self.runner.wrong_blocks
        for request_id, token in result.tokens.items():
            request = next(request for request in self.requests if request.request_id == request_id)
            assert request.token_ids[-1] == token
            assert [token] == self.runner.expected_tokens(request.token_ids[:-1], 1, salt=request.salt)
        for request in result.finished:
            self.check_record(request)
        self.check_pool()
        return result

    def run(self, steps_max: int = 2000) -> int:
        """Step until all is served; returns the number of steps."""
        for steps in range(steps_max):
            if not self.engine.has_work:
                return steps
            self.step()
        raise AssertionError(f"not served within {steps_max} steps")

    def check_record(self, request: Request) -> None:
        assert len(request.output_ids) == request.max_tokens
        record = request.record
        if not record.preemptions and not record.failed_loads:
            assert record.engine_tokens + record.tier_tokens + record.computed_tokens == request.num_tokens - 1

    def check_pool(self) -> None:
        """Each block is used by those whose table has it, or free."""
        pool = self.engine.pool
        used = {block for request in self.requests for table in request.blocks for block in table} - {NULL_BLOCK}
        assert pool.free_blocks == pool.num_gpu_blocks - 1 - len(used)
        assert not any(pool.is_free(block) for block in used)

    def check_end(self) -> None:
        """All served: nobody has a block, and whoever was not aborted has an answer."""
        assert self.engine.pool.free_blocks == self.engine.pool.num_gpu_blocks - 1
        for request in self.requests:
            assert request.state in (RequestState.FINISHED, RequestState.ABORTED)
            assert request.blocks == ()
