"""Random traffic without a connector: every block read holds what its tokens stand for, and none is lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.connectors.reference.worlds import FULL, WINDOW, WORLDS, World
from tiering.connectors.reference import RequestState

GPU_BLOCKS = 30


class TrafficMachine(RuleBasedStateMachine):
    groups = "full"

    def __init__(self) -> None:
        super().__init__()
        self.world = World(WORLDS[self.groups], GPU_BLOCKS, max_num_batched_tokens=16, max_num_seqs=4)

    @rule(
        family=st.integers(0, 1),
        shared=st.integers(0, 30),
        own=st.integers(1, 6),
        max_tokens=st.integers(1, 12),
        salt=st.sampled_from([b"", b"", b"s"]),
    )
    def add(self, family: int, shared: int, own: int, max_tokens: int, salt: bytes) -> None:
        prompt = [family * 100 + n for n in range(shared)] + [len(self.world.requests) + 500] * own
        self.world.add(prompt, max_tokens, salt)

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.world.requests))
        self.world.engine.abort(request.request_id)
        assert request.state in (RequestState.ABORTED, RequestState.FINISHED)
        self.world.check_pool()

    @rule()
    def reset(self) -> None:
        self.world.engine.reset_prefix_cache()
        assert self.world.engine.pool.cached_blocks == 0
        self.world.check_pool()

    def teardown(self) -> None:
        self.world.run()
        self.world.check_end()


def _machine(name: str) -> type:
    machine = type(f"Traffic {name}", (TrafficMachine,), {"groups": name})
    case = machine.TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=15, stateful_step_count=25)
    return case


TestFull = _machine("full")
TestWindow = _machine("window")
TestWindowsAlone = _machine("windows alone")
TestAllKinds = _machine("all kinds")


@pytest.mark.parametrize("groups", list(WORLDS))
def test_a_busy_engine_preempts_and_reuses(groups: str) -> None:
    world = World(WORLDS[groups], 40, max_num_batched_tokens=32, max_num_seqs=8)
    source = random.Random(groups)
    prefixes = [[source.randrange(1000) for _ in range(source.randrange(20, 60))] for _ in range(4)]
    for _ in range(60):
        tail = [source.randrange(1000) for _ in range(source.randrange(1, 20))]
        world.add(source.choice(prefixes) + tail, source.randrange(1, 16))
    world.run()
    world.check_end()
    assert sum(request.record.engine_tokens for request in world.requests) > 0
    if groups != "windows alone":  # windows give their blocks back: all eight fit
        assert sum(request.record.preemptions for request in world.requests) > 0


def test_a_window_gives_its_blocks_back_while_the_request_runs() -> None:
    world = World([WINDOW], 6, max_num_batched_tokens=4, max_num_seqs=1)
    request = world.add(list(range(40)), 20)
    most = 0
    while world.engine.has_work:
        world.step()
        most = max(most, sum(block != 0 for table in request.blocks for block in table))
    assert most == 4  # 9 tokens of the past and 4 new ones, wherever the borders lie
    assert world.engine.pool.cached_blocks > 0


def test_a_window_reuses_only_the_blocks_that_it_reads() -> None:
    world = World([FULL, WINDOW], 60)
    prompt = list(range(40))
    world.add(prompt, 1)
    world.run()
    second = world.add([*prompt, 99], 1)
    world.engine.step()
    assert second.record.engine_tokens == 40
    world.run()
    third = world.add([*prompt, 77, 78], 5)
    world.engine.step()
    # 10 blocks of the prefix: the window's 9 tokens before the next one lie in the last three.
    assert [block != 0 for block in third.blocks[1]] == [False] * 7 + [True] * 4
    assert all(third.blocks[0])
    world.run()


def test_wrong_bytes_in_a_block_are_seen_and_change_the_answer() -> None:
    """The checks of the other tests would notice: negative control."""
    world = World([FULL], 20)
    prompt = list(range(20))
    request = world.add(prompt, 3)
    world.engine.step()
    world.runner.memory.blocks(0, 0)[request.blocks[0][1], 5] ^= 1
    world.engine.step()
    (wrong,) = world.runner.wrong_blocks
    assert (wrong.request_id, wrong.group, wrong.index, wrong.block_id) == ("r0", 0, 1, request.blocks[0][1])
    world.engine.run()
    assert request.output_ids != world.runner.expected_tokens(prompt, 3)


def test_the_content_of_a_block_is_told() -> None:
    world = World([FULL, WINDOW], 20)
    prompt = list(range(12))
    request = world.add(prompt, 2, b"s")
    world.engine.step()
    for group in range(2):
        for index in range(3):
            stored = world.runner.memory.blocks(0, group)[request.blocks[group][index]].numpy()
            assert (stored == world.runner.block_content(prompt, index, group=group, salt=b"s")).all()
            assert not (stored == world.runner.block_content(prompt, index, group=group, salt=b"t")).all()
    world.run()
