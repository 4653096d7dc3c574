"""One backend for each way to break rules 1 to 5 that the conformance kit must notice. All else about them is right."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from backends.memory import MemoryBackend, MemoryConfig
from tests.testing.directory_backend import DirectoryBackend
from tiering.api import (
    HEADER_BYTES,
    BackendError,
    BlockKey,
    Namespace,
    Outcome,
    seal,
)

Items = Sequence[tuple[BlockKey, memoryview]]


class Plain(MemoryBackend):
    """Right in all respects, in memory. ``path`` is where the persistent ones of this module keep their blocks."""

    namespace: Namespace

    def __init__(self, path: Path) -> None:
        super().__init__(MemoryConfig(capacity_bytes=128 << 20))
        self.path = path

    async def open(self, namespace: Namespace) -> None:
        await super().open(namespace)
        self.namespace = namespace


# Rule 1


class ReversesOutcomes(Plain):
    async def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return (await super().contains(keys))[::-1]


class AnswersEachKeyOnce(Plain):
    async def load(self, items: Items) -> list[Outcome]:
        return await super().load(list(dict(items).items()))


class FailsOnEmptyBatches(Plain):
    async def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        if not keys:
            raise BackendError("ERR wrong number of arguments for 'del' command")
        return await super().delete(keys)


class FoldsKeys(Plain):
    """As a case-insensitive file system would."""

    async def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        known = {key.lower() for key in self.blocks}
        await super().contains([])
        return [Outcome.OK if key.lower() in known else Outcome.MISSING for key in keys]


class AnswersHalfOfAFullBatch(Plain):
    """The protocol below takes 32 keys in a request, and nobody splits."""

    async def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return await super().contains(keys[:32])


class StoresHalfABatch(Plain):
    """Says yes to all of it."""

    async def store(self, items: Items) -> list[Outcome]:
        return await super().store(items[: -(-len(items) // 2)]) + [Outcome.OK] * (len(items) // 2)


class NeverReturns(Plain):
    async def load(self, items: Items) -> list[Outcome]:
        await asyncio.Event().wait()
        return []


class SaysRefusedToLoads(Plain):
    async def load(self, items: Items) -> list[Outcome]:
        return [o if o.ok else Outcome.refused("not here") for o in await super().load(items)]


# Rule 2


class RaisesOnMissing(Plain):
    async def load(self, items: Items) -> list[Outcome]:
        for key, _ in items:
            if key not in self.blocks:
                raise KeyError(key)
        return await super().load(items)


class SaysYesToAll(Plain):
    """Says yes, has not."""

    async def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        await super().contains([])
        return [Outcome.OK] * len(keys)


class RaisesWhatItsClientRaises(DirectoryBackend):
    def write(self, key: BlockKey, src: memoryview) -> Outcome:
        self.publish(self.file(key), seal(self.scope(), key, self.payload(src)), src)
        return Outcome.OK


class NeverOpens(Plain):
    async def open(self, namespace: Namespace) -> None:
        await asyncio.Event().wait()


class ForgetsNothing(Plain):
    """Its index says yes for ever."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.seen: set[BlockKey] = set()

    async def store(self, items: Items) -> list[Outcome]:
        self.seen |= {key for key, _ in items}
        return await super().store(items)

    async def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        await super().contains([])
        return [Outcome.OK if key in self.seen else Outcome.MISSING for key in keys]


# Rule 3


class StopsAtTheFirstMissing(Plain):
    async def load(self, items: Items) -> list[Outcome]:
        outcomes = await super().load(items)
        good = next((at for at, outcome in enumerate(outcomes) if not outcome.ok), len(items))
        return outcomes[:good] + [Outcome.MISSING] * (len(items) - good)


class RefusesAllOrNothing(Plain):
    async def store(self, items: Items) -> list[Outcome]:
        outcomes = await super().store(items)
        worst = next((outcome for outcome in outcomes if not outcome.ok), Outcome.OK)
        return [worst] * len(items)


# Rule 4


class FillsHalfABatch(Plain):
    """Says yes to all of it."""

    async def load(self, items: Items) -> list[Outcome]:
        return await super().load(items[: -(-len(items) // 2)]) + [Outcome.OK] * (len(items) // 2)


class FillsACopy(Plain):
    async def load(self, items: Items) -> list[Outcome]:
        return await super().load([(key, memoryview(bytearray(dest.nbytes))) for key, dest in items])


class KeepsViews(Plain):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.recent: list[memoryview] = []

    async def load(self, items: Items) -> list[Outcome]:
        self.recent += [dest[:1] for _, dest in items]
        return await super().load(items)


class ScribblesIntoSrc(Plain):
    async def store(self, items: Items) -> list[Outcome]:
        outcomes = await super().store(items)
        for _, src in items:
            src[0] ^= 1
        return outcomes


class DirtiesThePadding(DirectoryBackend):
    async def load(self, items: Items) -> list[Outcome]:
        outcomes = await super().load(items)
        for _, dest in items:
            dest[self.payload(dest).nbytes :] = b"\7" * (dest.nbytes - self.payload(dest).nbytes)
        return outcomes


class NeedsMoreAlignmentThanDeclared(Plain):
    async def load(self, items: Items) -> list[Outcome]:
        for _, dest in items:
            if np.frombuffer(dest, np.uint8).ctypes.data % 4096:
                raise OSError(22, "Invalid argument")
        return await super().load(items)


class ReferencesSrc(Plain):
    """Zero-copy taken too far: the header is right, the payload is whatever the caller's buffer holds now."""

    async def store(self, items: Items) -> list[Outcome]:
        outcomes = await super().store(items)
        for key, src in items:
            if key in self.blocks:
                self.blocks[key].payload = np.frombuffer(src, np.uint8)
        return outcomes


# Rule 5


class GivesANeighboursBytes(Plain):
    """Whole, verified, and not what was asked for."""

    async def load(self, items: Items) -> list[Outcome]:
        outcomes = await super().load(items)
        for (key, dest), outcome in zip(items, outcomes, strict=True):
            others = [block for other, block in self.blocks.items() if other != key]
            neighbour = next((block for block in others if block.payload.nbytes == dest.nbytes), None)
            if outcome.ok and neighbour is not None:
                dest[:] = neighbour.payload.data
        return outcomes


class NeverVerifies(DirectoryBackend):
    def read(self, key: BlockKey, dest: memoryview) -> Outcome:
        if not self.file(key).exists():
            return Outcome.MISSING
        raw = self.file(key).read_bytes()[HEADER_BYTES:][: dest.nbytes]
        dest[: len(raw)] = raw
        return Outcome.OK


class TrustsLengthsOnly(DirectoryBackend):
    def read(self, key: BlockKey, dest: memoryview) -> Outcome:
        if self.file(key).exists() and self.file(key).stat().st_size != HEADER_BYTES + dest.nbytes:
            return Outcome.corrupt("wrong length")
        if not self.file(key).exists():
            return Outcome.MISSING
        dest[:] = self.file(key).read_bytes()[HEADER_BYTES:]
        return Outcome.OK


class IgnoresTheNamespace(NeverVerifies):
    def file(self, key: bytes) -> Path:
        return self.path / f"{bytes(32).hex()}-{key.hex()}"


class IgnoresTheEpoch(DirectoryBackend):
    """Its fingerprint lacks a field, row 14."""

    async def open(self, namespace: Namespace) -> None:
        digest = hashlib.sha256(namespace.fields["model"].encode()).digest()
        await super().open(Namespace(digest, namespace.payload_bytes, namespace.fields))


class LosesOtherNamespaces(DirectoryBackend):
    """Cleans up at open."""

    def prepare(self) -> None:
        super().prepare()
        for file in self.path.iterdir():
            if not file.name.startswith(self.scope().digest.hex()):
                file.unlink()


class KeepsBadBlocks(DirectoryBackend):
    """row 7: contains goes on saying yes, so the block is tried for ever."""

    def read(self, key: BlockKey, dest: memoryview) -> Outcome:
        raw = self.file(key).read_bytes() if self.file(key).exists() else b""
        outcome = super().read(key, dest)
        if raw and not outcome.ok:
            self.file(key).write_bytes(raw)
        return outcome
