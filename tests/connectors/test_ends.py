"""Row 25: finish, abort and preemption at each state of a request: nothing raises, and nothing is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.connectors.bare import TOKENS, Bare, Prompt, bare
from tests.manager.world import faulty
from tiering.connectors.wire import ConnectorMetadata
from tiering.testing import FaultPlan, VirtualClock

TABLE = ([1, 2, 3, 4, 5, 6, 7],)
NONE: tuple[list[int]] = ([],)


class Course:
    """One request on its way through an engine. Half of its prompt is in the primary tier, all of it in the tier behind."""

    def __init__(self, world: Bare, plan: FaultPlan) -> None:
        self.world, self.plan = world, plan
        self.request = Prompt("r", 6 * TOKENS + 1)
        self.steps: list[ConnectorMetadata] = []
        world.put(self.request.keys())
        world.manager.parts.io.run(world.manager.flush(), 20)
        world.put([b"other %d" % n for n in range(8)])
        world.manager.parts.io.run(world.manager.flush(), 20)
        world.put(self.request.keys()[:3])
        self.table = NONE

    def turn(self) -> None:
        async def turns() -> None:
            for _ in range(40):
                await asyncio.sleep(0)

        self.world.manager.parts.io.run(turns(), 20.0)

    def step(self, *scheduled: tuple[int, int], preempted: bool = False) -> None:
        rows = [(self.request, self.table, *pair) for pair in scheduled]
        fresh = self.table[0] if scheduled and not scheduled[0][0] else []
        names = ["r"] if preempted else []
        self.steps.append(self.world.step(*rows, preempted=names, allocated=fresh))
        self.turn()

    def known(self) -> None:
        self.world.half.on_new_request(self.request)

    def asked(self) -> None:
        self.world.half.get_num_new_matched_tokens(self.request, 0)

    def leased(self) -> None:
        assert self.world.half.get_num_new_matched_tokens(self.request, 0) == (24, True)

    def promoting(self) -> None:
        self.plan.hang("load")
        self.leased()
        self.table = TABLE
        self.world.half.update_state_after_alloc(self.request, TABLE, 24)
        self.step()

    def promoted(self) -> None:
        self.promoting()
        self.plan.heal()
        self.turn()

    def on_the_wire(self) -> None:
        self.promoted()
        self.step()
        assert self.steps[-1].load_jobs

    def loaded(self) -> None:
        self.on_the_wire()
        self.world.report(self.steps.pop())

    def load_failed(self) -> None:
        self.on_the_wire()
        step = self.steps.pop()
        self.world.report(step, failed=list(step.load_jobs))

    def running(self) -> None:
        self.world.half.get_num_new_matched_tokens(self.request, 0)
        self.table = TABLE
        self.world.half.update_state_after_alloc(self.request, TABLE, 0)
        self.step((0, 12))

    def stored(self) -> None:
        self.running()
        self.world.report(self.steps.pop())

    def decoding(self) -> None:
        self.stored()
        self.step((12, 13))
        self.request.num_tokens += 1
        self.step((25, 1))

    def preempted(self) -> None:
        self.decoding()
        self.table = NONE
        self.step(preempted=True)

    def preempted_and_leased(self) -> None:
        self.preempted()
        self.asked()

    def preempted_unheard(self) -> None:
        """The step has not been told yet."""
        self.decoding()
        self.table = NONE

    def ended(self) -> None:
        self.decoding()
        self.world.half.request_finished(self.request, TABLE)


STATES: list[Callable[[Course], None]] = [
    lambda course: None,
    Course.known,
    Course.asked,
    Course.leased,
    Course.promoting,
    Course.promoted,
    Course.on_the_wire,
    Course.loaded,
    Course.load_failed,
    Course.running,
    Course.stored,
    Course.decoding,
    Course.preempted,
    Course.preempted_and_leased,
    Course.preempted_unheard,
    Course.ended,
]
NAMES = ["unknown", *(state.__name__ for state in STATES[1:])]


@pytest.mark.parametrize("ends", ["end", "preempt", "twice", "reset", "shutdown"])
@pytest.mark.parametrize("store_when", ["computed", "finished", "gpu_evicted", "adaptive"])
def test_abort_preempt_and_finish_at_each_state_leave_nothing(store_when: str, ends: str) -> None:
    """Row 25."""
    for name, state in zip(NAMES, STATES, strict=True):
        far, plan = faulty("far", blocks=256, deadline_s=1000.0)
        config = {"tiers": [far], "primary": {"store_when": store_when}}
        world = Bare(slots=8, config=config, clock=VirtualClock())
        try:
            course = Course(world, plan)
            state(course)
            _end(course, ends, name)
            if ends != "shutdown":
                world.settle()
        except BaseException as error:
            error.add_note(f"in state {name}")
            raise
        finally:
            plan.heal()
            world.close()


def _end(course: Course, ends: str, name: str) -> None:
    world = course.world
    if ends == "preempt" and course.table is TABLE:
        course.table = NONE
        course.step(preempted=True)
        course.asked()
        course.step()
    elif ends == "reset":
        course.plan.heal()
        world.manager.sync.reset("1")
        world.half.reset()
        course.step()
    elif ends == "shutdown":
        world.half.shutdown()
        assert world.leases == 0, name
        stats = world.manager.stats()
        assert stats["open_loads"] == stats["open_stores"] == stats["holds"] == 0
        return
    for _ in range(2 if ends == "twice" else 1):
        assert world.half.request_finished(course.request, course.table) == (False, None)
    course.plan.heal()
    course.turn()
    for _ in range(4):
        course.step()
        while course.steps:
            world.report(course.steps.pop(0))
    # What stays on the GPU without a request is stored when the engine gives its blocks away.
    course.steps.append(world.step(allocated=TABLE[0]))
    world.report(course.steps.pop())


def test_a_request_that_the_half_does_not_know_is_nobodys_error() -> None:
    """Row 25."""
    with bare() as world:
        request = Prompt("never seen", 9)
        world.half.request_finished(request, TABLE)
        assert not world.step((request, TABLE, 0, 9), preempted=["nor this"]).store_jobs
        assert world.half.stats()["known_requests"] == 0
