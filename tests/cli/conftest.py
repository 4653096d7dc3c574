from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import Done, install_plugin
from tiering.cli.main import main


@pytest.fixture
def tiering(capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The same command within this process, which spares the start of another one."""

    def call(*words: str | Path) -> Done:
        capfd.readouterr()
        code = main([str(word) for word in words])
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Done(code, out, err)

    return call


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tiers of type ``odd`` can be used within this process."""
    path = install_plugin(tmp_path / "site")
    monkeypatch.syspath_prepend(path)
    return path
