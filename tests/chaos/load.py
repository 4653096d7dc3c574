"""Callers that use a manager as engines do, know every byte they must get, and note how long each call took.

Hot callers load chains that stay in the primary tier: what they wait for is a CPU hit. The others go through more
chains than the primary tier holds, so that blocks flow to the tiers below and back: load, compare, store what is missing.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from tiering import KVLayout, TieringConfig, TieringOffloadingManager, block_keys
from tiering.api import BackendConfig

T = TypeVar("T")
Rows = npt.NDArray[np.uint8]

BLOCK_BYTES: Final = 65_000
"""Not a multiple of a page."""
TOKENS_PER_BLOCK: Final = 4
LAYOUT = KVLayout.uniform(model="chaos", tokens_per_block=TOKENS_PER_BLOCK, block_bytes=BLOCK_BYTES)
CHAIN_BLOCKS: Final = 8
HOT_CHAINS, HOT_CALLERS = 2, 2
CHAINS, CALLERS = 30, 4
SLOTS: Final = 80
"""Ten chains: two that are hot, and less than a third of the others."""

QUEUE_BYTES: Final = "1MiB"
"""A fifth of the primary tier: what stores that hang may keep from everything else."""

CALL_DEADLINE_S: Final = 2.0
HUNG_S: Final = 10.0
"""No deadline of a call or a tier comes near: a call that takes so long hangs."""
HOT_PAUSE_S: Final = 0.004
PAUSE_S: Final = 0.01
"""Between two calls of one caller: an engine computes meanwhile, and a machine of two cores is not full."""
NEW_CHAINS_FROM: Final = 1_000_000
NEW_PAUSE_S: Final = 0.05
UNTOUCHED: Final = 0xEE


def chain(number: int, blocks: int = CHAIN_BLOCKS) -> list[bytes]:
    return block_keys(list(range(TOKENS_PER_BLOCK * blocks)), LAYOUT, salt=b"chain %d" % number)


def content(key: bytes, size: int = BLOCK_BYTES) -> Rows:
    """The one right content of a key, in every process: derived from it by sha256 alone."""
    seed = int.from_bytes(hashlib.sha256(b"content" + key).digest()[:8], "big")
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def rows(keys: Sequence[bytes], size: int = BLOCK_BYTES) -> Rows:
    return np.stack([content(key, size) for key in keys])


def wrong_bytes(out: Rows, loaded: int, right: Rows) -> int:
    """Bytes of the loaded blocks that are not theirs, and bytes behind these that were touched."""
    return int((out[:loaded] != right[:loaded]).sum()) + int((out[loaded:] != UNTOUCHED).sum())


def config(*tiers: BackendConfig | dict[str, Any], slots: int = SLOTS) -> TieringConfig:
    primary = {"capacity": slots * 65_536, "store_reserve": "5%"}
    return TieringConfig.from_dict({"primary": primary, "tiers": list(tiers), "flush_on_close": 0})


@dataclass
class Seen:
    """What the callers met. ``cpu_hits`` holds when each ended and how many seconds it took."""

    calls: int = 0
    loaded_blocks: int = 0
    stored_blocks: int = 0
    wrong_bytes: int = 0
    hung_requests: int = 0
    slowest_call_s: float = 0.0
    cpu_hits: list[tuple[float, float]] = field(default_factory=list)
    hot_losses_s: list[float] = field(default_factory=list)
    """When a hot chain was not whole in the primary tier."""


class Load:
    """The callers on one manager. All times are of ``time.perf_counter``."""

    def __init__(self, manager: TieringOffloadingManager, seed: int = 0) -> None:
        self.manager = manager
        self.seen = Seen()
        self.rng = random.Random(seed)
        self.stopping = False
        self.hot = [self.known(-1 - n) for n in range(HOT_CHAINS)]
        self.chains = [self.known(n) for n in range(CHAINS)]

    @staticmethod
    def known(number: int) -> tuple[list[bytes], Rows]:
        keys = chain(number)
        return keys, rows(keys)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Seen]:
        """The callers run for as long as the block does. An error of one of them is the block's."""
        async with asyncio.TaskGroup() as group:
            callers = [group.create_task(caller) for caller in self.callers()]
            try:
                yield self.seen
            finally:
                self.stopping = True
                _, hung = await asyncio.wait(callers, timeout=HUNG_S)
                self.seen.hung_requests += len(hung)
                for caller in hung:
                    caller.cancel()

    def callers(self) -> list[Coroutine[Any, Any, None]]:
        hot = [self.be_hot(*self.hot[n % HOT_CHAINS]) for n in range(HOT_CALLERS)]
        return [*hot, *(self._flow() for _ in range(CALLERS)), self._be_new()]

    async def be_hot(self, keys: list[bytes], right: Rows) -> None:
        out = np.empty_like(right)
        while not self.stopping:
            match = await self.timed(self.manager.match(keys))
            if match.by_tier.get("primary") != len(keys):
                self.seen.hot_losses_s.append(time.perf_counter())
                await self.timed(self.manager.store(keys, right, deadline_s=CALL_DEADLINE_S))
                await asyncio.sleep(HOT_PAUSE_S)
                continue
            out.fill(UNTOUCHED)
            began_s = time.perf_counter()
            n = await self.timed(self.manager.load(keys, out, deadline_s=CALL_DEADLINE_S))
            self.seen.cpu_hits.append((time.perf_counter(), time.perf_counter() - began_s))
            self.seen.wrong_bytes += wrong_bytes(out, n, right)
            await asyncio.sleep(HOT_PAUSE_S)

    async def _flow(self) -> None:
        out = np.empty((CHAIN_BLOCKS, BLOCK_BYTES), np.uint8)
        while not self.stopping:
            keys, right = self.rng.choice(self.chains)
            out.fill(UNTOUCHED)
            n = await self.timed(self.manager.load(keys, out, deadline_s=CALL_DEADLINE_S))
            self.seen.loaded_blocks += n
            self.seen.wrong_bytes += wrong_bytes(out, n, right)
            if n < len(keys):
                parent = keys[n - 1] if n else None
                storing = self.manager.store(keys[n:], right[n:], parent=parent, deadline_s=CALL_DEADLINE_S)
                self.seen.stored_blocks += (await self.timed(storing)).stored
            await asyncio.sleep(PAUSE_S)

    async def _be_new(self) -> None:
        """Stores what nobody has: there is always something that the tiers below should take."""
        for number in itertools.count(NEW_CHAINS_FROM):
            if self.stopping:
                return
            keys = chain(number, blocks=1)
            report = await self.timed(self.manager.store(keys, rows(keys), deadline_s=CALL_DEADLINE_S))
            self.seen.stored_blocks += report.stored
            await asyncio.sleep(NEW_PAUSE_S)

    async def timed(self, call: Awaitable[T]) -> T:
        began_s = time.perf_counter()
        try:
            return await call
        finally:
            taken_s = time.perf_counter() - began_s
            self.seen.calls += 1
            self.seen.slowest_call_s = max(self.seen.slowest_call_s, taken_s)
            self.seen.hung_requests += taken_s > HUNG_S
