"""Small worlds, explored to the end: every event in every state, the invariants after each, and rest in the end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.core.configs import CONFIGS
from tests.core.explore import Config, Events, explore
from tests.core.worlds import chain, spec_of
from tiering.core import events as ev
from tiering.core.state import World
from tiering.errors import InvariantViolation
from tiering.policies.prefix import PrefixPolicy


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_every_state_of_a_small_world(config: Config) -> None:
    """rows 7, 8, 12, 24, 25, 27, 35: no order of events contradicts the state, leaks a slot or leaves a caller waiting."""
    result = explore(config)
    assert result.complete
    assert result.states > 100
    assert result.drains


class Forgetful(PrefixPolicy):
    """Forgets all blocks of a run but its head."""

    def admit(self, keys: Sequence[bytes], parent: bytes | None) -> None:
        super().admit(keys[:1], parent)


def test_the_explorer_finds_a_contradiction_and_tells_the_way() -> None:
    def requests(world: World) -> Events:
        if not world.stores:
            yield ev.StoreRequested(0.0, 0, chain(2))

    with pytest.raises(InvariantViolation, match="blocks that the policy knows: 1, but by the recount 2") as caught:
        explore(Config("forgetful", spec_of(2, policy=Forgetful), requests))
    (way,) = caught.value.__notes__
    assert way.count("\n") == 2
    assert way.index("StoreRequested") < way.index("StoreFinished")


def test_an_exploration_that_runs_out_of_time_says_so() -> None:
    assert not explore(CONFIGS[0], deadline_s=0.0).complete
