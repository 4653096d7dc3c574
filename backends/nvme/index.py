"""Which block lies where, in memory. Used on the I/O loop alone, except while a directory is opened."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from backends.nvme.limits import NAMESPACES_MAX
from backends.nvme.records import Kind, pack
from backends.nvme.segments import Segment

KEY_BYTES_MAX: Final = 36
_DIGEST_BYTES: Final = 32
_SEPARATOR: Final = b"\0\0\0\0"
_KEY_AT: Final = _DIGEST_BYTES + len(_SEPARATOR)


class Entry:
    """Where one block lies. ``segment``, ``slot`` and ``generation`` never change."""

    __slots__ = ("deleted", "generation", "parent", "readers", "segment", "slot")

    def __init__(self, segment: Segment, slot: int, generation: int, parent: bytes | None) -> None:
        self.segment = segment
        self.slot = slot
        self.generation = generation
        self.parent = parent
        self.readers = 0
        """Loads under way from the slot; it is not rewritten before they are done."""
        self.deleted = False
        """Out of the index, and the journal says so: free the slot at the last reader's return."""


def foreign_handle(digest: bytes, key: bytes) -> bytes:
    """The name of another namespace's block: longer than any key, so the two never meet."""
    return digest + _SEPARATOR + key


class Index:
    """Every block of the directory by handle (own key, or ``foreign_handle``), least recently used first."""

    def __init__(self, own_digest: bytes) -> None:
        self.own_digest = own_digest
        self.entries: dict[bytes, Entry] = {}
        self.digests: dict[int, bytes] = {}
        """Namespace number in index records -> digest."""
        self.numbers: dict[bytes, int] = {}
        self.live_bytes = 0
        """Slots of all entries. ``add`` and ``remove`` alone change it."""
        self.generation = 0
        """The highest one ever given to a slot."""

    def handle(self, digest: bytes, key: bytes) -> bytes:
        return key if digest == self.own_digest else foreign_handle(digest, key)

    def split(self, handle: bytes) -> tuple[bytes, bytes]:
        """Namespace digest and key of a handle."""
        if len(handle) <= KEY_BYTES_MAX:
            return self.own_digest, handle
        return handle[:_DIGEST_BYTES], handle[_KEY_AT:]

    def is_foreign(self, handle: bytes) -> bool:
        return len(handle) > KEY_BYTES_MAX

    def add(self, handle: bytes, entry: Entry) -> None:
        """Most recently used now. The handle has no entry yet."""
        self.entries[handle] = entry
        self.live_bytes += entry.segment.slot_bytes

    def remove(self, handle: bytes) -> Entry | None:
        entry = self.entries.pop(handle, None)
        if entry is not None:
            self.live_bytes -= entry.segment.slot_bytes
        return entry

    def touch(self, handle: bytes) -> bool:
        entry = self.entries.pop(handle, None)
        if entry is None:
            return False
        self.entries[handle] = entry
        return True

    def next_generation(self) -> int:
        self.generation += 1
        return self.generation

    def bind(self, number: int, digest: bytes) -> None:
        """``number`` stands for ``digest`` in records from now on."""
        old = self.digests.pop(number, None)
        if old is not None:
            del self.numbers[old]
        self.digests[number] = digest
        self.numbers[digest] = number

    def free_number(self) -> int | None:
        """A number for one more namespace; None if ``NAMESPACES_MAX`` have blocks."""
        return next((number for number in range(NAMESPACES_MAX) if number not in self.digests), None)

    def unbind_unused(self) -> None:
        """Forget the numbers of namespaces without blocks, except the own one."""
        used = {self.split(handle)[0] for handle in self.entries}
        for number, digest in list(self.digests.items()):
            if digest not in used and digest != self.own_digest:
                del self.digests[number], self.numbers[digest]

    def put_record(self, handle: bytes, entry: Entry) -> bytes:
        digest, key = self.split(handle)
        return pack(
            Kind.PUT,
            key=key,
            parent=entry.parent,
            namespace=self.numbers[digest],
            segment=entry.segment.number,
            slot=entry.slot,
            generation=entry.generation,
        )

    def delete_record(self, handle: bytes, entry: Entry) -> bytes:
        digest, key = self.split(handle)
        return pack(Kind.DELETE, key=key, namespace=self.numbers[digest], generation=entry.generation)

    def touch_records(self, keys: Iterable[bytes]) -> list[bytes]:
        """For own blocks."""
        number = self.numbers[self.own_digest]
        return [pack(Kind.TOUCH, key=key, namespace=number) for key in keys if key in self.entries]

    def namespace_records(self) -> list[bytes]:
        return [pack(Kind.NAMESPACE, key=digest, namespace=number) for number, digest in sorted(self.digests.items())]
