"""rows 19, 20: 10 kills in a loop on one directory. ``tests.crash.run`` does 100."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.run import run


@pytest.mark.timeout(300)
def test_crash_garbage_ten_kills_leave_right_bytes_and_exact_accounting(tmp_path: Path) -> None:
    result = run(10, seed=1, directory=tmp_path)
    assert result.ok, result
    assert result.kills == 10
    assert result.hit_blocks > 0
