"""The chaos runs, short: what must hold on any machine. The times and their ratios are for the runs by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.chaos import redis, s3
from tests.chaos.load import UNTOUCHED, chain, content, rows, wrong_bytes
from tests.chaos.phases import Result
from tests.servers.seaweed import SeaweedServer
from tests.servers.valkey import valkey


def require_right(result: Result, faults: set[str]) -> None:
    assert (result.wrong_bytes, result.hung_requests) == (0, 0)
    assert result.recoveries_s.keys() == faults, "the tier came back after each"
    assert result.right, result
    assert all(phase["cpu_hits"] for phase in result.phases if phase["seconds"] >= 0.5), "CPU hits go on throughout"
    assert result.tier["blocks"]["load"]["ok"] > 0


async def test_redis_killed_restarted_frozen_and_emptied_under_load(tmp_path: Path) -> None:
    """rows 8, 9, 10, 13: no wrong byte, no request that hangs, and the tier comes back by itself each time."""
    with valkey(tmp_path) as server:
        result = await redis.chaos(server, phase_s=0.4, freeze_s=1.0, seed=1)
    require_right(result, {"killed", "restarted at once", "frozen", "emptied"})
    assert result.tier["breaker_opens"]["read"] > 0, "nothing was wrong"


async def test_s3_with_every_fault_of_its_wire_under_load(seaweed: SeaweedServer) -> None:
    """rows 8, 9, 10, 13: the same, and damaged bodies are never hits."""
    seaweed.make_bucket(s3.BUCKET)
    result = await s3.chaos(seaweed, phase_s=0.4, freeze_s=1.0, seed=1)
    require_right(result, {*s3.FAULTS, "frozen"})
    assert result.tier["blocks"]["load"]["corrupt"] > 0, "no damaged body was seen"
    assert result.tier["blocks"]["load"]["failed"] > 0


def test_the_oracle_counts_every_byte() -> None:
    """Two chains share no block, and one flipped, one swapped and one touched byte are each seen."""
    keys = chain(1)
    right = rows(keys)
    assert not set(keys) & set(chain(2))
    assert not np.array_equal(content(keys[0]), content(keys[1]))
    out = np.full_like(right, UNTOUCHED)
    assert wrong_bytes(out, 0, right) == 0
    out[:4] = right[:4]
    assert wrong_bytes(out, 4, right) == 0
    out[2, 100] ^= 1
    out[5, 7] = 0
    assert wrong_bytes(out, 4, right) == 2
    assert wrong_bytes(right[::-1].copy(), len(keys), right) > 0.9 * right.size


@pytest.mark.parametrize(
    ("changes", "right"),
    [({}, True), ({"wrong_bytes": 1}, False), ({"hung_requests": 1}, False), ({"loaded_blocks": 0}, False)],
)
def test_a_run_is_right_only_if_everything_held_and_something_was_loaded(changes: dict[str, int], right: bool) -> None:
    assert Result(**{"cpu_hits": 1, "loaded_blocks": 1, **changes}).right is right  # type: ignore[arg-type]
