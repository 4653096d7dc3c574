"""Random histories against a dict: stores, loads, deletes, full tiers, restarts, kills, other namespaces and capacities."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from backends.nvme.backend import NvmeBackend
from tests.backends.nvme import rig
from tests.backends.nvme.rig import MIB, MISSING, OK, disk_bytes, key_of, stored_bytes

SIZES = (4097, 100_000, 300_000)
picks = st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True)


class NvmeMachine(RuleBasedStateMachine):
    """``model`` holds (epoch, key number) of what is stored, oldest use first; a block's size follows from its key."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.path = Path(tempfile.mkdtemp(prefix="nvme-machine-"))
        self.capacity = 4 * MIB
        self.o_direct = True
        self.recover = "quiet"
        self.model: dict[tuple[int, int], None] = {}
        self.open(0)

    def open(self, epoch: int) -> None:
        self.epoch = epoch
        self.backend = NvmeBackend(
            rig.config(self.path, capacity=self.capacity, threads=2, o_direct=self.o_direct, recover=self.recover)
        )
        self.spoken = rig.namespace(*SIZES, epoch=str(epoch))
        self.runner.run(self.backend.open(self.spoken))

    @property
    def live_bytes(self) -> int:
        return sum(stored_bytes(SIZES[number % 3]) for _, number in self.model)

    @property
    def budget_bytes(self) -> int:
        return self.capacity - self.backend.capabilities.overhead_bytes

    @rule(numbers=picks)
    def store(self, numbers: list[int]) -> None:
        items = [(key_of(number), rig.filled(key_of(number), SIZES[number % 3])) for number in numbers]
        new_bytes = sum(stored_bytes(SIZES[n % 3]) for n in numbers if (self.epoch, n) not in self.model)
        outcomes = self.runner.run(self.backend.store(items))
        if self.live_bytes + new_bytes <= self.budget_bytes:
            assert rig.codes(outcomes) == [OK] * len(numbers)
        for number, outcome in zip(numbers, outcomes, strict=True):
            assert outcome.ok or outcome.code is rig.REFUSED
            assert outcome.ok or (self.epoch, number) not in self.model
            if outcome.ok:
                self.model.setdefault((self.epoch, number))

    @rule(numbers=picks)
    def load(self, numbers: list[int]) -> None:
        for number in numbers:
            expected = OK if (self.epoch, number) in self.model else MISSING
            assert self.runner.run(rig.load(self.backend, [key_of(number)], SIZES[number % 3])) == [expected]

    @rule(numbers=picks)
    def touch(self, numbers: list[int]) -> None:
        self.backend.touch([key_of(number) for number in numbers])
        for number in numbers:
            if (self.epoch, number) in self.model:
                del self.model[self.epoch, number]
                self.model[self.epoch, number] = None

    @rule(numbers=picks)
    def delete(self, numbers: list[int]) -> None:
        outcomes = self.runner.run(self.backend.delete([key_of(number) for number in numbers]))
        for number, outcome in zip(numbers, outcomes, strict=True):
            assert outcome.ok is ((self.epoch, number) in self.model)
            self.model.pop((self.epoch, number), None)

    @rule(count=st.integers(1, 3))
    def evict_as_listed(self, count: int) -> None:
        listed = self.runner.run(rig.scanned(self.backend))
        self.runner.run(self.backend.delete([entry.handle for entry in listed[:count]]))
        for entry in listed[:count]:
            del self.model[self.named(entry.handle)]

    @rule(
        epoch=st.integers(0, 2),
        mib=st.sampled_from([2, 3, 4, 6]),
        recover=st.sampled_from(["quiet", "strict"]),
        o_direct=st.booleans(),
    )
    def restart(self, epoch: int, mib: int, recover: str, o_direct: bool) -> None:
        self.runner.run(self.backend.aclose(10))
        self.capacity, self.o_direct, self.recover = mib * MIB, o_direct, recover
        self.open(epoch)
        listed = self.runner.run(rig.scanned(self.backend))
        for entry in listed:
            if self.live_bytes > self.budget_bytes:
                self.runner.run(self.backend.delete([entry.handle]))
                del self.model[self.named(entry.handle)]

    @rule()
    def killed_and_restarted(self) -> None:
        """The files as they are between two calls are what SIGKILL leaves; only touches may be lost."""
        image = Path(tempfile.mkdtemp(prefix="nvme-machine-"))
        shutil.copytree(self.path, image, dirs_exist_ok=True)
        self.runner.run(self.backend.aclose(10))
        shutil.rmtree(self.path)
        self.path = image
        self.open(self.epoch)
        listed = self.runner.run(rig.scanned(self.backend))
        found = [self.named(entry.handle) for entry in listed]
        assert set(found) == set(self.model)
        self.model = dict.fromkeys(found)

    def named(self, handle: bytes) -> tuple[int, int]:
        numbers = {key_of(number): number for number in range(12)}
        if len(handle) == 36:
            return self.epoch, numbers[handle]
        digests = {rig.namespace(*SIZES, epoch=str(epoch)).digest: epoch for epoch in range(3)}
        return digests[handle[:32]], numbers[handle[36:]]

    @invariant()
    def bytes_are_right(self) -> None:
        usage = self.runner.run(self.backend.usage())
        assert usage.live_bytes == self.live_bytes
        assert usage.allocated_bytes == disk_bytes(self.path / "default") <= self.capacity

    @invariant()
    def listed_in_order_of_use(self) -> None:
        listed = [self.named(entry.handle) for entry in self.runner.run(rig.scanned(self.backend))]
        own = [one for one in self.model if one[0] == self.epoch]
        assert sorted(listed) == sorted(self.model)
        assert listed[len(self.model) - len(own) :] == own

    def teardown(self) -> None:
        self.runner.run(self.backend.aclose(10))
        self.runner.close()
        shutil.rmtree(self.path)


def test_random_histories_agree_with_a_dict() -> None:
    """rows 17, 19 and 22"""
    run_state_machine_as_test(
        NvmeMachine,
        settings=settings(
            max_examples=15,
            stateful_step_count=15,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
