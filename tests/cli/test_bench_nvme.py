"""``tiering bench nvme``: the figures it owes, and a directory left as it was."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import Done, run, started, until
from tiering.cli import bench_nvme

Command = Callable[..., Done]

MIB = 1 << 20
WITH_FEW_BYTES = (
    sys.executable,
    "-c",
    "import sys; from tiering.cli import bench_nvme; bench_nvme.TOTAL_BYTES = 16 << 20;"
    "from tiering.cli.main import main; sys.exit(main())",
)


def test_the_figures_of_each_block_size(tmp_path: Path) -> None:
    done = run("bench", "nvme", "--pairs", "3", "--path", tmp_path, "--json", cwd=tmp_path, program=WITH_FEW_BYTES)
    assert (done.code, done.err) == (0, "")
    result = done.object
    assert {"ok": True, "o_direct": True, "pairs": 3, "bytes_per_run": 16 * MIB}.items() <= result.items()
    assert [size["block_bytes"] for size in result["sizes"]] == [256 << 10, MIB]
    for size in result["sizes"]:
        for name in ("store_ratio_to_raw", "load_ratio_to_raw", "raw_store_gib_s", "raw_load_gib_s"):
            assert size[name] > 0
        assert size["spread"] == max(size["store_spread"], size["load_spread"]) >= 0
    assert list(tmp_path.iterdir()) == []


def test_seven_pairs_unless_told_otherwise(tiering: Command) -> None:
    assert "[default: 7]" in tiering("bench", "nvme", "--help").out


@pytest.mark.parametrize("path", ["/proc", "/absent/dir"])
def test_a_directory_that_cannot_be_used_is_named(tiering: Command, path: str) -> None:
    done = tiering("bench", "nvme", "--path", path)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: --path {path}: ")
    assert done.err.endswith("; name a directory you may write to\n")


def test_too_small_a_disk_is_told_before_anything_is_written(
    tiering: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_nvme, "TOTAL_BYTES", 1 << 50)
    done = tiering("bench", "nvme", "--path", tmp_path)
    assert done.code == 2
    assert "are free and 4096 TiB are needed; name a directory on another disk" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ended_early_it_leaves_nothing(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with started("bench", "nvme", "--pairs", "1000", cwd=tmp_path, program=WITH_FEW_BYTES) as process:
        until(lambda: any(tmp_path.glob("*/ours-*/*/segments/*")))
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    # The interpreter itself reports an interrupt that arrives inside a finalizer; we never do.
    assert "Traceback" not in err or "Exception ignored" in err
    assert list(tmp_path.iterdir()) == []
