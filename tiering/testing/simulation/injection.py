"""The faults that a seed may bring, and the dice that decide about them.

What the simulated world does to the product:

- *Time*: any call may be slow, or hang long past its deadline. A call that is told to stop may stop, or not.
- *Calls*: any call may fail as a whole, any item of it alone. A store that failed may have stored all the same, a
  delete that failed may have deleted.
- *Tiers*: a whole tier may refuse all calls for a while, or hang all of them; its medium may be full.
- *Shared tiers*: others add blocks and remove them; the server evicts or refuses when it is full; an answer may be
  MISSING although the block is there.
- *Data at rest*: bits flip, blocks vanish, a write is acknowledged and lost, or lands in another block's place.
- *Crashes*: what was being written is there, torn, or not there. At a power loss the latest acknowledged writes may be
  lost and the latest deletes undone; a scan may tell of what is gone. The capacity may be smaller afterwards.
- *Callers*: give up in any state, have short deadlines, fail to copy, report twice, and change the weights.

What it does not do, because no tier can be right under it: serve damaged bytes with a right checksum, say MISSING of a
block that an exclusive tier keeps, or say OK for a delete that was not done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Final

CALL_RATES: Final[Mapping[str, float]] = {
    "slow": 0.06,
    "hung": 0.015,
    "stubborn": 0.5,
    "call_failed": 0.06,
    "item_failed": 0.06,
    "done_in_the_dark": 0.4,
    "missing_though_there": 0.04,
    "refused": 0.05,
    "write_lost": 0.02,
    "write_misdirected": 0.02,
    "copy_failed": 0.05,
    "open_failed": 0.2,
    "short_deadline": 0.2,
    "orphan": 0.05,
    "torn": 0.6,
    "unsynced_lost": 0.5,
    "delete_undone": 0.5,
    "index_stale": 0.2,
    "capacity_lowered": 0.3,
}
"""Probability at each occasion, where a seed has the kind switched on."""

EVENT_RATES: Final[Mapping[str, float]] = {
    "aborted": 12.0,
    "outage": 1.0,
    "hung_outage": 0.8,
    "full": 1.0,
    "crash": 1.0,
    "power_loss": 1.0,
    "reset": 0.8,
    "flipped": 5.0,
    "vanished": 2.0,
    "stranger": 4.0,
    "stray_report": 4.0,
}
"""Times a virtual second, likewise."""


class Injector:
    """Throws the dice, and counts what it did. ``rates`` says which kinds this seed has."""

    def __init__(self, seed: int, rates: Mapping[str, float]) -> None:
        self.rates = rates
        self.dice = Random(f"{seed}/faults")
        self.counts: Counter[str] = Counter()
        self.on = True

    def strikes(self, kind: str) -> bool:
        """Whether the fault happens on this occasion; if so it is counted."""
        rate = self.rates.get(kind, 0.0)
        if not self.on or not rate or self.dice.random() >= rate:
            return False
        self.counts[kind] += 1
        return True

    def latency_s(self, typical_s: float) -> float:
        """How long something takes that is typically that fast; often less, sometimes several times more."""
        return typical_s / 4 + self.dice.expovariate(4 / 3 / typical_s)
