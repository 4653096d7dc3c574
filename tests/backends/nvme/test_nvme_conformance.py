from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from backends.nvme.backend import NvmeBackend
from tests.backends.nvme import rig
from tiering.api import Backend
from tiering.testing import BackendTests


class TestNvme(BackendTests):
    corrupt_supported = True

    def make_backend(self, tmp_path: Path) -> Backend:
        return NvmeBackend(rig.config(tmp_path, capacity="128MiB"))

    def corrupt(self, tmp_path: Path, key: bytes, edit: Callable[[bytes], bytes]) -> bool:
        slot = rig.slot_of(tmp_path / "default", key)
        slot.write(edit(slot.read()))
        return True
