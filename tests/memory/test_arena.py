from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiering.errors import ClosedError, ConfigError, ShapeError, TieringError
from tiering.memory.arena import Arena, PoolShape

SLOT = 8192
MIB = 1 << 20


@pytest.fixture(params=[False, True], ids=["private", "shared"])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    made = Arena([PoolShape(8, SLOT), PoolShape(5, 4096)], shared=request.param)
    yield made
    made.close()


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def _mapping_facts(address: int) -> dict[str, int]:
    """Kilobytes by name of the mapping at ``address``; empty if nothing is mapped there."""
    facts: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            first, last = (int(part, 16) for part in words[0].split("-"))
            inside = first <= address < last
        elif inside and words[-1] == "kB":
            facts[words[0].rstrip(":")] = int(words[1])
    return facts


def test_views_arrays_and_tensors_are_one_memory(arena: Arena) -> None:
    assert arena.capacity_bytes == 8 * SLOT + 5 * 4096
    view, rows, tensor = arena.view(0, 3), arena.array(0), arena.tensor(0)
    assert (view.nbytes, view.ndim, view.format, view.readonly) == (SLOT, 1, "B", False)
    assert rows.shape == tuple(tensor.shape) == (8, SLOT)
    assert rows.dtype == np.uint8
    assert not rows.any()
    view[5] = 1
    rows[3, 6] = 2
    tensor[3, 7] = 3
    assert bytes(view[5:8]) == bytes(rows[3, 5:8]) == bytes(tensor[3, 5:8].tolist()) == b"\1\2\3"
    assert rows.sum() == 6
    assert not arena.array(1).any()
    assert tensor.data_ptr() == rows.ctypes.data == _address(arena.view(0, 0))


def test_slots_and_pools_do_not_overlap(arena: Arena) -> None:
    for pool, slots in ((0, 8), (1, 5)):
        for slot in range(slots):
            view = arena.view(pool, slot)
            view[:] = bytes([10 * pool + slot + 1]) * len(view)
    for pool, slots in ((0, 8), (1, 5)):
        assert [set(row) for row in arena.array(pool).tolist()] == [{10 * pool + slot + 1} for slot in range(slots)]


def test_a_view_may_be_shorter_than_its_slot(arena: Arena) -> None:
    assert arena.view(0, 7, 4097).nbytes == 4097
    assert arena.view(0, 7, 0).nbytes == 0


@pytest.mark.parametrize(
    ("pool", "slot", "length", "said"),
    [
        (2, 0, None, "no pool 2"),
        (-1, 0, None, "no pool -1"),
        (0, 8, None, "slot 8: pool 0 has 8 slots of 8192"),
        (0, -1, None, "slot -1: pool 0"),
        (1, 0, 4097, "no 4097 bytes in slot 0: pool 1 has 5 slots of 4096"),
        (0, 0, -1, "no -1 bytes"),
    ],
)
def test_a_view_outside_its_slot_is_refused(arena: Arena, pool: int, slot: int, length: int | None, said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        arena.view(pool, slot, length)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 4096), (-1, 4096), (1, 0), (1, 4095), (1, 6144), (1, -4096)])
def test_an_impossible_pool_is_refused(slots: int, slot_bytes: int) -> None:
    with pytest.raises(ShapeError, match="PoolShape"):
        PoolShape(slots, slot_bytes)
    with pytest.raises(ShapeError, match="at least one pool"):
        Arena([])


def test_o_direct(tmp_path: Path) -> None:
    """FAULTS row 31: every slot, of every pool, is aligned as direct I/O asks, and the kernel takes it."""
    arena = Arena([PoolShape(3, 12288), PoolShape(700, 4096), PoolShape(2, SLOT)])
    starts = [_address(arena.view(pool, 0)) for pool in range(3)]
    assert [start % (2 * MIB) for start in starts] == [0, 0, 0]
    slots = [(0, 2, 12288), (1, 699, 4096), (2, 1, SLOT)]
    fd = os.open(tmp_path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        for pool, slot, slot_bytes in slots:
            arena.array(pool)[slot] = np.arange(slot_bytes, dtype=np.uint32).astype(np.uint8) + pool
            assert _address(arena.view(pool, slot)) % 4096 == 0
            assert os.pwritev(fd, [arena.view(pool, slot)], 0) == slot_bytes
            assert (tmp_path / "direct").read_bytes()[:slot_bytes] == arena.array(pool)[slot].tobytes()
            expected = arena.array(pool)[slot].copy()
            arena.array(pool)[slot] = 0
            assert os.preadv(fd, [arena.view(pool, slot)], 0) == slot_bytes
            assert (arena.array(pool)[slot] == expected).all()
    finally:
        os.close(fd)
        arena.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    slots=st.lists(st.integers(0, 7), max_size=8, unique=True),
    payload_bytes=st.sampled_from([1, 4095, 4096, 4097, SLOT - 1, SLOT]),
    seed=st.integers(0, 1000),
)
def test_fill_and_take_do_what_a_plain_loop_does(arena: Arena, slots: list[int], payload_bytes: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    before = random.integers(0, 256, (8, SLOT), np.uint8)
    arena.array(0)[:] = before
    source = random.integers(0, 256, (len(slots), payload_bytes), np.uint8)
    expected = [row.tobytes() for row in before]
    for row, slot in zip(source, slots, strict=True):
        expected[slot] = row.tobytes() + bytes(SLOT - payload_bytes)

    arena.fill(0, slots, source)
    assert [row.tobytes() for row in arena.array(0)] == expected

    out = np.full((len(slots) + 1, payload_bytes), 77, np.uint8)
    arena.take(0, slots, out[:-1])
    assert [row.tobytes() for row in out[:-1]] == [expected[slot][:payload_bytes] for slot in slots]
    assert (out[-1] == 77).all()


@pytest.mark.parametrize("offset", [0, 1, 8, 16, 56, 64, 4032, 4080, 4088, 4095])
@pytest.mark.parametrize("payload_bytes", [4096, SLOT])
def test_copies_are_exact_for_every_alignment_of_the_caller(arena: Arena, offset: int, payload_bytes: int) -> None:
    room = np.zeros(3 * 4096 + 3 * payload_bytes, np.uint8)
    start = -room.ctypes.data % 4096 + offset
    mine = room[start : start + 3 * payload_bytes].reshape(3, payload_bytes)
    mine[:] = np.random.default_rng(offset).integers(0, 256, mine.shape, np.uint8)
    original = mine.tobytes()
    arena.array(0)[:] = 99
    arena.fill(0, [6, 7, 2], mine)
    rows = arena.array(0)
    assert b"".join(rows[slot, :payload_bytes].tobytes() for slot in (6, 7, 2)) == original
    assert not rows[[6, 7, 2], payload_bytes:].any()
    assert (rows[[0, 1, 3, 4, 5]] == 99).all()
    room[:] = 55
    arena.take(0, [6, 7, 2], mine)
    assert mine.tobytes() == original
    assert (room[:start] == 55).all()
    assert (room[start + 3 * payload_bytes :] == 55).all()


def test_rows_that_lie_apart_are_copied_too(arena: Arena) -> None:
    wide = np.random.default_rng(0).integers(0, 256, (6, 2 * SLOT), np.uint8)
    arena.fill(0, [1, 0], wide[::3, 16 : 16 + SLOT])
    assert arena.array(0)[1].tobytes() == wide[0, 16 : 16 + SLOT].tobytes()
    assert arena.array(0)[0].tobytes() == wide[3, 16 : 16 + SLOT].tobytes()
    out = np.zeros((2, 2 * SLOT), np.uint8)
    arena.take(0, [0, 1], out[:, ::2])
    assert (out[:, ::2] == arena.array(0)[:2]).all()
    assert not out[:, 1::2].any()


@pytest.mark.parametrize(
    ("slots", "rows", "said"),
    [
        ([0, 8], np.zeros((2, 4), np.uint8), "slots 0 to 8 of pool 0, which has 8 slots"),
        ([-1], np.zeros((1, 4), np.uint8), "slots -1 to -1"),
        ([0, 1], np.zeros((1, 4), np.uint8), r"is uint8 \(1, 4\); expected uint8 \(2, at most 8192\)"),
        ([0], np.zeros((1, SLOT + 1), np.uint8), r"is uint8 \(1, 8193\)"),
        ([0], np.zeros((1, 4), np.int8), r"is int8 \(1, 4\)"),
        ([0], np.zeros(4, np.uint8), r"is uint8 \(4,\)"),
    ],
)
def test_a_bad_copy_is_refused_before_anything_is_written(
    arena: Arena, slots: list[int], rows: np.ndarray, said: str
) -> None:
    rows[...] = 1
    with pytest.raises(ShapeError, match=said):
        arena.fill(0, slots, rows)
    with pytest.raises(ShapeError, match=said):
        arena.take(0, slots, rows)
    assert not arena.array(0).any()
    assert (rows == 1).all()


def test_threads_fill_and_take_their_own_slots_at_once(arena: Arena) -> None:
    wrong: list[int] = []
    together = threading.Barrier(4)

    def work(worker: int) -> None:
        slots = [2 * worker, 2 * worker + 1]
        source = np.full((2, SLOT), worker + 1, np.uint8)
        out = np.empty_like(source)
        together.wait(10)
        for _ in range(200):
            arena.fill(0, slots, source)
            arena.take(0, slots, out)
            if (out != source).any():
                wrong.append(worker)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("shared", [False, True])
def test_prefault_takes_the_pages_and_changes_no_byte(shared: bool) -> None:
    arena = Arena([PoolShape(40, MIB), PoolShape(3, 4096)], shared=shared)
    for slot in (0, 17, 39):
        arena.view(0, slot)[:] = bytes([slot + 1]) * MIB
    assert arena.prefault() == 40 * MIB + 3 * 4096
    assert _mapping_facts(_address(arena.view(0, 0)))["Rss"] >= 40 * 1024
    assert [int(value) for value in arena.array(0)[:, MIB - 1]] == [1, *[0] * 16, 18, *[0] * 21, 40]
    assert arena.prefault() == arena.capacity_bytes
    arena.close()
    assert arena.prefault() == 0


@pytest.mark.parametrize("shared", [False, True])
def test_huge_pages_are_reported_as_the_kernel_gave_them(shared: bool) -> None:
    arena = Arena([PoolShape(8, MIB)], shared=shared)
    arena.array(0)[:] = 1
    facts = _mapping_facts(_address(arena.view(0, 0)))
    assert arena.huge_pages == (facts["AnonHugePages"] + facts["ShmemPmdMapped"] > 0)
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not shared and enabled.exists() and "[never]" not in enabled.read_text():
        assert arena.huge_pages
    arena.close()


def test_close_unmaps_and_may_be_repeated(arena: Arena) -> None:
    address = _address(arena.view(0, 0))
    assert _mapping_facts(address)
    arena.close()
    assert not arena.quarantined
    assert not _mapping_facts(address)
    arena.close()
    arena.close(abandon=True)
    assert not arena.quarantined
    rows = np.zeros((1, 1), np.uint8)
    for call in (
        lambda: arena.view(0, 0),
        lambda: arena.array(0),
        lambda: arena.tensor(0),
        lambda: arena.fill(0, [0], rows),
        lambda: arena.take(0, [0], rows),
        lambda: arena.fd,
    ):
        with pytest.raises(ClosedError, match="arena is closed"):
            call()


@pytest.mark.parametrize("kind", ["view", "array", "tensor"])
def test_a_mapping_that_is_still_seen_is_not_unmapped(arena: Arena, kind: str) -> None:
    seen: dict[str, Callable[[], Any]] = {
        "view": lambda: arena.view(0, 1),
        "array": lambda: arena.array(0)[1],
        "tensor": lambda: arena.tensor(0)[1],
    }
    alias = seen[kind]()
    alias[0] = 5
    arena.close()
    assert arena.quarantined
    arena.close()
    assert arena.quarantined
    assert int(alias[0]) == 5
    del alias
    arena.close()
    assert not arena.quarantined


def test_an_abandoned_mapping_outlives_everything() -> None:
    arena = Arena([PoolShape(1, 4096)])
    arena.view(0, 0)[0] = 1
    address = _address(arena.view(0, 0))
    arena.close(abandon=True)
    assert arena.quarantined
    arena.close()
    assert arena.quarantined
    del arena
    gc.collect()
    assert _mapping_facts(address)


@pytest.mark.parametrize("shared", [False, True])
def test_more_memory_than_there_is_names_what_is_wanted_and_available(shared: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        Arena([PoolShape(1 << 28, MIB)], shared=shared)
    assert "primary.capacity: cannot map 256 TiB (281474976710656 bytes)" in str(caught.value)
    [total_kb] = [line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line]
    available_bytes = int(str(caught.value).split("available: ")[1].split("(")[1].split()[0])
    assert 0 < available_bytes <= int(total_kb) * 1024


def test_a_limit_of_the_process_is_an_error_that_says_so() -> None:
    script = (
        "import resource; from tiering.errors import ConfigError; from tiering.memory.arena import Arena, PoolShape\n"
        "used_bytes = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (256 << 20),) * 2)\n"
        "for shared in (False, True):\n"
        "    try: Arena([PoolShape(1024, 1 << 20)], shared=shared)\n"
        "    except ConfigError as error: print(error)"
    )
    complaints = _python(script).splitlines()
    assert len(complaints) == 2
    for said in complaints:
        assert "cannot map 1" in said
        assert "Cannot allocate memory; available: " in said


def _python(script: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> str:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=60, pass_fds=pass_fds, env=_one_thread()
    ).stdout


def _one_thread() -> dict[str, str]:
    # The BLAS threads of numpy reserve more address space than the test leaves, and are in the way of a fork.
    return os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def test_another_process_maps_a_shared_arena_by_its_descriptor() -> None:
    pools = [PoolShape(3, 4096), PoolShape(2, SLOT)]
    arena = Arena(pools, shared=True)
    arena.view(1, 1)[:5] = b"hello"
    script = (
        "import sys; from tiering.memory.arena import Arena, PoolShape\n"
        "arena = Arena.attach(int(sys.argv[1]), [PoolShape(3, 4096), PoolShape(2, 8192)])\n"
        "print(bytes(arena.view(1, 1, 5)).decode()); arena.view(0, 2)[:3] = b'bye'; arena.close()"
    )
    assert _python(script, str(arena.fd), pass_fds=(arena.fd,)).strip() == "hello"
    assert bytes(arena.view(0, 2, 3)) == b"bye"
    arena.close()


def test_ranks_that_disagree_on_the_pools_are_told() -> None:
    arena = Arena([PoolShape(3, 4096)], shared=True)
    with pytest.raises(ShapeError, match="all ranks must have the same primary capacity"):
        Arena.attach(arena.fd, [PoolShape(1000, 4096)])
    # A rank that shrinks the memory would kill the others at their next access.
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 4096)
    second = Arena.attach(arena.fd, [PoolShape(3, 4096)])
    arena.view(0, 0)[0] = 9
    arena.close()
    assert second.view(0, 0)[0] == 9
    second.close()


def test_a_private_arena_has_no_descriptor() -> None:
    arena = Arena([PoolShape(1, 4096)])
    with pytest.raises(TieringError, match="shared=True"):
        assert arena.fd
    arena.close()


def test_no_descriptor_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        arena = Arena([PoolShape(1, 4096)], shared=True)
        attached = Arena.attach(arena.fd, [PoolShape(1, 4096)])
        attached.close()
        arena.close()
        with pytest.raises(ConfigError):
            Arena([PoolShape(1 << 28, MIB)], shared=True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_forked_child_has_not_got_a_private_arena() -> None:
    """Else each first write after a fork would copy a page, for as long as the child lives."""
    script = (
        "import os, numpy; from tiering.memory.arena import Arena, PoolShape\n"
        "arenas = [Arena([PoolShape(4, 1 << 20)], shared=shared) for shared in (False, True)]\n"
        "first = [numpy.frombuffer(arena.view(0, 0), numpy.uint8).ctypes.data for arena in arenas]\n"
        "def mapped(address):\n"
        "    spans = [line.split()[0].split('-') for line in open('/proc/self/maps')]\n"
        "    return any(int(a, 16) <= address < int(b, 16) for a, b in spans)\n"
        "here = [mapped(address) for address in first]\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os._exit(sum(1 << i for i, address in enumerate(first) if mapped(address)))\n"
        "print(here, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert _python(script).strip() == "[True, True] 2"


def test_crash_garbage() -> None:
    """FAULTS row 20: 20 kills in a loop, and no file in /dev/shm, neither during the process's life nor after it."""
    script = (
        "import os, signal; from tiering.memory.arena import Arena, PoolShape\n"
        "for _ in range(20):\n"
        "    ready, say = os.pipe()\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        try:\n"
        "            arenas = [Arena([PoolShape(4, 1 << 20)], shared=shared) for shared in (False, True)]\n"
        "            for arena in arenas: arena.array(0)[:] = 1\n"
        "            os.write(say, b'+')\n"
        "            signal.pause()\n"
        "        finally:\n"
        "            os._exit(1)\n"
        "    os.close(say)\n"
        "    held = os.read(ready, 1) + open(f'/proc/{pid}/maps', 'rb').read()\n"
        "    held += b' '.join(os.readlink(f'/proc/{pid}/fd/{fd}').encode() for fd in os.listdir(f'/proc/{pid}/fd'))\n"
        "    os.kill(pid, signal.SIGKILL)\n"
        "    os.close(ready)\n"
        "    print(held[:1].decode(), b'memfd:kvtiering' in held, b'/dev/shm' in held, os.waitpid(pid, 0)[1])\n"
    )
    before = set(os.listdir("/dev/shm"))
    assert _python(script).splitlines() == ["+ True False 9"] * 20
    assert set(os.listdir("/dev/shm")) - before == set()
