from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import redis

from backends.redis.backend import RedisBackend
from tests.backends.redis import rig
from tiering.api import Backend, Namespace
from tiering.testing import BackendTests


class RedisTests(BackendTests):
    """The kit on a server that an environment variable names: the child process of the kit finds it there, too."""

    corrupt_supported = True
    variable: ClassVar[str]
    mode: ClassVar[str] = "standalone"
    url = ""
    """Of the server to damage blocks on; the shared one if empty."""

    def make_backend(self, tmp_path: Path) -> Backend:
        return RedisBackend(rig.shared(self.variable, prefix=rig.prefix_of(tmp_path), mode=self.mode))

    def namespace(self, tmp_path: Path, *, epoch: str = "0", model: str = "kit") -> Namespace:
        self.spoken = super().namespace(tmp_path, epoch=epoch, model=model)
        return self.spoken

    def corrupt(self, tmp_path: Path, key: bytes, edit: Callable[[bytes], bytes]) -> bool:
        name = rig.name_of(rig.prefix_of(tmp_path), self.spoken, key)
        with redis.Redis.from_url(self.url or os.environ[rig.UNIX]) as client:
            image = client.get(name)
            if not isinstance(image, bytes):
                return False
            client.set(name, edit(image))
        return True


@pytest.mark.usefixtures("server")
class TestRedisOverTcp(RedisTests):
    variable = rig.TCP


class SameCode(RedisTests):
    """The wire makes no difference to what a module imports, nor to what a server does with half a command."""

    test_rule_10_no_heavy_import_before_open = None  # type: ignore[assignment]  # not collected
    test_rule_06_a_killed_writer_leaves_whole_blocks_only = None  # type: ignore[assignment]


@pytest.mark.usefixtures("server")
class TestRedisOverUnixSocket(SameCode):
    variable = rig.UNIX


@pytest.mark.usefixtures("server", "tls_port")
class TestRedisOverTls(SameCode):
    variable = rig.TLS

    def make_backend(self, tmp_path: Path) -> Backend:
        prefix = rig.prefix_of(tmp_path)
        return RedisBackend(rig.shared(self.variable, prefix=prefix, tls_ca_file=os.environ[rig.CA_FILE]))


@pytest.mark.usefixtures("cluster")
class TestRedisCluster(RedisTests):
    variable = rig.CLUSTER
    mode = "cluster"
    test_rule_10_no_heavy_import_before_open = None  # type: ignore[assignment]

    def corrupt(self, tmp_path: Path, key: bytes, edit: Callable[[bytes], bytes]) -> bool:
        """By whichever member takes it."""
        for url in os.environ[rig.CLUSTER].removeprefix("redis://").split(","):
            self.url = f"redis://{url}"
            try:
                return super().corrupt(tmp_path, key, edit)
            except redis.exceptions.MovedError:
                continue
        return False
