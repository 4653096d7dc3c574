"""Blocks as files of a filesystem that blocks: a shared directory, SFTP, memory. Threads of a bounded pool do the work."""

from __future__ import annotations

import os
import secrets as random_names
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from itertools import islice
from typing import Any, Final, TypeVar

from backends.fsspec.failures import Secrets, Trouble, trouble_of
from backends.fsspec.names import Names
from backends.fsspec.payloads import pack_bytes, unpack, wrong_length
from tiering.api import (
    HEADER_BYTES,
    BlockKey,
    Namespace,
    Outcome,
    OutcomeCode,
    run_blocking,
    seal,
    verify,
)

T = TypeVar("T")

SLICE_BLOCKS: Final = 8
SLICE_KEYS: Final = 128
"""What one thread does at a time; between two slices a cancelled call ends."""

STALE_S: Final = 3600.0
"""A temporary file of that age has lost its writer."""


class Files:
    """Whole blocks as files of one sync filesystem. Every method blocks."""

    def __init__(self, filesystem: Any, names: Names, namespace: Namespace) -> None:
        self._fs = filesystem
        self._names = names
        self._namespace = namespace

    def prepare(self) -> None:
        self._fs.makedirs(self._names.temporary, exist_ok=True)
        for entry in self._fs.ls(self._names.temporary, detail=True):
            # A clock that runs ahead would make files of live writers old: hence the hour.
            written = entry.get("mtime")
            if isinstance(written, float) and time.time() - written > STALE_S:
                with suppress(FileNotFoundError):
                    self._fs.rm_file(entry["name"])

    def has(self, key: BlockKey) -> bool:
        return bool(self._fs.exists(self._names.block(key)))

    def read(self, key: BlockKey, dest: memoryview) -> Outcome:
        """Straight into ``dest``, which is verified there."""
        with self._fs.open(self._names.block(key), "rb") as file:
            header = file.read(HEADER_BYTES)
            filled = 0
            while filled < dest.nbytes and (count := file.readinto(dest[filled:])):
                filled += count
            longer = bool(file.read(1))
        if longer or len(header) + filled != HEADER_BYTES + dest.nbytes:
            return wrong_length(len(header) + filled + longer, dest.nbytes)
        return verify(self._namespace, key, header, dest)

    def write(self, key: BlockKey, src: memoryview) -> None:
        """Under a name of its own, and moved into place when it is whole."""
        temporary = f"{self._names.temporary}/{random_names.token_hex(16)}"
        path = self._names.block(key)
        header = seal(self._namespace, key, src)
        try:
            with self._into(self._names.temporary, lambda: self._fs.open(temporary, "wb")) as file:
                file.write(header)
                file.write(src)
            self._into(path.rpartition("/")[0], lambda: self._move(temporary, path))
        except BaseException:
            with suppress(OSError):
                self._fs.rm_file(temporary)
            raise

    def remove(self, key: bytes) -> None:
        self._fs.rm_file(self._names.block(key))

    def forget(self) -> None:
        """The tier closes: nothing, where blocks outlive the process."""

    def _move(self, source: str, target: str) -> None:
        self._fs.mv(source, target)

    def _into(self, directory: str, act: Callable[[], T]) -> T:
        """``act()``, once more if ``directory`` had to be made for it."""
        try:
            return act()
        except FileNotFoundError:
            self._fs.makedirs(directory, exist_ok=True)
            return act()


class LocalFiles(Files):
    def _move(self, source: str, target: str) -> None:
        # fsspec's own move copies where a rename fails, and a copy can be seen half done.
        os.replace(source, target)


class MemoryFiles(Files):
    """``memory://`` puts whole objects, and its open files share one position: threads must not open them."""

    def prepare(self) -> None:
        """Nothing: there are no directories."""

    def read(self, key: BlockKey, dest: memoryview) -> Outcome:
        return unpack(self._namespace, key, memoryview(self._fs.cat_file(self._names.block(key))), dest)

    def write(self, key: BlockKey, src: memoryview) -> None:
        self._fs.pipe_file(self._names.block(key), pack_bytes(self._namespace, key, src))

    def forget(self) -> None:
        # The medium is the process's, and would keep the memory of every tier that ever was.
        with suppress(FileNotFoundError):
            self._fs.rm(self._names.directory, recursive=True)


class ThreadBlocks:
    """The batches of a backend, a slice at a time on the pool."""

    def __init__(self, files: Files, namespace: Namespace, secrets: Secrets, executor: Executor) -> None:
        self._files = files
        self._namespace = namespace
        self._secrets = secrets
        self._executor = executor

    async def probe(self) -> Trouble | None:
        """Makes the directory. What is wrong with it, if anything."""
        answer = await run_blocking(self._attempt, "mkdir", self._files.prepare, executor=self._executor)
        return answer if isinstance(answer, Trouble) else None

    async def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return await self._each(self._contains, keys, SLICE_KEYS)

    async def load(self, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        return await self._each(self._load, items, SLICE_BLOCKS)

    async def store(self, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        return await self._each(self._store, items, SLICE_BLOCKS)

    async def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        return await self._each(self._delete, keys, SLICE_KEYS)

    def abort(self) -> None:
        """A thread in a system call cannot be stopped."""

    async def aclose(self) -> None:
        """Nothing is under way."""
        await run_blocking(self._files.forget, executor=self._executor)

    async def _each(self, work: Callable[[T], Outcome], items: Sequence[T], slice_items: int) -> list[Outcome]:
        outcomes: list[Outcome] = []
        remaining = iter(items)
        while part := list(islice(remaining, slice_items)):
            outcomes += await run_blocking(_map, work, part, executor=self._executor)
        return outcomes

    def _attempt(self, op: str, call: Callable[[], T]) -> T | Trouble:
        try:
            return call()
        except Exception as error:
            return trouble_of(op, error, self._secrets)

    def _contains(self, key: BlockKey) -> Outcome:
        answer = self._attempt("stat", lambda: self._files.has(key))
        if isinstance(answer, Trouble):
            return answer.outcome()
        return Outcome.OK if answer else Outcome.MISSING

    def _load(self, item: tuple[BlockKey, memoryview]) -> Outcome:
        key, dest = item
        answer = self._attempt("read", lambda: self._files.read(key, dest))
        verdict = answer.outcome() if isinstance(answer, Trouble) else answer
        if verdict.code is OutcomeCode.CORRUPT:
            # Where it cannot be removed it is CORRUPT again next time; a store replaces it either way.
            self._attempt("delete", lambda: self._files.remove(key))
        return verdict

    def _store(self, item: tuple[BlockKey, memoryview]) -> Outcome:
        key, src = item
        if src.nbytes not in self._namespace.payload_bytes:
            return Outcome.failed(f"no block of this namespace has {src.nbytes} bytes")
        answer = self._attempt("write", lambda: self._files.write(key, src))
        return answer.store_outcome() if isinstance(answer, Trouble) else Outcome.OK

    def _delete(self, key: bytes) -> Outcome:
        answer = self._attempt("delete", lambda: self._files.remove(key))
        return answer.outcome() if isinstance(answer, Trouble) else Outcome.OK


def _map(work: Callable[[T], Outcome], items: Sequence[T]) -> list[Outcome]:
    return [work(item) for item in items]
