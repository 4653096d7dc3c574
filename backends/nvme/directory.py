"""Takes possession of an owner's directory and gets it ready: lock, manifest, recovery, tidying up."""

from __future__ import annotations

import contextlib
import fcntl
import os
from concurrent.futures import Executor
from pathlib import Path

from backends.nvme.config import NvmeConfig
from backends.nvme.fileio import FileIO
from backends.nvme.limits import PAGE_BYTES, Limits, round_up
from backends.nvme.manifest import FORMAT, MANIFEST, Manifest, UnreadableManifest, read_manifest, write_manifest
from backends.nvme.recovery import SEGMENTS, Damaged, Recovered, recover, remove_everything, remove_leftovers
from backends.nvme.segments import BUSY, Segment, SegmentTable
from tiering.api import ConfigError, Namespace, run_blocking

LOCK = "lock"


def lock_directory(config: NvmeConfig, *, make: bool) -> int:
    """A descriptor that holds the owner's directory until it is closed. Raises ``ConfigError`` with the remedy."""
    root = config.path / config.owner
    try:
        if make:
            (root / SEGMENTS).mkdir(parents=True, exist_ok=True)
        fd = os.open(root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(
            f"path: {config.path}: cannot use {error.filename or root}: {error.strerror}; name a directory that this"
            " user may write to"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise ConfigError(
                f"path: {root} is in use by another backend, of this process or of another one; give each its own"
                f" `owner:` (this one has {config.owner!r}) or its own `path:`"
            ) from error
        raise ConfigError(
            f"path: {root / LOCK} cannot be locked: {error.strerror}; name a directory on a filesystem with flock"
        ) from error
    return fd


def unlock(fd: int) -> None:
    # Explicitly: a forked child may hold a copy of the descriptor.
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


async def prepare(
    config: NvmeConfig, limits: Limits, namespace: Namespace, io: FileIO, executor: Executor
) -> Recovered:
    """Recover the locked directory and tidy it up. Raises ``ConfigError``, ``OSError``."""
    root = config.path / config.owner
    if config.recover == "none":
        await run_blocking(remove_everything, root, executor=executor)
    await run_blocking(remove_leftovers, root, executor=executor)
    manifest = await load_manifest(config, executor)
    try:
        found = await run_blocking(_recover, root, namespace.digest, limits, config, executor=executor)
    except Damaged as error:
        raise refused(error) from error
    await run_blocking(_tidy, io, found.table, executor=executor)
    _bind_own(found)
    own_sizes = {PAGE_BYTES + round_up(payload_bytes, PAGE_BYTES) for payload_bytes in namespace.payload_bytes}
    manifest.slot_bytes = sorted(own_sizes | {segment.slot_bytes for segment in found.table})
    manifest.note(namespace.digest, namespace.fields)
    await write_manifest(root, manifest, executor)
    return found


async def load_manifest(config: NvmeConfig, executor: Executor) -> Manifest:
    """An empty one where there is none. Raises ``ConfigError`` if this version must not touch the directory."""
    root = config.path / config.owner
    try:
        manifest = await read_manifest(root, executor) or Manifest()
    except (UnreadableManifest, OSError) as error:
        # For people alone, so nothing is lost with it but names.
        if config.recover == "strict":
            raise refused(Damaged(root / MANIFEST, str(error))) from error
        manifest = Manifest()
    if manifest.format > FORMAT:
        raise ConfigError(
            f"path: {root} was written by a later version (format {manifest.format}, this one reads {FORMAT}); use"
            " another `owner:` or `path:`, or `recover: none` to start empty"
        )
    return manifest


def refused(error: Damaged) -> ConfigError:
    return ConfigError(
        f"recover: strict: {error}; use `recover: quiet` to keep what can be read, or `recover: none` to start empty"
    )


def _recover(root: Path, digest: bytes, limits: Limits, config: NvmeConfig) -> Recovered:
    return recover(root, digest, limits, strict=config.recover == "strict", threads=config.threads)


def _tidy(io: FileIO, table: SegmentTable) -> None:
    """Remove files without blocks, and learn of the others which slots are allocated. In the executor."""
    for segment in list(table):
        if not segment.busy:
            io.unlink(segment.path)
            table.remove(segment)
            continue
        fd = io.open(segment.path, os.O_RDWR)
        try:
            if io.stat(fd).st_size < segment.file_bytes:
                io.truncate(fd, segment.file_bytes)
            _find_allocated(io, fd, table, segment)
        finally:
            io.close(fd)


def _find_allocated(io: FileIO, fd: int, table: SegmentTable, segment: Segment) -> None:
    """Which idle slots are holes. Where the filesystem's total leaves it open, they count as allocated."""
    used = segment.state.rindex(BUSY) + 1
    tail_bytes = segment.file_bytes - used * segment.slot_bytes
    if _all_idle_are_holes(segment):
        return
    stop = segment.slots
    if tail_bytes and io.punch(fd, used * segment.slot_bytes, tail_bytes):
        table.measured(segment, io.stat(fd).st_blocks * 512)
        if _all_idle_are_holes(segment):
            return
        stop = used
    table.assume_allocated(segment, stop)


def _all_idle_are_holes(segment: Segment) -> bool:
    return segment.allocated_bytes < (segment.busy + 1) * segment.slot_bytes


def _bind_own(found: Recovered) -> None:
    """A number for the own namespace; at the limit the blocks of the oldest other one make way."""
    index = found.index
    if index.own_digest in index.numbers:
        return
    index.unbind_unused()
    number = index.free_number()
    if number is None:
        oldest = next(index.split(handle)[0] for handle in index.entries)
        for handle in [handle for handle in index.entries if index.split(handle)[0] == oldest]:
            entry = index.remove(handle)
            assert entry is not None
            found.table.release(entry.segment, entry.slot)
        number = index.numbers[oldest]
        found.rewrite = True
    index.bind(number, index.own_digest)
