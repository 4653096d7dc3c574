"""The ten rules of a kvtiering backend, kept by this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvtiering_sqlite import SqliteBackend, SqliteConfig

from tiering.testing import BackendTests


class TestSqlite(BackendTests):
    corrupt_supported = True

    def make_backend(self, tmp_path: Path) -> SqliteBackend:
        self.sqlite = SqliteBackend(SqliteConfig(path=tmp_path / "kv.db", capacity_bytes="256MiB"))
        return self.sqlite

    def corrupt(self, tmp_path: Path, key: bytes, edit: Callable[[bytes], bytes]) -> bool:
        connection = self.sqlite.connection
        assert connection is not None
        newest = "SELECT id, header, payload FROM blocks WHERE key = ? ORDER BY id DESC"
        if (row := connection.execute(newest, (key,)).fetchone()) is None:
            return False
        image = edit(row[1] + row[2])
        sql = "UPDATE blocks SET header = ?, payload = ? WHERE id = ?"
        connection.execute(sql, (image[:128], image[128:], row[0]))
        return True
