"""Looks at every block of a directory, for ``tiering inspect``. Changes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from backends.nvme.config import NvmeConfig
from backends.nvme.directory import lock_directory, refused, unlock
from backends.nvme.fileio import Descriptors, FileIO, read_fully
from backends.nvme.index import Entry, Index
from backends.nvme.limits import PAGE_BYTES, Limits, round_up
from backends.nvme.records import parse_extension
from backends.nvme.recovery import Damaged, recover
from backends.nvme.space import failure
from tiering.api import HEADER_BYTES, Namespace, Outcome, run_blocking, verify

INSPECT_BATCH_BLOCKS: Final = 64


@dataclass(frozen=True, slots=True)
class InspectedBlock:
    """One block. ``outcome`` is None where it was not read; ``handle`` is what ``Backend.delete`` takes."""

    handle: bytes
    namespace_digest: bytes
    key: bytes
    parent: bytes | None
    segment: str
    """Name of the segment file."""
    slot: int
    stored_bytes: int
    generation: int
    outcome: Outcome | None


async def inspect_directory(config: NvmeConfig, *, verify_blocks: bool = False) -> AsyncIterator[list[InspectedBlock]]:
    """The blocks of a directory that no backend has open, least recently used first, all namespaces alike.

    Every handle is a foreign one, with the namespace's digest. ``verify_blocks`` reads and verifies each. Raises
    ``ConfigError`` if the directory is in use or cannot be read.
    """
    lock_fd = lock_directory(config, make=False)
    io = FileIO()
    descriptors = Descriptors(io)
    executor = ThreadPoolExecutor(config.threads, thread_name_prefix="nvme-inspect")
    try:
        found = await run_blocking(_recover, config, executor=executor)
        entries = list(found.entries.items())
        for first in range(0, len(entries), INSPECT_BATCH_BLOCKS):
            part = entries[first : first + INSPECT_BATCH_BLOCKS]
            if verify_blocks:
                yield await run_blocking(verify_entries, found, part, io, descriptors, executor=executor)
            else:
                yield [describe(found, *one, None) for one in part]
    finally:
        descriptors.close()
        executor.shutdown()
        unlock(lock_fd)


def verify_entries(
    index: Index, entries: Sequence[tuple[bytes, Entry]], io: FileIO, descriptors: Descriptors
) -> list[InspectedBlock]:
    """Read and verify ``entries`` through the page cache. In an executor; the entries' slots must not be rewritten."""
    return [describe(index, *one, _verify_one(index, *one, io, descriptors)) for one in entries]


def describe(index: Index, handle: bytes, entry: Entry, outcome: Outcome | None) -> InspectedBlock:
    digest, key = index.split(handle)
    segment = entry.segment
    return InspectedBlock(
        handle, digest, key, entry.parent, segment.path.name, entry.slot, segment.slot_bytes, entry.generation, outcome
    )


def _verify_one(index: Index, handle: bytes, entry: Entry, io: FileIO, descriptors: Descriptors) -> Outcome:
    segment = entry.segment
    data = memoryview(bytearray(segment.slot_bytes))
    try:
        with descriptors.lend(segment.path, direct=False) as fd:
            count = read_fully(io, fd, [data], entry.slot * segment.slot_bytes)
    except FileNotFoundError:
        return Outcome.MISSING
    except OSError as error:
        return failure(error)
    extension = parse_extension(data[:PAGE_BYTES])
    if count < segment.slot_bytes or extension is None:
        return Outcome.corrupt("the header page is damaged, or the file ends early")
    if PAGE_BYTES + round_up(extension.payload_bytes, PAGE_BYTES) != segment.slot_bytes:
        return Outcome.corrupt(f"a payload of {extension.payload_bytes} bytes does not belong into this slot")
    digest, key = index.split(handle)
    payload = data[PAGE_BYTES : PAGE_BYTES + extension.payload_bytes]
    namespace = Namespace(digest, (extension.payload_bytes,), {})
    return verify(namespace, key, data[:HEADER_BYTES], payload)


def _recover(config: NvmeConfig) -> Index:
    root = config.path / config.owner
    try:
        strict = config.recover == "strict"
        return recover(root, b"", Limits.of(config.capacity_bytes), strict=strict, threads=config.threads).index
    except Damaged as error:
        raise refused(error) from error
