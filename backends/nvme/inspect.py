"""Looks at every block of a directory, for ``tiering inspect``. Changes nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from backends.nvme.config import NvmeConfig
from backends.nvme.directory import load_manifest, lock_directory, refused, unlock
from backends.nvme.fileio import Descriptors, FileIO, read_fully
from backends.nvme.index import Entry, Index
from backends.nvme.limits import PAGE_BYTES, Limits, round_up
from backends.nvme.manifest import Manifest
from backends.nvme.records import parse_extension
from backends.nvme.recovery import Damaged, recover
from backends.nvme.space import failure
from tiering.api import HEADER_BYTES, InspectedBlock, Namespace, Outcome, run_blocking, verify

INSPECT_BATCH_BLOCKS: Final = 64


async def inspect_directory(config: NvmeConfig, *, verify_blocks: bool) -> AsyncGenerator[list[InspectedBlock], None]:
    """The blocks of a directory that no backend has open, least recently used first, all namespaces alike.

    ``verify_blocks`` reads and verifies each, through the page cache. Raises ``ConfigError`` if the directory is in use
    or cannot be read, and with ``recover: strict`` if its index is damaged.
    """
    lock_fd = lock_directory(config, make=False)
    executor = ThreadPoolExecutor(config.threads, thread_name_prefix="nvme-inspect")
    inspector: _Inspector | None = None
    try:
        index = await run_blocking(_recover, config, executor=executor)
        inspector = _Inspector(index, await load_manifest(config, executor), verify_blocks)
        entries = list(index.entries.items())
        for first in range(0, len(entries), INSPECT_BATCH_BLOCKS):
            part = entries[first : first + INSPECT_BATCH_BLOCKS]
            yield await run_blocking(inspector.look_at, part, executor=executor)
    finally:
        if inspector is not None:
            inspector.descriptors.close()
        executor.shutdown()
        unlock(lock_fd)


class _Inspector:
    def __init__(self, index: Index, manifest: Manifest, verify_blocks: bool) -> None:
        self.descriptors = Descriptors(io := FileIO())
        self._io = io
        self._index = index
        self._manifest = manifest
        self._verify_blocks = verify_blocks

    def look_at(self, entries: Sequence[tuple[bytes, Entry]]) -> list[InspectedBlock]:
        """In a thread."""
        return [self._look_at_one(handle, entry) for handle, entry in entries]

    def _look_at_one(self, handle: bytes, entry: Entry) -> InspectedBlock:
        digest, key = self._index.split(handle)
        return InspectedBlock(
            namespace_digest=digest,
            namespace_fields=self._manifest.namespaces.get(digest.hex(), {}),
            key=key,
            parent=entry.parent,
            stored_bytes=entry.segment.slot_bytes,
            place=f"{entry.segment.path.name} slot {entry.slot}",
            outcome=self._verify(digest, key, entry) if self._verify_blocks else None,
        )

    def _verify(self, digest: bytes, key: bytes, entry: Entry) -> Outcome:
        segment = entry.segment
        data = memoryview(bytearray(segment.slot_bytes))
        try:
            with self.descriptors.lend(segment.path, direct=False) as fd:
                count = read_fully(self._io, fd, [data], entry.slot * segment.slot_bytes)
        except FileNotFoundError:
            return Outcome.MISSING
        except OSError as error:
            return failure(error)
        extension = parse_extension(data[:PAGE_BYTES])
        if count < segment.slot_bytes or extension is None:
            return Outcome.corrupt("the header page is damaged, or the file ends early")
        if PAGE_BYTES + round_up(extension.payload_bytes, PAGE_BYTES) != segment.slot_bytes:
            return Outcome.corrupt(f"a payload of {extension.payload_bytes} bytes does not belong into this slot")
        payload = data[PAGE_BYTES : PAGE_BYTES + extension.payload_bytes]
        namespace = Namespace(digest, (extension.payload_bytes,), {})
        return verify(namespace, key, data[:HEADER_BYTES], payload)


def _recover(config: NvmeConfig) -> Index:
    root = config.path / config.owner
    try:
        strict = config.recover == "strict"
        # Without a namespace of its own: all handles are foreign ones, with their digests.
        return recover(root, b"", Limits.of(config.capacity_bytes), strict=strict, threads=config.threads).index
    except Damaged as error:
        raise refused(error) from error
