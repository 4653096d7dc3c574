"""Whether far tiers, dead, slow or frozen, cost the near ones anything: CPU hits and NVMe loads, with all four tiers.

``python -m tests.chaos.near --json`` prints one object; exit 1 unless every byte was right, no request hung, and the 99th
percentiles of both stayed within a factor of two of those with healthy far tiers, in phases that alternate in one run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.chaos.load import (
    BLOCK_BYTES,
    CALL_DEADLINE_S,
    CHAIN_BLOCKS,
    HOT_CHAINS,
    LAYOUT,
    PAUSE_S,
    QUEUE_BYTES,
    UNTOUCHED,
    Load,
    config,
    wrong_bytes,
)
from tests.chaos.phases import P99_RATIO_MAX, parser, percentile_ms
from tests.chaos.s3_proxy import Proxy, proxy
from tests.servers.seaweed import SeaweedServer, start_seaweed
from tests.servers.valkey import Valkey, valkey
from tiering import TieringOffloadingManager

BUCKET: Final = "kvtiering-near"
NEAR_CALLERS, UNKNOWN_CALLERS = 2, 2
SLOW_MS: Final = 400
"""Redis answers nothing for so long, again and again; its deadline is 500 ms."""
HEALTHY: Final = "healthy"
Act = Callable[[], Awaitable[None]]


class NearLoad(Load):
    """Besides hot chains: some that the NVMe tier holds and the primary one mostly not, and new ones that nobody holds.

    The new ones are what the far tiers are asked for and given.
    """

    def __init__(self, manager: TieringOffloadingManager, seed: int) -> None:
        super().__init__(manager, seed)
        self.nvme_loads: list[tuple[float, float]] = []
        self._numbers = itertools.count(1000)

    async def fill(self) -> None:
        """Every chain is in the NVMe tier."""
        for keys, right in self.chains:
            await self.manager.store(keys, right)
        await self.manager.flush()

    def callers(self) -> list[Coroutine[Any, Any, None]]:
        hot = [self.be_hot(*self.hot[n]) for n in range(HOT_CHAINS)]
        near = [self._be_near() for _ in range(NEAR_CALLERS)]
        return [*hot, *near, *(self._be_unknown() for _ in range(UNKNOWN_CALLERS))]

    async def _be_near(self) -> None:
        out = np.empty((CHAIN_BLOCKS, BLOCK_BYTES), np.uint8)
        while not self.stopping:
            keys, right = self.rng.choice(self.chains)
            found = (await self.timed(self.manager.match(keys))).by_tier
            out.fill(UNTOUCHED)
            began_s = time.perf_counter()
            n = await self.timed(self.manager.load(keys, out, deadline_s=CALL_DEADLINE_S))
            taken_s = time.perf_counter() - began_s
            self.seen.wrong_bytes += wrong_bytes(out, n, right)
            if found == {"nvme": len(keys)}:
                self.nvme_loads.append((began_s + taken_s, taken_s))
            if n < len(keys):
                await self.timed(self.manager.store(keys, right, deadline_s=CALL_DEADLINE_S))
            await asyncio.sleep(PAUSE_S)

    async def _be_unknown(self) -> None:
        out = np.empty((CHAIN_BLOCKS, BLOCK_BYTES), np.uint8)
        while not self.stopping:
            keys, right = self.known(next(self._numbers))
            n = await self.timed(self.manager.load(keys, out, deadline_s=CALL_DEADLINE_S))
            assert n == 0, "nobody has stored it"
            await self.timed(self.manager.store(keys, right, deadline_s=CALL_DEADLINE_S))
            await asyncio.sleep(PAUSE_S)


class World:
    """Both far servers, and what can be wrong with them."""

    def __init__(self, redis: Valkey, s3: SeaweedServer, wire: Proxy) -> None:
        self.redis = redis
        self.s3 = s3
        self.wire = wire
        self._slow: asyncio.Task[None] | None = None

    @property
    def faults(self) -> dict[str, tuple[Act, Act]]:
        """How each begins and ends."""
        return {
            "dead": (self._die, self._live),
            "slow": (self._drag, self._hurry),
            "frozen": (self._freeze, self._thaw),
        }

    async def _die(self) -> None:
        await asyncio.to_thread(self.redis.kill)
        await self.wire.say("dead")

    async def _live(self) -> None:
        await asyncio.to_thread(self.redis.start)
        await self.wire.say("well")

    async def _drag(self) -> None:
        await self.wire.say("slow")
        self._slow = asyncio.create_task(self._pause_redis())

    async def _pause_redis(self) -> None:
        while True:
            await asyncio.to_thread(self.redis, "CLIENT", "PAUSE", SLOW_MS)
            await asyncio.sleep(SLOW_MS / 2000)

    async def _hurry(self) -> None:
        assert self._slow is not None
        self._slow.cancel()
        await asyncio.wait((self._slow,))
        await self.wire.say("well")

    async def _freeze(self) -> None:
        await asyncio.to_thread(self.redis.freeze)
        await asyncio.to_thread(self.s3.freeze)

    async def _thaw(self) -> None:
        self.redis.thaw()
        self.s3.thaw()


def tiers(world: World, directory: Path) -> list[dict[str, Any]]:
    s3_options = world.s3.storage_options(endpoint_url=world.wire.url)
    far = {"deadline": "500ms", "queue_bytes": QUEUE_BYTES}
    return [
        {"type": "nvme", "path": str(directory / "kv"), "capacity": "256MiB", "deadline": "2s"},
        {"type": "redis", "url": world.redis.url, **far},
        {"type": "fsspec", "name": "s3", "url": f"s3://{BUCKET}/kv", "storage_options": s3_options, "timeout": "2s", **far},
    ]  # fmt: skip


async def measure(world: World, directory: Path, *, phase_s: float, seed: int) -> dict[str, Any]:
    phases: list[tuple[str, float, float]] = []

    async def phase(name: str) -> None:
        began_s = time.perf_counter()
        await asyncio.sleep(phase_s)
        phases.append((name, began_s, time.perf_counter()))

    async with TieringOffloadingManager(config(*tiers(world, directory)), LAYOUT) as manager:
        load = NearLoad(manager, seed)
        await load.fill()
        async with load.running() as seen:
            for name, (begin, end) in world.faults.items():
                await phase(HEALTHY)
                await begin()
                try:
                    await phase(name)
                finally:
                    await end()
            await phase(HEALTHY)
    cpu, nvme = _by_phase(phases, seen.cpu_hits), _by_phase(phases, load.nvme_loads)
    ratios = {
        f"{kind}_p99_ratio_{name}": round(percentile_ms(taken[name], 0.99) / percentile_ms(taken[HEALTHY], 0.99), 3)
        for kind, taken in (("cpu_hit", cpu), ("nvme_load", nvme))
        for name in world.faults
    }
    return {
        "ok": not (seen.wrong_bytes or seen.hung_requests) and max(ratios.values()) <= P99_RATIO_MAX,
        "wrong_bytes": seen.wrong_bytes,
        "hung_requests": seen.hung_requests,
        **ratios,
        "cpu_hit_ms": _shown(cpu),
        "nvme_load_ms": _shown(nvme),
        "slowest_call_s": round(seen.slowest_call_s, 3),
    }


def _by_phase(phases: list[tuple[str, float, float]], taken: list[tuple[float, float]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name, _, _ in phases}
    for at_s, seconds in taken:
        for name, began_s, ended_s in phases:
            if began_s <= at_s <= ended_s:
                found[name].append(seconds)
    return found


def _shown(by_phase: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        name: {"n": len(taken), "p50": percentile_ms(taken, 0.5), "p99": percentile_ms(taken, 0.99)}
        for name, taken in by_phase.items()
    }


async def run(phase_s: float, seed: int) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = stack.enter_context(valkey(directory / "redis"))
        s3 = start_seaweed()
        stack.callback(s3.stop)
        s3.make_bucket(BUCKET)
        wire = await stack.enter_async_context(proxy(s3.endpoint_url))
        return await measure(World(redis, s3, wire), directory, phase_s=phase_s, seed=seed)


def main() -> None:
    options = parser(__doc__, freeze=False).parse_args()
    result = asyncio.run(run(options.phase_s, options.seed))
    sys.stdout.write(json.dumps(result) + "\n" if options.json else "".join(f"{k}: {v}\n" for k, v in result.items()))
    sys.exit(not result["ok"])


if __name__ == "__main__":
    main()
