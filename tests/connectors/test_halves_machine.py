"""Both halves under a random engine: requests come, run, are preempted, aborted and finish while blocks are evicted and copies
and tiers fail. Nothing raises, every byte that is read or stored is right, and at the end nothing is leased.

The copies are made at the last moment at which a device might make them, and nothing depends on the machine's speed: time
stands still unless a rule advances it, and the tiers do what is due between two rules.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.connectors.rig import FULL, RECURRENT, WIDE, WINDOW, Rig, prompt
from tests.manager.world import faulty
from tiering import Outcome
from tiering.api import BackendError
from tiering.connectors.reference import CacheGroup, Request
from tiering.connectors.requests import RequestLimits
from tiering.connectors.wire import JobReport, WorkerOutput
from tiering.core.invariants import check
from tiering.testing import FaultPlan, VirtualClock

PROMPT_TOKENS_MAX = 48
OUTPUT_TOKENS_MAX = 12
STEP_TOKENS = 32
DRAIN_STEPS_MAX = 600
LONG_RUN_ACTIONS = 70
OPEN_REQUESTS_MAX = 8


@dataclasses.dataclass(frozen=True)
class World:
    groups: tuple[CacheGroup, ...]
    gpu_blocks: int
    span: int = 1
    ranks: int = 1


FULL_ONLY = World((FULL,), 23)
WITH_WINDOW = World((FULL, WINDOW), 40)
WINDOWS_ALONE = World((WIDE,), 12)
ALL_KINDS = World((FULL, WIDE, RECURRENT), 46)
SPANS = World((FULL,), 23, span=2)
SPANS_OF_WINDOWS = World((FULL, WINDOW), 40, span=2)
RANKS = World((FULL, WINDOW), 40, ranks=2)

WORLDS = {
    "full": FULL_ONLY,
    "window": WITH_WINDOW,
    "windows alone": WINDOWS_ALONE,
    "all kinds": ALL_KINDS,
    "spans": SPANS,
    "spans of windows": SPANS_OF_WINDOWS,
    "ranks": RANKS,
}

TROUBLES = [
    "copies", "copies", "calls load", "calls store", "calls contains", "blocks load", "blocks load", "blocks contains",
    "hang load", "hang contains", "hang store", "heal", "heal", "time", "time", "weights", "nonsense",
]  # fmt: skip
WRONG = [Outcome.MISSING, Outcome.failed("EIO"), Outcome.corrupt("bits")]


@dataclasses.dataclass(frozen=True)
class Ask:
    """What somebody asks the engine for."""

    seed: int
    tokens: int
    outputs: int
    salt: bytes
    limits: RequestLimits | None


limits = st.builds(
    RequestLimits,
    load_tokens_max=st.sampled_from([None, 0, 8, 13]),
    store_tokens_max=st.sampled_from([None, 0, 8, 13]),
    load_tiers=st.sampled_from([None, frozenset({"primary"}), frozenset({"far"})]),
)
requests = st.builds(
    Ask,
    seed=st.sampled_from([1, 1, 1, 2]),
    tokens=st.integers(1, PROMPT_TOKENS_MAX),
    outputs=st.integers(1, OUTPUT_TOKENS_MAX),
    salt=st.sampled_from([b"", b"", b"", b"salt"]),
    limits=st.one_of(st.none(), st.none(), st.none(), limits),
)


class HalvesMachine(RuleBasedStateMachine):
    """``world`` is set in a subclass."""

    world: World

    @initialize(
        slots=st.integers(5, 40),
        policy=st.sampled_from(["prefix", "lru", "arc"]),
        store_when=st.sampled_from(["computed", "finished", "gpu_evicted", "adaptive"]),
        restore=st.booleans(),
        budget_blocks=st.sampled_from([1, 4, 1000]),
        tier=st.sampled_from(["none", "far", "shared"]),
        in_step=st.booleans(),
        prompt_only=st.booleans(),
    )
    def begin(
        self,
        slots: int,
        policy: str,
        store_when: str,
        restore: bool,
        budget_blocks: int,
        tier: str,
        in_step: bool,
        prompt_only: bool,
    ) -> None:
        self.clock = VirtualClock()
        self.plan = FaultPlan()
        config: dict[str, Any] = {
            "primary": {"policy": policy, "store_when": store_when},
            "restore": {"enabled": restore, "bytes_per_step_max": budget_blocks * FULL.block_bytes},
            "flush_on_close": 0,
        }
        if tier != "none":
            far, self.plan = faulty("far", blocks=24, shared=tier == "shared", deadline_s=1.0)
            config["tiers"] = [far]
        self.rig = Rig(
            self.world.groups,
            slots=slots,
            gpu_blocks=self.world.gpu_blocks,
            ranks=self.world.ranks,
            span=self.world.span,
            config=config,
            step_tokens=STEP_TOKENS,
            clock=self.clock,
            held=True,
            prompt_only=prompt_only,
            load_in_step_bytes_max=1 << 20 if in_step else 0,
        )
        self.epoch = 0
        self.foreign = 0
        self.hangs = False
        self.told: list[WorkerOutput] = []

    # -- what users do ------------------------------------------------------------------------------------------------

    @property
    def open_requests(self) -> list[Request]:
        return [*self.rig.engine.scheduler.running, *self.rig.engine.scheduler.waiting]

    @rule(asked=st.lists(requests, min_size=1, max_size=3), gpu_forgets=st.booleans())
    def admit(self, asked: list[Ask], gpu_forgets: bool) -> None:
        """``gpu_forgets``: the engine has dropped the content of its idle blocks, so that the tiers are asked for all of it."""
        if gpu_forgets:
            self.rig.forget_gpu()
        for ask in asked:
            if len(self.open_requests) < OPEN_REQUESTS_MAX:
                self.rig.add(prompt(ask.seed, ask.tokens), ask.outputs, salt=ask.salt, limits=ask.limits)

    @rule(steps=st.integers(1, 12))
    def run(self, steps: int) -> None:
        """Copies are quick."""
        for _ in range(steps):
            self.one_step(1000, 1000)

    @rule(steps=st.integers(1, 6), stores=st.integers(0, 2), loads=st.integers(0, 1))
    def crawl(self, steps: int, stores: int, loads: int) -> None:
        """Copies are slow: so many end in a step."""
        for _ in range(steps):
            self.one_step(stores, loads)

    def one_step(self, stores: int, loads: int) -> None:
        self.rig.step()
        for engine in self.rig.stores:
            engine.release(stores)
        for engine in self.rig.loads:
            engine.release(loads)
        self.rig.turn()

    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        if requests := self.open_requests:
            self.rig.engine.abort(requests[which % len(requests)].request_id)

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    @rule(blocks=st.integers(1, 12), group=st.integers(0, 2))
    def others_store(self, blocks: int, group: int) -> None:
        """Somebody else needs slots: blocks of the requests are evicted."""
        group %= len(self.world.groups)
        sync = self.rig.manager.sync
        keys = [b"other %d %d" % (self.foreign, n) for n in range(blocks)]
        self.foreign += 1
        plan = sync.plan_store(keys, group=group)
        if plan.job:
            sync.complete(plan.job, [Outcome.OK] * len(plan.grants))
        self.rig.turn()

    @rule(trouble=st.sampled_from(TROUBLES), number=st.integers(0, 9), times=st.integers(1, 3))
    def trouble(self, trouble: str, number: int, times: int) -> None:
        plan, op = self.plan, trouble.partition(" ")[2]
        match trouble.partition(" ")[0]:
            case "copies":
                self.rig.copies[number % len(self.rig.copies)].fail_next += times
            case "calls":
                error = BackendError("injected", tier="far", op=op, retryable=True)
                plan.fail_calls(cast(Any, op), lambda: error, times=times)
            case "blocks":
                plan.outcomes(cast(Any, op), WRONG[number % len(WRONG)], times=times)
            case "hang":
                plan.hang(cast(Any, op))
                self.hangs = True
            case "heal":
                plan.heal()
                self.hangs = False
                self.rig.turn()
            case "time":
                asyncio.run(self.clock.advance((0.1, 1.5, 40.0)[times - 1]))
            case "weights":
                self.weights_change()
            case "nonsense":
                self.nonsense(number, times)

    def weights_change(self) -> None:
        if self.hangs:  # a reset waits for what hangs, by a clock that stands still
            return
        self.epoch += 1
        self.rig.manager.sync.reset(str(self.epoch))
        self.rig.runner.weights = b"%d" % self.epoch
        self.rig.engine.reset_prefix_cache()

    def nonsense(self, job: int, ranks: int) -> None:
        """Somebody reports jobs that have ended, or never were."""
        if job in self.rig.wire.open_jobs:
            return
        before = self.rig.scheduler.stats()["unknown_reports"]
        self.rig.scheduler.update_connector_output(
            WorkerOutput({job: JobReport(frozenset(range(ranks)), frozenset((0,)), "?")})
        )
        assert self.rig.scheduler.stats()["unknown_reports"] == before + ranks

    # -- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def nothing_contradicts_itself(self) -> None:
        if not hasattr(self, "rig"):
            return
        check(self.rig.manager.parts.core.world)
        assert not self.rig.manager.stats()["fused"]
        self.rig.check_slots()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        try:
            self.plan.heal()
            for engine in self.rig.copies:
                engine.held = False
            self.drain()
            self.rig.settle()
            self.rig.check_slots()
        finally:
            self.plan.heal()
            self.rig.close()

    def drain(self) -> None:
        for _ in range(DRAIN_STEPS_MAX):
            self.rig.turn()
            if not self.rig.engine.has_work:
                return
            if not self.rig.step().scheduled_tokens:
                asyncio.run(self.clock.advance(0.25))
        note(repr(self.rig.scheduler.stats()))
        raise AssertionError(f"not served within {DRAIN_STEPS_MAX} steps")


@pytest.mark.parametrize("world", WORLDS)
def test_whatever_happens_every_byte_is_right_and_nothing_is_left_leased(world: str) -> None:
    """Rows 4, 24, 25, 26, 27 and 33 together."""
    machine = type("Machine", (HalvesMachine,), {"world": WORLDS[world]})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=8, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("world", WORLDS)
def test_in_a_long_run_too(world: str) -> None:
    """The same from a seed, with more in one life than Hypothesis puts there: its examples are short and many."""
    dice = random.Random(world)
    machine = type("Machine", (HalvesMachine,), {"world": WORLDS[world]})()
    machine.begin(
        slots=dice.randint(8, 40),
        policy=dice.choice(["prefix", "lru", "arc"]),
        store_when=dice.choice(["computed", "finished", "gpu_evicted", "adaptive"]),
        restore=True,
        budget_blocks=4,
        tier="far",
        in_step=dice.random() < 0.5,
        prompt_only=False,
    )
    try:
        for _ in range(LONG_RUN_ACTIONS):
            _act(machine, dice)
            machine.nothing_contradicts_itself()
        assert machine.rig.scheduler.stats()["load_jobs"] >= LONG_RUN_ACTIONS // 10, "or it proves little"
    except BaseException:
        machine.rig.close()
        raise
    machine.teardown()


def _act(machine: HalvesMachine, dice: random.Random) -> None:
    actions: list[Callable[[], None]] = [
        lambda: machine.admit([_ask(dice) for _ in range(dice.randint(1, 3))], gpu_forgets=dice.random() < 0.5),
        lambda: machine.run(dice.randint(1, 12)),
        lambda: machine.crawl(dice.randint(1, 6), dice.randint(0, 2), dice.randint(0, 1)),
        lambda: machine.abort(dice.randint(0, 99)),
        lambda: machine.others_store(dice.randint(1, 12), dice.randint(0, 2)),
        lambda: machine.trouble(dice.choice(TROUBLES), dice.randint(0, 9), dice.randint(1, 3)),
    ]
    dice.choices(actions, [4, 5, 4, 1, 1, 1.5])[0]()


def _ask(dice: random.Random) -> Ask:
    limits = RequestLimits(dice.choice([None, 8, 13]), dice.choice([None, 0, 13]), None)
    return Ask(
        seed=dice.choice([1, 1, 1, 2]),
        tokens=dice.choice([dice.randint(1, PROMPT_TOKENS_MAX), dice.randint(30, PROMPT_TOKENS_MAX)]),
        outputs=dice.randint(1, OUTPUT_TOKENS_MAX),
        salt=dice.choice([b"", b"", b"", b"salt"]),
        limits=limits if dice.random() < 0.2 else None,
    )
