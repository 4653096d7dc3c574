"""Leases of READY blocks by key: offered within a step, kept by those who load them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tiering.errors import TieringError
from tiering.sync import SyncFace
from tiering.types import BlockKey


@dataclass(slots=True)
class _Lease:
    """One lease job. It ends when none of its keys is offered or taken."""

    job: int
    uses: int = 0
    """Keys taken, each as often as it was."""
    offered: bool = True


class Leases:
    """One thread calls."""

    def __init__(self, sync: SyncFace) -> None:
        self._sync = sync
        self._offered: dict[BlockKey, tuple[_Lease, int]] = {}
        """Of this step: the lease, and the block's slot."""
        self._taken: dict[BlockKey, list[_Lease]] = {}

    def __contains__(self, key: BlockKey) -> bool:
        """Whether the block was offered in this step."""
        return key in self._offered

    def offer(self, run: Sequence[BlockKey], group: int) -> bool:
        """Whether ``run[0]`` is READY; it then stays until the step ends, and longer if it is taken.

        ``run`` names what will be asked next: its READY head is leased together, as far as nothing of it was offered yet.
        """
        fresh = list(itertools.takewhile(lambda key: key not in self._offered, run))
        plan = self._sync.lease(fresh, group=group)
        if not plan.slots:
            if plan.job:
                self._sync.release(plan.job)
            return False
        lease = _Lease(plan.job)
        self._offered.update((key, (lease, slot)) for key, slot in zip(fresh, plan.slots, strict=False))
        return True

    def take(self, key: BlockKey) -> int:
        """The slot of a block that was offered in this step; leased until ``give_back``."""
        if key not in self._offered:
            raise TieringError(f"block {key.hex()} is to be loaded and was not offered in this step")
        lease, slot = self._offered[key]
        lease.uses += 1
        self._taken.setdefault(key, []).append(lease)
        return slot

    def give_back(self, key: BlockKey) -> None:
        """One load of the block has ended. Unknown keys are ignored: a reset may have given them back."""
        leases = self._taken.get(key)
        if not leases:
            return
        lease = leases.pop(0)
        if not leases:
            del self._taken[key]
        lease.uses -= 1
        self._end(lease)

    def taken(self) -> list[BlockKey]:
        """Blocks being loaded, as often as they are."""
        return [key for key, leases in self._taken.items() for _ in leases]

    def end_step(self) -> None:
        """Offers end."""
        leases = {lease.job: lease for lease, _ in self._offered.values()}
        self._offered.clear()
        for lease in leases.values():
            lease.offered = False
            self._end(lease)

    def end_all(self) -> None:
        """Loads end too: nobody reads any more."""
        self.end_step()
        for key in self.taken():
            self.give_back(key)

    def _end(self, lease: _Lease) -> None:
        if not lease.offered and not lease.uses:
            self._sync.release(lease.job)
