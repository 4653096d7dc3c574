"""What a seed makes of the world: how large, which tiers and policies, how fast, and which faults are switched on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from tiering.api import BackendCapabilities
from tiering.core.state import CoreSpec, DemoteRule, PolicyFactory, PoolSpec, TierSpec
from tiering.policies import ARCPolicy, LRUPolicy, PrefixPolicy
from tiering.testing.simulation.injection import CALL_RATES, EVENT_RATES
from tiering.testing.simulation.lane import LanePlan
from tiering.types import BlockKey

CAPABILITIES: Final[Mapping[str, BackendCapabilities]] = {
    "nvme": BackendCapabilities(
        persistent=True, shared=False, exclusive=True, alignment_bytes=4096, header_bytes=4096, can_scan=True
    ),
    "memory": BackendCapabilities(persistent=False, shared=False, exclusive=True),
    "redis": BackendCapabilities(persistent=True, shared=True, exclusive=False),
    "bucket": BackendCapabilities(persistent=True, shared=True, exclusive=False, can_delete=False),
}
POLICIES: Final[tuple[PolicyFactory, ...]] = (PrefixPolicy, PrefixPolicy, LRUPolicy, ARCPolicy)
EPOCHS: Final = ("weights-1", "weights-2", "weights-3")
KIND_ON: Final = 0.4
"""Probability that a kind of fault is switched on: few at a time find what all at once would hide."""

CALM: Final = 0.1
"""Share of seeds without any fault, where more is promised."""


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    core: CoreSpec
    lanes: Mapping[str, LanePlan]
    server_blocks: Mapping[str, tuple[int, bool]]
    """Of the shared tiers: how many blocks the server keeps, and whether it evicts beyond that."""
    rates: Mapping[str, float]
    users: int
    think_s: float

    @property
    def calm(self) -> bool:
        return not self.rates


def scenario(seed: int) -> Scenario:
    """The same for the same seed, everywhere."""
    dice = Random(f"{seed}/scenario")
    default = dice.choice(POLICIES)
    pools = tuple(_pool(dice, default) for _ in range(dice.choice([1, 1, 1, 2])))
    names = dice.sample(sorted(CAPABILITIES), dice.choice([0, 1, 1, 2, 2, 2, 3]))
    tiers = tuple(_tier(dice, name, default, pools) for name in names)
    core = CoreSpec(
        pools,
        tiers,
        load_bytes_per_request_max=dice.choice([1, 3, 8, 64]) * pools[0].payload_bytes,
        probe_keys_max=dice.choice([2, 16, 1024]),
        verdict_ttl_s=dice.choice([0.05, 0.5, 2.0]),
        verdicts_max=dice.choice([128, 1024]),
        restore=dice.random() < 0.9,
        restore_pause_s=0.05,
    )
    lanes = {name: _lane(dice) for name in names}
    servers = {name: (dice.choice([5, 30, 200]), dice.random() < 0.7) for name in names}
    rates: dict[str, float] = {}
    if dice.random() >= CALM:
        rates = {kind: rate for kind, rate in {**CALL_RATES, **EVENT_RATES}.items() if dice.random() < KIND_ON}
    return Scenario(seed, core, lanes, servers, rates, dice.randint(1, 6), dice.choice([0.0, 0.005, 0.05]))


def _pool(dice: Random, policy: PolicyFactory) -> PoolSpec:
    slots = dice.choice([2, 3, 4, 6, 8, 12, 16, 24])
    payload_bytes = dice.choice([4096, 4096, 1000, 8192])
    return PoolSpec(slots, payload_bytes, 16, dice.randint(0, min(2, slots - 1)), policy)


def _tier(dice: Random, name: str, policy: PolicyFactory, pools: tuple[PoolSpec, ...]) -> TierSpec:
    caps = CAPABILITIES[name]
    sizes = [pool.payload_bytes for pool in pools]
    if name == "bucket" and dice.random() < 0.3:
        caps = replace(caps, value_bytes_max=min(sizes))
    rules: list[DemoteRule] = ["on_store", "on_store", "on_store", "on_evict", "never", 1, 2]
    return TierSpec(
        name,
        caps,
        dice.choice([1, 3, 8, 20, 60]) * caps.stored_bytes(max(sizes)) if caps.exclusive else None,
        dice.choice(rules),
        dice.choice([1, 2, 4, 16]) * max(sizes),
        dice.choice([1, 2, 4, 8]),
        dice.choice((policy, policy, *POLICIES)),
        min(sizes),
    )


def _lane(dice: Random) -> LanePlan:
    return LanePlan(
        latency_s=dice.choice([0.0005, 0.002, 0.01]),
        deadline_s=dice.choice([0.05, 0.2, 0.5]),
        ops_max=dice.choice([1, 2, 4]),
        cooldown_s=dice.choice([0.02, 0.2]),
    )


@dataclass(frozen=True, slots=True)
class Path:
    """One conversation as far as it has got: keys of a pool, head first."""

    pool: int
    keys: tuple[BlockKey, ...]


class Workload:
    """Conversations of many turns behind a few shared beginnings; some are much more popular than others."""

    def __init__(self, seed: int, pools: tuple[PoolSpec, ...]) -> None:
        self._dice = Random(f"{seed}/workload")
        self._pools = pools
        self._blocks = 0
        self.paths: list[Path] = []
        """Most popular first, roughly."""
        self.all_paths: dict[Path, None] = {}
        """Every longest path that was ever used, in order."""
        self._roots: list[list[Path]] = []
        for pool in range(len(pools)):
            root = [self._longer(Path(pool, ()), self._dice.randint(1, 3)) for _ in range(2)]
            self._roots.append([*root, Path(pool, ())])
            self.paths += root

    def turn(self) -> Path:
        """The path of somebody's next turn: a conversation goes on, is asked again, forks, or begins."""
        dice = self._dice
        path = self.paths[min(int(dice.paretovariate(0.7)) - 1, len(self.paths) - 1)]
        pick = dice.random()
        if pick < 0.2 or len(path.keys) > 2 * self._pools[path.pool].slots:
            fresh = self._longer(dice.choice(dice.choice(self._roots)), dice.randint(1, 3))
            self.paths.insert(dice.randint(0, min(4, len(self.paths))), fresh)
            del self.paths[24:]
            return fresh
        if pick < 0.4:
            return path
        if pick < 0.5 and path.keys:
            fork = Path(path.pool, path.keys[: dice.randint(0, len(path.keys))])
            fresh = self._longer(fork, dice.randint(1, 2))
            self.paths[dice.randrange(len(self.paths))] = fresh
            return fresh
        longer = self._longer(path, dice.randint(1, 3))
        self.paths[self.paths.index(path)] = longer
        return longer

    def _longer(self, path: Path, blocks: int) -> Path:
        keys = list(path.keys)
        for _ in range(blocks):
            self._blocks += 1
            seed = keys[-1] if keys else b""
            keys.append(hashlib.blake2b(seed + self._blocks.to_bytes(4, "big"), digest_size=6).digest())
        longer = Path(path.pool, tuple(keys))
        self.all_paths.pop(path, None)
        self.all_paths[longer] = None
        return longer
