"""The conformance kit on each kind of medium: in memory, a directory, S3 by both clients, an async filesystem of strangers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from backends.fsspec.backend import FsspecBackend
from tests.backends.fsspec import rig
from tests.backends.fsspec.async_directory import AsyncDirectory
from tests.servers.seaweed import SeaweedServer
from tiering.api import Backend, Namespace
from tiering.testing import BackendTests


class TestMemoryUrl(BackendTests):
    corrupt_supported = True

    def make_backend(self, tmp_path: Path) -> Backend:
        return FsspecBackend(rig.config(f"memory://{rig.prefix_of(tmp_path)}"))

    def corrupt(self, tmp_path: Path, key: bytes, edit: Callable[[bytes], bytes]) -> bool:
        medium = fsspec.filesystem("memory")
        found = [path for path in medium.find(f"/{rig.prefix_of(tmp_path)}") if path.endswith(f"/{key.hex()}")]
        if found:
            path = max(found, key=medium.modified)
            medium.pipe_file(path, edit(medium.cat_file(path)))
        return bool(found)


class TestFileUrl(BackendTests):
    corrupt_supported = True

    def make_backend(self, tmp_path: Path) -> Backend:
        return FsspecBackend(rig.config(f"file://{tmp_path}/kv"))

    def corrupt(self, tmp_path: Path, key: bytes, edit: Callable[[bytes], bytes]) -> bool:
        found = list((tmp_path / "kv").glob(f"*/*/{key.hex()}"))
        if found:
            file = max(found, key=lambda path: path.stat().st_mtime_ns)
            file.write_bytes(edit(file.read_bytes()))
        return bool(found)


class TestS3ByObstore(BackendTests):
    corrupt_supported = True
    client = "obstore"

    @pytest.fixture(autouse=True)
    def server(self, s3: SeaweedServer) -> None:
        """Started for the first of these tests."""

    def make_backend(self, tmp_path: Path) -> Backend:
        return FsspecBackend(rig.s3_config(rig.prefix_of(tmp_path), s3_client=self.client))

    def namespace(self, tmp_path: Path, *, epoch: str = "0", model: str = "kit") -> Namespace:
        self.spoken = super().namespace(tmp_path, epoch=epoch, model=model)
        return self.spoken

    def corrupt(self, tmp_path: Path, key: bytes, edit: Callable[[bytes], bytes]) -> bool:
        return rig.edit_object(rig.path_of(rig.prefix_of(tmp_path), self.spoken, key), edit)


class TestS3ByS3fs(TestS3ByObstore):
    client = "s3fs"
    payload_sizes = (4096, 4097, 65536)


class TestAsyncFilesystem(TestFileUrl):
    """Any fsspec filesystem with ``async_impl``, through its standard methods alone."""

    def make_backend(self, tmp_path: Path) -> Backend:
        fsspec.register_implementation(AsyncDirectory.protocol, AsyncDirectory, clobber=True)
        return FsspecBackend(rig.config(f"{AsyncDirectory.protocol}:/{tmp_path}/kv"))
