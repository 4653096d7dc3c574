"""Row 4, permanent holes: whatever was accepted, refused, failed or evicted on the way, what the GPU holds can come back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.connectors.bare import TOKENS, Bare, Prompt, bare
from tiering import Outcome
from tiering.connectors.wire import ConnectorMetadata
from tiering.testing import VirtualClock

SLOTS = 24


@dataclass
class Run:
    """Requests that run on through everything; each computes ``pace`` tokens a step, until it has all of its prompt."""

    world: Bare
    requests: list[Prompt]
    computed: dict[str, int] = field(default_factory=dict)
    steps: list[ConnectorMetadata] = field(default_factory=list)
    leases: list[int] = field(default_factory=list)
    others: int = 0

    def begin(self) -> None:
        for number, request in enumerate(self.requests):
            self.world.half.get_num_new_matched_tokens(request, 0)
            self.world.half.update_state_after_alloc(request, (self.table(number),), 0)
            self.computed[request.request_id] = 0

    def table(self, number: int) -> list[int]:
        """Requests that share their prompt's beginning have GPU blocks of their own: nobody says that they must share."""
        return [100 * (number + 1) + block for block in range(12)]

    def step(self, pace: int) -> None:
        rows = []
        for number, request in enumerate(self.requests):
            computed = self.computed[request.request_id]
            tokens = min(pace, request.num_tokens - computed)
            rows.append((request, (self.table(number),), computed, tokens))
            self.computed[request.request_id] += tokens
        self.steps.append(self.world.step(*rows))

    def copied(self, *, ok: bool) -> None:
        if self.steps:
            step = self.steps.pop(0)
            self.world.report(step, failed=[] if ok else list(step.store_jobs))

    def others_store(self, blocks: int, *, ok: bool = True) -> None:
        """They evict what is idle. If their copies fail, the slots are free again."""
        self.others += 1
        sync = self.world.manager.sync
        plan = sync.plan_store([b"x%d %d" % (self.others, n) for n in range(blocks)])
        if plan.job:
            outcome = Outcome.OK if ok else Outcome.failed("EIO")
            sync.complete(plan.job, [outcome] * len(plan.grants))

    def others_lease(self) -> None:
        """Somebody reads all that is there: nothing of it can go, and stores are refused."""
        ready = list(self.world.ready())
        self.leases += [self.world.manager.sync.lease([key]).job for key in ready]

    def leases_end(self) -> None:
        for job in self.leases:
            self.world.manager.sync.release(job)
        self.leases.clear()


ACTIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 12)),
    st.tuples(st.just("copied"), st.booleans()),
    st.tuples(st.just("others"), st.integers(1, SLOTS)),
    st.tuples(st.just("lease"), st.just(0)),
    st.tuples(st.just("unlease"), st.just(0)),
)


@pytest.mark.parametrize("policy", ["prefix", "lru", "arc"])
@settings(max_examples=30)
@given(actions=st.lists(ACTIONS, max_size=40))
def test_permanent_hole_any_interleaving_of_accept_refuse_fail_and_evict(
    policy: str, actions: list[tuple[str, int]]
) -> None:
    """Row 4. At last there is room, and time: all that the requests hold is there again, to the last block."""
    clock = VirtualClock()
    with bare(slots=SLOTS, config={"primary": {"policy": policy}}, clock=clock) as world:
        run = Run(world, [Prompt("a", 40, "a"), Prompt("b", 28, "b"), Prompt("c", 17, "a")])
        run.begin()
        for action, number in actions:
            match action:
                case "step":
                    run.step(number)
                case "copied":
                    run.copied(ok=bool(number))
                case "others":
                    run.others_store(number)
                case "lease":
                    run.others_lease()
                case "unlease":
                    run.leases_end()
        run.leases_end()
        for _ in range(12):
            run.step(12)
            asyncio.run(clock.advance(0.1))
            while run.steps:
                run.copied(ok=True)
            run.others_store(SLOTS, ok=False)  # what is idle goes, and nothing comes: there is room
        for _ in range(2):
            run.step(0)
            while run.steps:
                run.copied(ok=True)
        for request in run.requests:
            assert set(request.keys()) <= world.ready(), request
        for number, request in enumerate(run.requests):
            world.half.request_finished(request, (run.table(number),))
        world.report(world.step())


def test_permanent_hole_a_refused_tail_is_offered_again_in_the_next_step() -> None:
    """Row 4. The cursor stops where no slot was left, and does not count the block where it stopped."""
    with bare(slots=4) as world:
        request = Prompt("r", 6 * TOKENS)
        world.put([b"x%d" % n for n in range(4)])
        lease = world.manager.sync.lease([b"x0"]).job, world.manager.sync.lease([b"x1"]).job
        world.half.get_num_new_matched_tokens(request, 0)
        world.half.update_state_after_alloc(request, (list(range(1, 7)),), 0)
        first = world.step((request, (list(range(1, 7)),), 0, 24))
        (job,) = first.store_jobs.values()
        assert job.spec.source.block_ids == (1, 2), "the head that fits"
        world.report(first)
        for one in lease:
            world.manager.sync.release(one)
        # In a step that computes nothing for it.
        second = world.step((request, (list(range(1, 7)),), 24, 0))
        (job,) = second.store_jobs.values()
        assert job.spec.source.block_ids == (3, 4)
        world.report(second)
        world.half.request_finished(request, (list(range(1, 7)),))
        world.report(world.step())


def test_permanent_hole_with_restore_off_it_stays() -> None:
    """The switch: so that its worth can be measured."""
    for enabled in (True, False):
        with bare(slots=8, config={"primary": {"policy": "lru"}, "restore": {"enabled": enabled}}) as world:
            request = Prompt("r", 4 * TOKENS)
            table = (list(range(1, 5)),)
            world.half.get_num_new_matched_tokens(request, 0)
            world.half.update_state_after_alloc(request, table, 0)
            world.report(world.step((request, table, 0, 16)))
            world.manager.sync.touch(request.keys()[1:])
            world.put([b"x%d" % n for n in range(5)])
            assert not world.ready() & {request.keys()[0]}
            world.report(world.step((request, table, 16, 0)))
            assert (request.keys()[0] in world.ready()) == enabled
            world.half.request_finished(request, table)
            world.report(world.step())


def test_a_restore_stays_within_the_bytes_of_a_step() -> None:
    budget = {"restore": {"bytes_per_step_max": 2 * 64}}
    with bare(slots=32, config={"primary": {"policy": "lru"}, **budget}) as world:
        request = Prompt("r", 12 * TOKENS)
        table = (list(range(1, 13)),)
        world.half.get_num_new_matched_tokens(request, 0)
        world.half.update_state_after_alloc(request, table, 0)
        world.report(world.step((request, table, 0, 48)))
        sync = world.manager.sync
        sync.complete((plan := sync.plan_store([b"x%d" % n for n in range(32)])).job, [_FAILED] * len(plan.grants))
        assert not world.ready()
        restored = []
        for _ in range(6):
            step = world.step((request, table, 48, 0))
            (job,) = step.store_jobs.values()
            restored.append(job.spec.source.block_ids)
            world.report(step)
        assert restored == [(n, n + 1) for n in range(1, 13, 2)], "head first, two blocks a step"
        world.half.request_finished(request, table)
        world.report(world.step())


_FAILED = Outcome.failed("EIO")
