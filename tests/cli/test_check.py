"""``tiering check``: it tells what is wrong and what is right, and leaves a tier as it was."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.nvme import rig
from tests.backends.nvme.rig import disk_bytes
from tests.cli.command import Done, nvme, odd, run, started, write_config
from tiering import KVLayout, TieringOffloadingManager, block_keys
from tiering.cli.check import layout_of
from tiering.types import Namespace

Command = Callable[..., Done]

MIB = 1 << 20
LAYOUT = KVLayout.uniform(model="somebody else", tokens_per_block=16, block_bytes=MIB)
WITH_SHORT_LIMITS = (
    sys.executable,
    "-c",
    "import sys; from tiering.cli import check; check.LIMITS = check.Limits(0.5, 0.5, 0.2, 0.2);"
    "from tiering.cli.main import main; sys.exit(main())",
)


def rows_of(n: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, (n, MIB), np.uint8)


def fill(config: Path, n: int) -> list[bytes]:
    """Another model's blocks, stored as an engine stores them."""

    async def store() -> None:
        async with TieringOffloadingManager.from_yaml(config, LAYOUT) as manager:
            assert (await manager.store(keys, rows_of(n))).stored == n
            await manager.flush()

    keys = block_keys(list(range(16 * n)), LAYOUT)
    asyncio.run(store())
    return keys


def loaded(config: Path, keys: list[bytes]) -> int:
    """How many leading blocks come back, with the right bytes."""

    async def load() -> int:
        async with TieringOffloadingManager.from_yaml(config, LAYOUT) as manager:
            return await manager.load(keys, out)

    out = np.zeros((len(keys), MIB), np.uint8)
    n = asyncio.run(load())
    assert np.array_equal(out[:n], rows_of(len(keys))[:n])
    return n


def tier(result: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [one for one in result["tiers"] if one["name"] == name]
    return found


# --- what is right


def test_the_shipped_configuration_works_here(root: Path, tmp_path: Path) -> None:
    config = root / "configs/local.yaml"
    done = run("check", config, "--json", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    result = done.object
    assert (result["ok"], result["config"]) == (True, str(config))
    assert (result["block_bytes"], result["tokens_per_block"]) == (2 * MIB, 16)
    primary, nvme_tier = tier(result, "primary"), tier(result, "nvme")
    assert (primary["capacity_bytes"], primary["blocks"], primary["tokens"]) == (1 << 30, 512, 8192)
    # A page of header a block, and a few percent for the index.
    most = (4 << 30) // (2 * MIB + 4096)
    assert 0.95 * most < nvme_tier["blocks"] <= most
    assert nvme_tier["tokens"] == 16 * nvme_tier["blocks"]
    for found in result["tiers"]:
        assert found["ok"]
        assert found["error"] is found["note"] is None
        assert found["probe_blocks"] == 16
        assert found["store_gib_s"] > 0
        assert found["load_gib_s"] > 0
    assert (tmp_path / "kv-cache/default").is_dir(), "it opens a tier as an engine would"


def test_people_get_the_same_numbers_as_a_table(tiering: Command, tmp_path: Path) -> None:
    config = write_config(tmp_path / "a [b].yaml", {"type": "memory", "capacity": "64MiB"}, primary="32MiB")
    done = tiering("check", config, "--block-bytes", "1MiB", "--tokens-per-block", "100")
    assert (done.code, done.err) == (0, "")
    title, *_, primary, memory = done.out.splitlines()
    assert title == f"{config}, blocks of 1 MiB, 100 tokens each"
    assert primary.split()[:6] == ["primary", "cpu", "32", "MiB", "32", "3,200"]
    # A sealed block has 128 bytes of header: the 64th does not fit.
    assert memory.split()[:6] == ["memory", "memory", "64", "MiB", "63", "6,300"]


def test_cpu_memory_alone(tiering: Command, tmp_path: Path) -> None:
    done = tiering("check", write_config(tmp_path / "c.yaml"), "--json")
    assert done.code == 0
    assert [found["name"] for found in done.object["tiers"]] == ["primary"]


@pytest.mark.parametrize("size", [1, 4097, 1_000_000, 40 * MIB])
def test_any_block_size(tiering: Command, size: int, tmp_path: Path) -> None:
    tiers = nvme(tmp_path / "kv", "256MiB"), {"type": "memory", "capacity": "256MiB"}
    done = tiering("check", write_config(tmp_path / "c.yaml", *tiers), "--block-bytes", str(size), "--json")
    assert done.code == 0, done.err
    assert {found["probe_blocks"] for found in done.object["tiers"]} == {16 if size < 40 * MIB else 1}


# --- it leaves a tier as it was


def test_nobody_elses_blocks_are_touched_and_none_of_its_own_stay(tiering: Command, tmp_path: Path) -> None:
    """FAULTS row 35: the bytes that ``check`` and ``inspect`` tell are those that were stored."""
    config = write_config(tmp_path / "c.yaml", nvme(tmp_path / "kv", "128MiB"))
    keys = fill(config, 20)
    done = tiering("check", config, "--json")
    assert done.code == 0, done.err
    found = tier(done.object, "nvme")
    assert found["live_bytes"] == 20 * (MIB + 4096)
    assert found["live_bytes"] < found["allocated_bytes"] <= 128 * MIB
    left = tiering("inspect", config, "nvme", "--verify", "--json").object
    assert [(space["fields"]["model"], space["blocks"]) for space in left["namespaces"]] == [("somebody else", 20)]
    assert loaded(config, keys) == 20


def test_what_a_killed_check_left_is_removed_by_the_next(tiering: Command, tmp_path: Path) -> None:
    layout = layout_of(MIB, 16)
    keys = block_keys(list(range(16 * 16)), layout)

    async def store() -> None:
        async with rig.opened(tmp_path / "kv", Namespace.of(layout, epoch="check")) as backend:
            assert await rig.store(backend, keys, MIB) == [rig.OK] * 16

    asyncio.run(store())
    config = write_config(tmp_path / "c.yaml", nvme(tmp_path / "kv"))
    assert tiering("check", config, "--block-bytes", "1MiB").code == 0
    assert tiering("inspect", config, "nvme", "--json").object["blocks"] == 0


@contextmanager
def sampled(path: Path) -> Iterator[list[int]]:
    """The bytes that ``path`` occupies, as often as they can be read."""
    samples: list[int] = []
    over = threading.Event()

    def sample() -> None:
        while not over.is_set():
            samples.append(disk_bytes(path))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def test_a_full_tier_is_right_and_stays_within_its_capacity(tiering: Command, tmp_path: Path) -> None:
    """FAULTS row 17."""
    config = write_config(tmp_path / "c.yaml", nvme(tmp_path / "kv", "32MiB"))
    fill(config, 40)
    held = tiering("inspect", config, "nvme", "--json").object["blocks"]
    with sampled(tmp_path / "kv/default") as samples:
        done = tiering("check", config, "--json")
    assert done.code == 0, done.err
    found = tier(done.object, "nvme")
    assert found["ok"]
    assert found["note"].startswith("full (")
    assert found["note"].endswith("of blocks): its speed was not measured")
    assert (found["probe_blocks"], found["store_gib_s"], found["load_gib_s"]) == (0, None, None)
    assert samples
    assert max(samples) <= 32 * MIB
    assert tiering("inspect", config, "nvme", "--verify", "--json").object["blocks"] == held


def test_a_check_does_not_empty_the_tier_for_the_next_start(tiering: Command, tmp_path: Path) -> None:
    fill(write_config(tmp_path / "c.yaml", nvme(tmp_path / "kv")), 3)
    emptying = write_config(tmp_path / "empty.yaml", nvme(tmp_path / "kv", recover="none"))
    assert tiering("check", emptying).code == 0
    assert tiering("inspect", tmp_path / "c.yaml", "nvme", "--json").object["blocks"] == 3


async def test_a_tier_that_an_engine_has_open_is_refused_and_the_engine_goes_on(tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", nvme(tmp_path / "kv"))
    keys, out = block_keys(list(range(16)), LAYOUT), np.zeros((1, MIB), np.uint8)
    async with TieringOffloadingManager.from_yaml(config, LAYOUT) as manager:
        await manager.store(keys, rows_of(1))
        done = run("check", config, "--json", cwd=tmp_path)
        assert await manager.load(keys, out) == 1
    assert done.code == 2
    error = done.object["error"]
    assert error.startswith(f"{config}: tiers[0] (nvme): ")
    assert f"{tmp_path}/kv/default is in use by another" in error
    assert np.array_equal(out, rows_of(1))


# --- what is wrong


def test_a_mistyped_key_is_named_with_the_right_one(root: Path, tmp_path: Path) -> None:
    """FAULTS row 36."""
    config = tmp_path / "typo.yaml"
    text = (root / "configs/local.yaml").read_text()
    config.write_text(text.replace("    capacity: 4GiB", "    capactiy: 4GiB"))
    line = next(n for n, written in enumerate(config.read_text().splitlines(), 1) if "capactiy" in written)
    done = run("check", config, cwd=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {config}:{line}: tiers[0].capactiy: ")
    assert 'did you mean "capacity"?' in done.err
    assert not (tmp_path / "kv-cache").exists()


@pytest.mark.parametrize("where", ["{}/file/kv", "/proc/kv", "/dev/null/kv"])
def test_a_path_that_cannot_be_written_is_named(tiering: Command, where: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = where.format(tmp_path)
    config = write_config(tmp_path / "c.yaml", nvme(Path(path)))
    done = tiering("check", config)
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert line.startswith(f"error: {config}: tiers[0] (nvme): path: {path}: ")
    assert "name a directory" in line


def test_every_tier_that_must_be_changed_is_told(tiering: Command, tmp_path: Path) -> None:
    tiers = nvme(Path("/proc/one"), name="one"), {"type": "memory", "capacity": "8MiB"}, nvme(Path("/proc/two"))
    done = tiering("check", write_config(tmp_path / "c.yaml", *tiers))
    assert done.code == 2
    assert ["tiers[0] (one)" in line or "tiers[2] (nvme)" in line for line in done.err.splitlines()] == [True, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("primary: {capacity: 1MiB}", "primary.capacity: 1 MiB holds no block of 2 MiB"),
        ("primary: {capacity: 1000TiB}", "primary.capacity: cannot map"),
        (
            "primary: {capacity: 8MiB}\ntiers: [{type: nvme, path: kv, capacity: 1MiB}]",
            "tiers[0].capacity: 1 MiB holds no block",
        ),
        ("primary: {capacity: 8MiB}\ntiers: [{type: nvem, path: kv}]", 'did you mean "nvme"?'),
        ("primary: {capacity: 8MiB}\ntiers: [{type: nvme, path: '${KV_NOT_SET}', capacity: 1GiB}]", "KV_NOT_SET"),
        ("primary: {capacity: [", "not valid YAML"),
        ("", "the file is empty"),
        ("\udcff", "not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_used_is_explained(tiering: Command, text: str, message: str, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(text, errors="surrogateescape")
    done = tiering("check", config)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {config}:")
    assert message in done.err
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent.yaml"], "absent.yaml: no such file"),
        (["."], ".: cannot be read: Is a directory"),
        (["c.yaml", "--block-bytes", "2XB"], "--block-bytes: size '2XB' has the unknown unit 'XB'"),
        (["c.yaml", "--block-bytes", "0"], "--block-bytes: a block has at least one byte"),
    ],
)
def test_arguments_that_cannot_be_used_are_explained(tiering: Command, words: list[str], message: str) -> None:
    done = tiering("check", *words)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


# --- a tier that misbehaves


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("open raises", "RuntimeError: a defect"),
        ("store fails", "store: failed: bad sector"),
        ("load lies", "load: blocks came back with other bytes"),
    ],
)
def test_a_tier_that_fails_is_told_beside_those_that_work(
    tiering: Command, how: str, error: str, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "c.yaml", odd(how), {"type": "memory", "capacity": "64MiB"})
    done = tiering("check", config, "--json")
    assert (done.code, done.err, done.object["ok"]) == (1, "", False)
    assert [(found["ok"], found["error"]) for found in done.object["tiers"]] == [
        (True, None),
        (False, error),
        (True, None),
    ]
    shown = tiering("check", config)
    assert shown.code == 1
    assert f"\nodd: {error}\n" in shown.out


@pytest.mark.usefixtures("site")
def test_loads_slower_than_the_deadline_are_pointed_out(tiering: Command, tmp_path: Path) -> None:
    done = tiering("check", write_config(tmp_path / "c.yaml", odd("", deadline="1us")), "--json")
    assert done.code == 0
    assert "past the tier's deadline of 1 us it is a miss" in tier(done.object, "odd")["note"]


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("open hangs", "open: no answer within 0.5 s"),
        ("open blocks the loop", "it does not answer, and blocks whoever asks"),
        ("store hangs", "probe: no answer within 0.5 s"),
    ],
)
def test_a_tier_that_hangs_does_not_hang_the_check(site: Path, how: str, error: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", odd(how), {"type": "memory", "capacity": "64MiB"})
    words = ("check", config, "--block-bytes", "4KiB")
    done = run(*words, cwd=tmp_path, program=WITH_SHORT_LIMITS, PYTHONPATH=str(site))
    assert done.code == 1
    assert f"\nodd: {error}" in done.out
    (memory,) = [line for line in done.out.splitlines() if line.startswith("memory")]
    assert memory.split()[-1] == "ok"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_check_can_be_ended_while_a_tier_hangs(site: Path, number: signal.Signals, code: int, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", odd("store hangs", batch_blocks_max=16))
    with started("check", config, cwd=tmp_path, PYTHONPATH=str(site)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert "Traceback" not in err
