"""The worker's half alone: a step's calls in their order, with metadata made by hand."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.connectors.bare import TOKENS, Prompt
from tests.connectors.transfers import HeldEngine
from tiering import Group, KVLayout, TieringConfig, TieringOffloadingManager
from tiering.connectors import OffloadingConnectorScheduler, OffloadingConnectorWorker
from tiering.connectors.requests import ScheduledRequest, StepOutput
from tiering.connectors.wire import ArenaAddress, ConnectorMetadata, LoadJob, StoreJob, WorkerOutput
from tiering.memory.arena import Arena, PoolShape
from tiering.memory.transfer.blocks import DeviceBlocks, Placement
from tiering.memory.transfer.factory import open_engines
from tiering.memory.transfer.spec import LOAD, STORE, BlockSpan, Medium, TransferSpec

BLOCKS, BYTES, SLOTS, SLOT_BYTES = 8, 512, 6, 4096


def _spec(source: Medium, blocks: list[int], slots: list[int]) -> TransferSpec:
    gpu = BlockSpan(Medium.GPU, tuple(blocks), (len(blocks),), (0,))
    cpu = BlockSpan(Medium.CPU, tuple(slots), (len(slots),), (0,))
    return TransferSpec(gpu, cpu) if source is Medium.GPU else TransferSpec(cpu, gpu)


def _store(blocks: list[int], slots: list[int], request: str = "r") -> StoreJob:
    return StoreJob(request, _spec(Medium.GPU, blocks, slots))


def _load(
    slots: list[int], blocks: list[int], request: str = "r", *, missing: tuple[int, ...] = (), **more: Any
) -> LoadJob:
    return LoadJob(request, _spec(Medium.CPU, blocks, slots), missing, **more)


class Bench:
    """One worker; GPU block b holds b, slot s holds 100 + s. ``held`` engines copy as late as they may."""

    def __init__(self) -> None:
        self.arena = Arena([PoolShape(SLOTS, SLOT_BYTES)])
        self.slots: npt.NDArray[np.uint8] | None = self.arena.array(0)
        self.slots[:] = np.arange(100, 100 + SLOTS, dtype=np.uint8)[:, None]
        self.gpu = torch.arange(BLOCKS, dtype=torch.uint8).repeat_interleave(BYTES).reshape(BLOCKS, BYTES).clone()
        blocks, placement = DeviceBlocks(((self.gpu,),)), Placement((1,))
        self.worker = OffloadingConnectorWorker()
        self.worker.register_kv_caches(blocks, placement, self.arena)
        engines = open_engines(self.arena, blocks, placement)
        self.stores, self.loads = HeldEngine(engines[STORE]), HeldEngine(engines[LOAD])
        self.worker.register_engine(self.stores)
        self.worker.register_engine(self.loads)

    def slot(self, slot: int) -> int:
        assert self.slots is not None
        (value,) = set(self.slots[slot, :BYTES].tolist())
        return int(value)

    def block(self, block: int) -> int:
        (value,) = set(self.gpu[block].tolist())
        return int(value)

    def step(
        self,
        loads: Mapping[int, LoadJob] | None = None,
        stores: Mapping[int, StoreJob] | None = None,
        flush: tuple[int, ...] = (),
        writes: Mapping[int, int] | None = None,
    ) -> tuple[set[str], WorkerOutput]:
        """A whole step; the forward pass fills blocks with values."""
        metadata = ConnectorMetadata(dict(loads or {}), dict(stores or {}), frozenset(flush))
        metadata = pickle.loads(pickle.dumps(metadata))
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv()
        for block, value in (writes or {}).items():
            self.gpu[block] = value
        self.worker.wait_for_save()
        sending, recving = self.worker.get_finished()
        assert sending == set()
        output = self.worker.take_output()
        self.worker.clear_connector_metadata()
        return recving, output or WorkerOutput()

    def close(self) -> None:
        self.slots = None
        self.worker.shutdown()
        self.arena.close()
        assert not self.arena.quarantined


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def _ended(output: WorkerOutput) -> dict[int, bool]:
    return {job: not report.failed for job, report in output.jobs.items()}


def test_stores_are_deferred_to_the_next_step_and_read_what_the_forward_pass_wrote(bench: Bench) -> None:
    _, output = bench.step(stores={1: _store([2], [0])}, writes={2: 50})
    assert not output.jobs
    assert bench.stores.waiting == [], "not even queued: it would compete with this step's end"
    _, output = bench.step()
    assert bench.stores.waiting == [1]
    bench.stores.release()
    _, output = bench.step()
    assert _ended(output) == {1: True}
    assert bench.slot(0) == 50
    assert bench.worker.take_output() is None, "told once"


def test_reused_gpu_block_is_copied_before_the_forward_pass_that_overwrites_it(bench: Bench) -> None:
    """Row 26. Stores of the step before, of earlier steps, and of this one, as the scheduler's half says."""
    bench.step(stores={1: _store([1], [0])})
    bench.step(stores={2: _store([2], [1])}, writes={2: 52})
    _, output = bench.step(stores={3: _store([3], [2])}, flush=(1, 2, 3), writes={1: 90, 2: 91, 3: 92})
    assert (bench.slot(0), bench.slot(1), bench.slot(2)) == (1, 52, 3)
    assert _ended(output) == {1: True, 2: True, 3: True}
    assert _ended(bench.step()[1]) == {}, "what was flushed is not copied again"
    assert [job for job, _ in bench.stores.log] == [1, 2, 3]


def test_a_job_to_flush_that_never_came_is_a_failed_job(bench: Bench) -> None:
    """Row 26: an id still unsubmitted is an error, not a no-op."""
    bench.step(stores={1: _store([1], [0])})
    _, output = bench.step(flush=(1, 7))
    assert _ended(output) == {1: True, 7: False}
    assert "never reached" in output.jobs[7].error
    _, output = bench.step(flush=(1,))
    assert not output.jobs, "one that was told long ago is nothing to wait for"


def test_an_asynchronous_load_ends_in_one_finished_recving(bench: Bench) -> None:
    recving, output = bench.step(loads={1: _load([4, 5], [1, 2])})
    assert (recving, output.jobs) == (set(), {})
    bench.loads.release()
    recving, output = bench.step()
    assert recving == {"r"}
    assert _ended(output) == {1: True}
    assert output.invalid_block_ids == frozenset()
    assert (bench.block(1), bench.block(2)) == (104, 105)
    assert bench.step()[0] == set()


def test_a_load_that_came_short_names_what_it_did_not_fill(bench: Bench) -> None:
    recving, output = bench.step(loads={1: _load([4], [1], missing=(2, 3)), 2: _load([], [], "s", missing=(5,))})
    bench.loads.release(2)
    recving, output = bench.step()
    assert recving == {"r", "s"}
    assert output.invalid_block_ids == {2, 3, 5}
    assert _ended(output) == {1: True, 2: True}


def test_a_failed_load_is_a_result_that_names_its_blocks(bench: Bench) -> None:
    bench.loads.fail_next = 1
    bench.step(loads={1: _load([4], [1])})
    bench.loads.release()
    recving, output = bench.step()
    assert (recving, _ended(output), output.invalid_block_ids) == ({"r"}, {1: False}, frozenset({1}))
    assert output.jobs[1].error == "injected"


@pytest.mark.parametrize("fails", [False, True])
def test_an_in_step_load_is_there_for_the_forward_pass_and_tells_no_finished_recving(bench: Bench, fails: bool) -> None:
    bench.loads.fail_next = int(fails)
    recving, output = bench.step(
        loads={1: _load([4], [1], in_step=True)},
        stores={2: _store([2], [0]), 3: _store([3], [1], "other")},
        writes={2: 60, 3: 61},
    )
    assert recving == set()
    assert bench.block(1) == (1 if fails else 104)
    assert output.invalid_block_ids == ({1} if fails else set())
    # What the step computed on top of a block that is not there must not be stored under its key.
    assert _ended(output) == ({1: False, 2: False} if fails else {1: True})
    bench.step()
    bench.stores.release(9)
    assert _ended(bench.step()[1]) == ({3: True} if fails else {2: True, 3: True})
    assert bench.slot(0) == (100 if fails else 60)
    assert bench.slot(1) == 61
    # The next step of the same request is a new one.
    bench.step(stores={4: _store([2], [0])})
    bench.step()
    bench.stores.release(9)
    assert _ended(bench.step()[1]) == {4: True}


def test_an_in_step_load_that_came_short_poisons_the_step_too(bench: Bench) -> None:
    _, output = bench.step(loads={1: _load([], [], in_step=True, missing=(1,))}, stores={2: _store([2], [0])})
    assert output.invalid_block_ids == {1}
    assert _ended(output) == {1: True, 2: False}


def test_loads_wait_for_the_flush_of_stores_that_read_their_blocks(bench: Bench) -> None:
    """Row 26. The load overwrites the block, not the forward pass."""
    bench.step(stores={1: _store([2], [0])})
    bench.step(loads={2: _load([5], [2], in_step=True)}, flush=(1,))
    assert (bench.slot(0), bench.block(2)) == (2, 105)


def test_a_spec_that_cannot_be_carried_out_is_a_failed_job(bench: Bench) -> None:
    recving, output = bench.step(loads={1: _load([SLOTS], [1])}, stores={2: _store([BLOCKS], [0])})
    bench.step()
    bench.loads.release()
    bench.stores.release()
    recving, output = bench.step()
    assert (recving, _ended(output), output.invalid_block_ids) == ({"r"}, {1: False, 2: False}, frozenset({1}))


def test_without_slots_every_job_fails_and_nothing_raises() -> None:
    worker = OffloadingConnectorWorker()
    metadata = ConnectorMetadata({1: _load([0], [1])}, {2: _store([1], [1])})
    for step in (metadata, ConnectorMetadata()):
        worker.handle_preemptions(step)
        worker.bind_connector_metadata(step)
        worker.start_load_kv()
        worker.wait_for_save()
    assert worker.get_finished() == (set(), {"r"})
    output = worker.take_output()
    assert output is not None
    assert _ended(output) == {1: False, 2: False}
    worker.shutdown()


def test_a_shutdown_submits_what_is_deferred_and_waits_for_all(bench: Bench) -> None:
    bench.step(loads={1: _load([4], [6])}, stores={2: _store([2], [0])}, writes={2: 77})
    values = bench.slots
    assert values is not None
    bench.worker.shutdown()
    assert values[0, 0] == 77
    assert bench.block(6) == 104
    assert bench.worker.get_finished() == (set(), {"r"})
    output = bench.worker.take_output()
    assert output is not None
    assert _ended(output) == {1: True, 2: True}
    bench.worker.shutdown()
    del values


def test_an_engine_that_is_replaced_still_tells_what_it_had(bench: Bench) -> None:
    bench.step(stores={1: _store([1], [0])})
    bench.step()
    assert bench.stores.waiting == [1]
    engines = open_engines(bench.arena, DeviceBlocks(((bench.gpu,),)), Placement((1,)))
    engines.pop(LOAD).close()
    bench.worker.register_engine(engines.pop(STORE))
    _, output = bench.step(stores={2: _store([2], [1])}, flush=(1,))
    assert _ended(output) == {1: True}
    _, output = bench.step(flush=(2,))
    assert _ended(output) == {2: True}


def test_a_worker_in_another_process_maps_the_slots_that_the_metadata_names(root: Path) -> None:
    """Through ``/proc/<pid>/fd``: store there, load back into other blocks."""
    layout = KVLayout(groups=[Group("full", TOKENS, BYTES)], model="shared")
    config = TieringConfig.from_dict({"primary": {"capacity": SLOTS * SLOT_BYTES, "store_when": "computed"}})
    manager = TieringOffloadingManager(config, layout, shared_arena=True)
    manager.sync.open()
    half = OffloadingConnectorScheduler(manager, gpu_tokens_per_block=[TOKENS], tokens_per_hash=TOKENS)
    command = [sys.executable, "-m", "tests.connectors.worker_child", str(BLOCKS), str(BYTES)]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        to_child, from_child = child.stdin, child.stdout
        assert to_child is not None
        assert from_child is not None

        def step(output: StepOutput) -> tuple[set[str], npt.NDArray[np.uint8]]:
            metadata = half.build_connector_meta(output)
            assert metadata.arena is not None
            pickle.dump(metadata, to_child)
            to_child.flush()
            report, recving, memory = pickle.load(from_child)
            half.update_connector_output(report or WorkerOutput())
            return recving, memory

        first = Prompt("first", 2 * TOKENS)
        half.get_num_new_matched_tokens(first, 0)
        half.update_state_after_alloc(first, ([1, 2],), 0)
        step(StepOutput([ScheduledRequest("first", ([1, 2],), 0, 8)]))
        half.request_finished(first, ([1, 2],))
        for _ in range(10_000):
            if not half.has_pending_work():
                break
            step(StepOutput())
        again = Prompt("again", 2 * TOKENS + 1)
        assert half.get_num_new_matched_tokens(again, 0) == (8, True)
        half.update_state_after_alloc(again, ([4, 5, 6],), 8)
        for _ in range(10_000):
            recving, memory = step(StepOutput())
            if recving:
                break
        assert recving == {"again"}
        assert [set(memory[block].tolist()) for block in (4, 5)] == [{1}, {2}]
        half.request_finished(again, ([4, 5, 6],))
        to_child.close()
        assert child.wait(20) == 0
    half.shutdown()
    manager.sync.close()


def test_slots_that_cannot_be_mapped_fail_each_copy_and_no_engine(caplog: pytest.LogCaptureFixture) -> None:
    """The reason is logged once, and each job tells it: the engine computes, and goes on."""
    worker = OffloadingConnectorWorker()
    worker.register_kv_caches(DeviceBlocks(((torch.zeros(2, 8, dtype=torch.uint8),),)), Placement((1,)))
    span = BlockSpan(Medium.GPU, (1,), (1,), (0,))
    job = LoadJob("r", TransferSpec(BlockSpan(Medium.CPU, (0,), (1,), (0,)), span))
    for number in (1, 2):
        metadata = ConnectorMetadata(load_jobs={number: job}, arena=ArenaAddress(0, 3, ((1, 4096),)))
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv()
        worker.wait_for_save()
        assert worker.get_finished() == (set(), {"r"})
        output = worker.take_output()
        assert output is not None
        assert output.invalid_block_ids == {1}
        assert "PID namespace" in output.jobs[number].error
    assert sum("has no slots" in record.getMessage() for record in caplog.records) == 1
    worker.shutdown()
