"""The simulation can fail: each planted defect is found, for the reason that it is there, within a few seeds."""

from __future__ import annotations

import itertools

import pytest

from tests.simulation import defects
from tiering.core.machine import TieringCore
from tiering.testing.simulation import Medium, Result, scenario, simulate

SEEDS_MAX = 15
STEPS = 400


def found(told: str, needs: str, core: type[TieringCore] = TieringCore, medium: type[Medium] = Medium) -> Result:
    """The first run that says so, among those whose seeds have all that the defect needs to show."""
    others = []
    for seed in itertools.islice(filter(lambda seed: has(seed, needs.split()), itertools.count()), SEEDS_MAX):
        result = simulate(seed, STEPS, core=core, medium=medium)
        if told in result.failure:
            return result
        others += [result.failure] if result.failure else []
    pytest.fail(f"{core.__name__} with {medium.__name__} passes for sound, but for {others}")


def has(seed: int, needs: list[str]) -> bool:
    """``needs`` names faults that must be on, tiers that must be there, and demotion rules."""
    world = scenario(seed)
    tiers = {tier.name for tier in world.core.tiers} | {str(tier.demote_rule) for tier in world.core.tiers}
    return all(need in world.rates or need in tiers for need in needs)


@pytest.mark.parametrize(
    ("core", "needs", "told"),
    [
        (defects.FreesDoomedSlots, "nvme on_store slow hung", "while it is lent to promotion"),
        (defects.ForgetsReleases, "", "load job"),
        (defects.ForgetsFailedDemotions, "bucket on_store item_failed", "should be there, and is not even owed"),
        (defects.IgnoresRecovery, "nvme on_store outage", "the core takes it for down"),
        (defects.KeepsStaleVerdicts, "redis on_store vanished", "or it has said otherwise"),
        (defects.LosesEnds, "nvme on_store short_deadline", "overdue, and it does not end"),
        (defects.LosesWakeUps, "nvme on_store short_deadline", "came free without a word"),
        (defects.LosesHoles, "", "held blocks are missing"),
        (defects.KeepsOldWeights, "reset", "wrong bytes"),
        (defects.GivesUpAtOnce, "", "with 1 slots free"),
        (defects.AsksForEver, "redis", "livelock"),
    ],
)
def test_a_defect_of_the_core_is_found(core: type[TieringCore], needs: str, told: str) -> None:
    """Rows 3, 4, 5, 7, 8, 9, 16, 25."""
    assert found(told, needs, core=core).journal


@pytest.mark.parametrize(
    ("medium", "needs", "told"),
    [
        (defects.ServesNeighbours, "nvme on_store", "wrong bytes"),
        (defects.TrustsItsDisk, "nvme on_store flipped", "wrong bytes"),
        (defects.SealsTornBlocks, "nvme on_store torn crash", "wrong bytes"),
        (defects.MixesNamespaces, "redis on_store reset", "wrong bytes"),
        (defects.TakesMoreThanItSays, "nvme on_store", "are on the medium"),
        (defects.KeepsWhatItDeletes, "nvme on_store", "are on the medium"),
    ],
)
def test_a_defect_of_a_tier_is_found(medium: type[Medium], needs: str, told: str) -> None:
    """Rows 13, 16, 17, 20."""
    assert found(told, needs, medium=medium).tally.wrong_bytes == (told == "wrong bytes")
