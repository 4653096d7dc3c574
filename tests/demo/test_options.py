"""Options that cannot be used are refused before anything runs, in words that help."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tiering import ConfigError
from tiering.cli.demo import DemoOptions, Scale, run_demo
from tiering.cli.demo.runs import filesystem_of


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"conversations": 1}, "--conversations is 1; use 2 to 64"),
        ({"turns": 1}, "--turns is 1; use 2 to 64"),
        ({"seed": -1}, "--seed is -1"),
    ],
)
def test_a_number_out_of_range_names_its_option(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DemoOptions(**wrong)  # type: ignore[arg-type]


def test_a_path_that_is_a_file_is_refused(tmp_path: Path, tiny: Scale) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=f"--path {file}"):
        run_demo(DemoOptions(path=file, scale=tiny))


def test_a_plot_in_no_directory_is_refused_before_the_run(tmp_path: Path, tiny: Scale) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        run_demo(DemoOptions(plot=tmp_path / "absent" / "p.png", scale=tiny))


@pytest.mark.parametrize(("module", "extra"), [("transformers", "transformers"), ("matplotlib.figure", "plot")])
def test_a_missing_extra_is_named(
    module: str, extra: str, tmp_path: Path, tiny: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # what an import of a package that is not there meets
    with pytest.raises(ConfigError, match=rf"pip install 'kvtiering\[{extra}\]'"):
        run_demo(DemoOptions(plot=tmp_path / "p.png", scale=tiny))


def test_the_filesystem_is_that_of_the_longest_mount_point(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/a / ext4 rw 0 0\ntmpfs /tiering\\040test tmpfs rw 0 0\n/dev/b /tiering xfs rw 0 0\n", encoding="utf-8"
    )
    assert filesystem_of(Path("/tiering test/x"), mounts) == "tmpfs"
    assert filesystem_of(Path("/tiering/x"), mounts) == "xfs"
    assert filesystem_of(Path("/other"), mounts) == "ext4"
    assert filesystem_of(Path("/other"), tmp_path / "absent") == "unknown"
