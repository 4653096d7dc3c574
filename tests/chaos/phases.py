"""What a chaos run does and finds: phases, in which something is wrong or nothing is, and what they come to."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from tests.chaos.load import Load, Seen
from tiering import TieringOffloadingManager

RECOVER_S_MAX: Final = 5.0
P99_RATIO_MAX: Final = 2.0
PATIENCE_S: Final = 30.0
"""A tier that has not recovered by then never does."""
POLL_S: Final = 0.01
UNDISTURBED: Final = "undisturbed"


@dataclass
class Phase:
    name: str
    began_s: float
    ended_s: float = 0.0


@dataclass
class Result:
    """``wrong_bytes`` and ``hung_requests`` must be 0. Latencies are those of loads that the CPU tier serves alone."""

    ok: bool = False
    wrong_bytes: int = 0
    hung_requests: int = 0
    recovered_within_s: float = 0.0
    """The slowest recovery: from the moment the server serves again until the tier is up, takes stores and gives hits."""
    cpu_hit_p99_ms: float = 0.0
    """While something was wrong, and until the tier had recovered from it."""
    cpu_hit_p99_undisturbed_ms: float = 0.0
    cpu_hit_p99_ratio: float = 0.0
    cpu_hits: int = 0
    recoveries_s: dict[str, float] = field(default_factory=dict)
    phases: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 0
    slowest_call_s: float = 0.0
    loaded_blocks: int = 0
    stored_blocks: int = 0
    tier: dict[str, Any] = field(default_factory=dict)
    """What the tier's counters say: blocks by operation and outcome, errors by kind."""

    @property
    def right(self) -> bool:
        """All that does not depend on how fast the machine is."""
        seen = self.cpu_hits > 0 and self.loaded_blocks > 0
        return seen and not (self.wrong_bytes or self.hung_requests) and self.recovered_within_s < PATIENCE_S


class Run:
    """One manager under load and its far tier, called ``name``, through phases."""

    def __init__(self, manager: TieringOffloadingManager, name: str, seed: int) -> None:
        self.manager = manager
        self.load = Load(manager, seed)
        self.phases: list[Phase] = []
        self.recoveries_s: dict[str, float] = {}
        self._name = name

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phases.append(Phase(name, time.perf_counter()))
        yield
        self.phases[-1].ended_s = time.perf_counter()

    async def undisturbed(self, seconds: float) -> None:
        with self.phase(UNDISTURBED):
            await asyncio.sleep(seconds)

    async def fault(self, name: str, begin: Begin, seconds: float) -> None:
        """Something is wrong for so long, then all is well again, and the tier must notice."""
        with self.phase(name):
            end = await begin()
            try:
                await asyncio.sleep(seconds)
            finally:
                await end()
            self.recoveries_s[name] = round(await self._recovered(), 3)

    async def _recovered(self) -> float:
        """Seconds until the tier is up, and has taken blocks and given blocks since now; ``PATIENCE_S`` if it never is."""
        began_s = time.perf_counter()
        stored, loaded = self._good("store"), self._good("load")
        while self.state != "up" or self._good("store") <= stored or self._good("load") <= loaded:
            if time.perf_counter() - began_s >= PATIENCE_S:
                return PATIENCE_S
            await asyncio.sleep(POLL_S)
        return time.perf_counter() - began_s

    @property
    def state(self) -> str:
        return str(self.manager.stats()["tiers"][self._name]["state"])

    def _good(self, op: str) -> int:
        return int(self.manager.stats()["tiers"][self._name]["io"]["blocks"][op]["ok"])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Seen]:
        """Under load; it begins once blocks have come back from the tier for the first time."""
        async with self.load.running() as seen:
            await self._recovered()
            yield seen

    def result(self) -> Result:
        """Call it while the manager is open."""
        seen = self.load.seen
        io = self.manager.stats()["tiers"][self._name]["io"]
        good = self._latencies(lambda phase: phase.name == UNDISTURBED)
        bad = self._latencies(lambda phase: phase.name != UNDISTURBED)
        result = Result(
            wrong_bytes=seen.wrong_bytes,
            hung_requests=seen.hung_requests,
            recovered_within_s=max(self.recoveries_s.values()),
            cpu_hit_p99_ms=percentile_ms(bad, 0.99),
            cpu_hit_p99_undisturbed_ms=percentile_ms(good, 0.99),
            cpu_hits=len(good) + len(bad),
            recoveries_s=self.recoveries_s,
            phases=[self._shown(phase) for phase in self.phases],
            calls=seen.calls,
            slowest_call_s=round(seen.slowest_call_s, 3),
            loaded_blocks=seen.loaded_blocks,
            stored_blocks=seen.stored_blocks,
            tier={name: io[name] for name in ("blocks", "errors", "breaker_opens", "trials")},
        )
        result.cpu_hit_p99_ratio = round(result.cpu_hit_p99_ms / result.cpu_hit_p99_undisturbed_ms, 3)
        in_time = result.recovered_within_s <= RECOVER_S_MAX and result.cpu_hit_p99_ratio <= P99_RATIO_MAX
        result.ok = result.right and in_time
        return result

    def _shown(self, phase: Phase) -> dict[str, Any]:
        taken = self._latencies(lambda one: one is phase)
        return {
            "name": phase.name,
            "seconds": round(phase.ended_s - phase.began_s, 2),
            "cpu_hits": len(taken),
            "hot_chains_lost": sum(phase.began_s <= at_s <= phase.ended_s for at_s in self.load.seen.hot_losses_s),
            "cpu_hit_p50_ms": percentile_ms(taken, 0.5),
            "cpu_hit_p99_ms": percentile_ms(taken, 0.99),
        }

    def _latencies(self, wanted: Callable[[Phase], bool]) -> list[float]:
        spans = [(phase.began_s, phase.ended_s) for phase in self.phases if wanted(phase)]
        return [taken_s for at_s, taken_s in self.load.seen.cpu_hits if any(a <= at_s <= b for a, b in spans)]


End = Callable[[], Awaitable[None]]
Begin = Callable[[], Awaitable[End]]


def percentile_ms(seconds: list[float], share: float) -> float:
    """0 if there are none."""
    ordered = sorted(seconds)
    return round(1000 * ordered[int(share * (len(ordered) - 1))], 3) if ordered else 0.0


def report(result: Result, *, as_json: bool) -> None:
    """Print it, and end the process: 0 only if everything held."""
    shown = asdict(result)
    sys.stdout.write(json.dumps(shown) + "\n" if as_json else "".join(f"{k}: {v}\n" for k, v in shown.items()))
    sys.exit(not result.ok)


def parser(description: str | None, *, freeze: bool = True) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    if freeze:
        made.add_argument("--freeze-s", type=float, default=30.0, help="how long the server is stopped")
    made.add_argument("--phase-s", type=float, default=5.0, help="how long every other phase takes")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", action="store_true")
    return made
