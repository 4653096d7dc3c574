"""What a directory gives back after a close, a killed process, a lost file or a lost record."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.nvme.backend import NvmeBackend
from tests.backends.nvme import crash_child, rig
from tests.backends.nvme.rig import MISSING, OK, disk_bytes, key_of, stored_bytes
from tiering.api import Outcome
from tiering.errors import ConfigError

RECORD_BYTES = 96


async def test_lost_on_restart_order_of_use_parents_and_bytes(tmp_path: Path) -> None:
    """row 19: hits, recency, links and usage survive a restart, and a second one."""
    keys = [key_of(n) for n in range(6)]
    async with rig.opened(tmp_path) as backend:
        backend.link({keys[1]: keys[0], keys[2]: keys[1]})
        assert await rig.store(backend, keys[:3], 1_000_000) == [OK] * 3
        assert await rig.store(backend, keys[3:]) == [OK] * 3
        backend.link({keys[4]: keys[2]})
        backend.touch([keys[1], keys[4], b"unknown", keys[0]])
        usage = await backend.usage()
    for _ in range(2):
        async with rig.opened(tmp_path) as backend:
            listed = await rig.scanned(backend)
            assert [entry.handle for entry in listed] == [keys[n] for n in (2, 3, 5, 1, 4, 0)]
            parents = {entry.handle: entry.parent for entry in listed}
            assert [parents[key] for key in keys[:4]] == [None, keys[0], keys[1], None]
            assert not any(entry.foreign for entry in listed)
            assert await rig.load(backend, keys[:3], 1_000_000) == [OK] * 3
            assert await rig.load(backend, keys[3:]) == [OK] * 3
            assert (await backend.usage()).live_bytes == usage.live_bytes
            assert backend.counters()["header_scans"] == 0


async def test_recency_of_a_reader_that_never_stores_survives_a_kill(tmp_path: Path) -> None:
    """row 19: touches are logged in batches; what was touched before the last batch is known after a crash."""
    image = tmp_path / "image"
    keys = [key_of(n) for n in range(300)]
    async with rig.opened(tmp_path / "tier") as backend:
        await rig.store(backend, keys)
        backend.touch(keys[:299])
        while backend.counters()["logged_touches"] < 299:
            await rig.load(backend, keys[:1])
        shutil.copytree(tmp_path / "tier", image)  # as a killed process leaves it
    async with rig.opened(image) as backend:
        assert (await rig.scanned(backend))[0].handle == keys[299]


def test_crash_garbage_five_kills(tmp_path: Path) -> None:
    """rows 19 and 20: SIGKILL amid stores and deletes, five times on one directory. Nothing torn, lost or left over."""
    root = tmp_path / "default"
    acknowledged: set[int] = set()
    attempted: set[int] = set()
    for round_ in range(5):
        stored, deleting = killed_child(tmp_path, round_, after_lines=20 + 10 * round_)
        acknowledged = (acknowledged | stored) - deleting
        attempted |= stored | deleting
        assert disk_bytes(root) <= crash_child.CAPACITY

        asyncio.run(reopen_after_kill(tmp_path, acknowledged, attempted - acknowledged))


async def reopen_after_kill(path: Path, live: set[int], perhaps: set[int]) -> None:
    """Every block of ``live`` is there, one of ``perhaps`` may be, nothing else. Takes out of ``live`` what it evicts."""
    async with rig.opened(path, capacity=crash_child.CAPACITY) as backend:
        assert not list(backend.root.rglob("*.tmp"))
        listed = await rig.scanned(backend)
        usage = await backend.usage()
        assert usage.allocated_bytes == disk_bytes(backend.root) <= crash_child.CAPACITY
        assert usage.live_bytes == sum(entry.stored_bytes for entry in listed)
        handles = {entry.handle for entry in listed}
        wanted = {key_of(number) for number in live}
        # Not yet reported when it was killed: at most one store and one delete of each worker.
        assert wanted <= handles
        assert len(handles - wanted) <= 2 * crash_child.WORKERS
        for number in live:
            assert await rig.load(backend, [key_of(number)], crash_child.size_of(number)) == [OK], number
        for number in perhaps:
            assert (await rig.load(backend, [key_of(number)], crash_child.size_of(number)))[0] in (OK, MISSING)
        # As the core does it: blocks that nobody asked for count too, and the oldest make way.
        for entry in listed[: max(0, len(listed) - 6)]:
            await backend.delete([entry.handle])
            live.difference_update({number for number in live if key_of(number) == entry.handle})


def killed_child(path: Path, round_: int, after_lines: int) -> tuple[set[int], set[int]]:
    """What it said it stored, and what it said it was about to delete."""
    command = [sys.executable, "-m", "tests.backends.nvme.crash_child", str(path), str(round_)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line)
            if len(lines) == after_lines:
                child.kill()
    assert len(lines) >= after_lines
    words = [line.split() for line in lines if line.endswith("\n")]
    return ({int(w[1]) for w in words if w[0] == "stored"}, {int(w[1]) for w in words if w[0] == "deleting"})


@pytest.mark.parametrize("cut", [1, 40, 95, 96, 97])
async def test_torn_journal_tail_costs_the_last_record_alone(tmp_path: Path, cut: int) -> None:
    """row 20: the journal ends in the middle of a record. Data without a record is free space again."""
    keys = [key_of(n) for n in range(5)]
    async with rig.opened(tmp_path) as backend:
        for key in keys:
            await rig.store(backend, [key])
    journal = tmp_path / "default" / "journal.1"
    os.truncate(journal, journal.stat().st_size - cut)
    lost = -(-cut // RECORD_BYTES)
    async with rig.opened(tmp_path) as backend:
        assert await rig.load(backend, keys) == [OK] * (5 - lost) + [MISSING] * lost
        assert backend.counters()["torn_records"] == (cut % RECORD_BYTES != 0)
        assert await rig.store(backend, keys) == [OK] * 5
        assert (await backend.usage()).allocated_bytes == disk_bytes(tmp_path / "default")
    async with rig.opened(tmp_path, recover="strict") as backend:
        assert await rig.load(backend, keys) == [OK] * 5


async def test_damaged_journal_record_costs_itself_alone(tmp_path: Path) -> None:
    """row 20: every record in turn has a flipped bit; the others count, and ``strict`` refuses, naming the remedy."""
    keys = [key_of(n) for n in range(4)]
    async with rig.opened(tmp_path / "t") as backend:
        for key in keys:
            await rig.store(backend, [key])
    journal = tmp_path / "t" / "default" / "journal.1"
    good = journal.read_bytes()
    for number in range(len(good) // RECORD_BYTES):
        at = number * RECORD_BYTES + 30
        journal.write_bytes(good[:at] + bytes((good[at] ^ 4,)) + good[at + 1 :])
        with pytest.raises(ConfigError, match=r"recover: strict: .*default.*; use `recover: quiet`"):
            await NvmeBackend(rig.config(tmp_path / "t", recover="strict")).open(rig.namespace())
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(tmp_path / "t", copy)
        async with rig.opened(copy) as backend:
            if number < 2:  # the file's first record and the namespace's: nothing else means anything without them
                assert backend.counters()["header_scans"] == 1
            else:
                assert backend.counters()["torn_records"] == 1
            assert await rig.load(backend, keys) == [MISSING if n == number - 2 else OK for n in range(4)]


def _remove(path: Path) -> None:
    path.unlink()


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 11)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _zero_start(path: Path) -> None:
    path.write_bytes(bytes(RECORD_BYTES) + path.read_bytes()[RECORD_BYTES:])


def _garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 40)


@pytest.mark.parametrize("damage", [_remove, _truncate, _empty, _zero_start, _garbage])
async def test_unusable_snapshot_falls_back_to_the_header_pages(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """row 20: all that lives is found in the segments themselves, of every namespace, with parents."""
    other = rig.namespace(epoch="other")
    keys = [key_of(n) for n in range(5)]
    async with rig.opened(tmp_path, other) as backend:
        await rig.store(backend, keys[:2], 1_000_000)
    async with rig.opened(tmp_path, capacity="8MiB") as backend:
        while not backend.counters()["compactions"]:
            passing = [key_of(n) for n in range(100, 160)]
            await rig.store(backend, passing)
            await backend.delete(passing)
        backend.link({keys[3]: keys[2]})
        await rig.store(backend, keys[2:])
    damage(tmp_path / "default" / "index.snapshot")
    with pytest.raises(ConfigError, match="recover: strict"):
        await NvmeBackend(rig.config(tmp_path, recover="strict")).open(rig.namespace())
    async with rig.opened(tmp_path) as backend:
        assert backend.counters()["header_scans"] == 1
        assert await rig.load(backend, keys[2:]) == [OK] * 3
        listed = await rig.scanned(backend)
        assert [entry.foreign for entry in listed[:2]] == [True, True]
        assert {entry.parent for entry in listed if entry.handle == keys[3]} == {keys[2]}
        assert (await backend.usage()).allocated_bytes == disk_bytes(tmp_path / "default")
    async with rig.opened(tmp_path, other, recover="strict") as backend:
        assert await rig.load(backend, keys[:2], 1_000_000) == [OK] * 2
        assert backend.counters()["header_scans"] == 0


async def test_index_lost_altogether(tmp_path: Path) -> None:
    """row 20: neither snapshot nor journal nor manifest; then not even the header pages."""
    root = tmp_path / "default"
    keys = [key_of(n) for n in range(4)]
    async with rig.opened(tmp_path) as backend:
        await rig.store(backend, keys)
    for name in ("journal.1", "manifest.json"):
        (root / name).unlink()
    async with rig.opened(tmp_path) as backend:
        assert await rig.load(backend, keys) == [OK] * 4
    for slot in rig.slots_on_disk(root):
        slot.write(bytes(slot.length))
    for path in (*root.glob("journal.*"), *root.glob("index.*")):
        path.unlink()
    async with rig.opened(tmp_path) as backend:
        assert await rig.scanned(backend) == []
        assert await rig.store(backend, keys) == [OK] * 4
        assert await rig.load(backend, keys) == [OK] * 4


async def test_killed_between_snapshot_and_cleanup(tmp_path: Path) -> None:
    """row 20: leftovers of a compaction at each of its stages are used or removed, and recency is kept."""
    root = tmp_path / "tier" / "default"
    stages: list[Path] = []

    def freeze(op: str, path: Path) -> None:
        if op in ("replace", "sync", "unlink") and path.parent == root and not path.name.startswith("manifest"):
            stages.append(tmp_path / f"stage-{len(stages)}-{op}")
            shutil.copytree(tmp_path / "tier", stages[-1])

    live: list[bytes] = []
    compactions = numbers = 0
    while not compactions:
        # One call an opening: the compaction runs when nothing else does, so a copy of the files is a moment's state.
        async with rig.opened(tmp_path / "tier", capacity="8MiB", io=rig.HookedIO(freeze, freeze)) as backend:
            live += (fresh := [key_of(numbers + n) for n in range(60)])
            numbers += 60
            await rig.store(backend, fresh)
        compactions += backend.counters()["compactions"]
        if not compactions:
            async with rig.opened(tmp_path / "tier", capacity="8MiB", io=rig.HookedIO(freeze, freeze)) as backend:
                await backend.delete(live[:55])
                del live[:55]
            compactions += backend.counters()["compactions"]
    assert {stage.name.split("-")[2] for stage in stages} == {"replace", "sync", "unlink"}
    for stage in stages:
        async with rig.opened(stage, capacity="8MiB", recover="strict") as backend:
            assert [entry.handle for entry in await rig.scanned(backend)] == live
            assert await rig.load(backend, live) == [OK] * len(live)
            names = {path.name for path in (stage / "default").iterdir()}
            assert not [name for name in names if name.endswith(".tmp")]
            assert len([name for name in names if name.startswith("journal.")]) <= 2


async def test_power_loss_index_names_data_that_was_never_written(tmp_path: Path) -> None:
    """row 13: with ``sync: none`` the journal may outlive the data. Zeros or an older block in the slot are CORRUPT."""
    root = tmp_path / "default"
    keys = [key_of(n) for n in range(4)]
    async with rig.opened(tmp_path) as backend:
        await rig.store(backend, keys)
    slots = [rig.slot_of(root, key) for key in keys]
    older = slots[3].read()
    slots[0].write(bytes(slots[0].length))
    slots[1].write(older)
    async with rig.opened(tmp_path) as backend:
        assert await rig.load(backend, keys) == [rig.CORRUPT, rig.CORRUPT, OK, OK]
        assert await rig.load(backend, keys) == [MISSING, MISSING, OK, OK]
        assert backend.counters()["corrupt"] == 2


async def test_recover_none_starts_empty(tmp_path: Path) -> None:
    keys = [key_of(n) for n in range(3)]
    async with rig.opened(tmp_path, rig.namespace(epoch="old")) as backend:
        await rig.store(backend, keys)
    async with rig.opened(tmp_path, recover="none") as backend:
        assert await rig.scanned(backend) == []
        assert (await backend.usage()).allocated_bytes < stored_bytes(4097) * 3 + 128 * 1024
        assert await rig.store(backend, keys) == [OK] * 3


async def test_recovery_of_100k_blocks_is_a_matter_of_seconds_at_most(tmp_path: Path) -> None:
    """The index of 100,000 blocks, written by the format's own rules: from a journal, then from a snapshot."""
    root = tmp_path / "default"
    (root / "segments").mkdir(parents=True)
    spoken = rig.namespace(4096)
    capacity = 4 << 30
    per_segment = (256 << 20) // 8192
    count = 100_000
    for segment in range(1, -(-count // per_segment) + 1):
        with (root / "segments" / f"8192-{segment}.seg").open("wb") as file:
            file.truncate(256 << 20)
    records = [rig.record(1, key=b"kvtiering nvme journal 1", generation=1), rig.record(2, key=spoken.digest)]
    records += (
        rig.record(3, key=key_of(n), segment=n // per_segment + 1, slot=n % per_segment, generation=n + 1)
        for n in range(count)
    )
    (root / "journal.1").write_bytes(b"".join(records))
    for source in ("journal", "snapshot"):
        backend = NvmeBackend(rig.config(tmp_path, capacity=capacity))
        began = time.process_time()  # of all threads: other processes of a busy machine do not count
        await backend.open(spoken)
        took_s = time.process_time() - began
        counters = backend.counters()
        assert (counters["torn_records"], counters["lost_blocks"], counters["header_scans"]) == (0, 0, 0)
        assert (await backend.contains([key_of(0), key_of(count - 1)])) == [Outcome.OK] * 2
        if source == "journal":
            await backend.store([(key_of(count), rig.filled(key_of(count), 4096))])
            while not backend.counters()["compactions"]:
                await backend.usage()
        await backend.aclose(10)
        print(f"recovery of {count} blocks from the {source}: {took_s:.3f} s")
        # 0.3 to 0.5 s by itself; coverage's tracing and a loaded machine may multiply it. Quadratic would be minutes.
        assert took_s <= 10.0, source
