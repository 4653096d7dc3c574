"""An async fsspec filesystem as a third party would write one: a directory whose files are replaced as a whole."""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import Any, ClassVar

from fsspec.asyn import AsyncFileSystem


class AsyncDirectory(AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    protocol = "kvtestasync"
    read_error: ClassVar[BaseException | None] = None
    """What a read raises instead."""

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        await asyncio.sleep(0)
        _replace(_local(path), value)

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        await asyncio.sleep(0)
        if self.read_error is not None:
            raise self.read_error
        return _read(_local(path))[start:end]

    async def _info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"name": path, "size": len(_read(_local(path))), "type": "file"}

    async def _ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        await asyncio.sleep(0)
        names = os.listdir(_local(path))
        return [{"name": f"{path}/{name}"} for name in names] if detail else names

    async def _rm_file(self, path: str, **kwargs: Any) -> None:
        await asyncio.sleep(0)
        os.unlink(_local(path))


def _local(path: str) -> Path:
    # fsspec's paths have no slash at their start.
    return Path("/", path)


def _read(file: Path) -> bytes:
    return file.read_bytes()


def _replace(file: Path, value: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    temporary.write_bytes(value)
    os.replace(temporary, file)
