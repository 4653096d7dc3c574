"""The primary tier's slots: one mapping for all pools, copied in and out in bulk.

Private or shared. ``MADV_HUGEPAGE`` gives huge pages to private anonymous memory on a stock kernel
(``transparent_hugepage/enabled`` is ``madvise`` or ``always``), but not to shared memory, of whatever origin (memfd,
``/dev/shm``, shared anonymous): ``transparent_hugepage/shmem_enabled`` is ``never`` unless an operator changes it, and
then even ``MADV_COLLAPSE`` is refused. Scattered 4 KiB pages halve direct I/O. So the arena is private unless ranks in
other processes must see it; a shared one is a memfd, which has no name: whatever kills the process, nothing is left
behind in ``/dev/shm``.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from tiering.errors import ClosedError, ShapeError, TieringError
from tiering.memory.mapping import ask_for_huge_pages, map_memory, populate, refuse_more_than_available, sealed_memfd

if TYPE_CHECKING:
    import torch

SLOT_ALIGNMENT_BYTES: Final = 4096
POOL_ALIGNMENT_BYTES: Final = 2 << 20
"""The size of a huge page; a pool that starts inside one would share it with its neighbour."""

_PREFAULT_PIECE_BYTES: Final = 16 << 20

_ALIASED_BELOW_BYTES: Final = 64

Rows: TypeAlias = npt.NDArray[np.uint8]
_Copy: TypeAlias = Callable[[npt.NDArray[Any], npt.NDArray[Any]], None]

_abandoned: list[mmap.mmap] = []
"""Mappings that a hung transfer may still write to. Never unmapped, for the life of the process."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """``slots`` slots of ``slot_bytes`` bytes each; ``slot_bytes`` is a multiple of 4096."""

    slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ShapeError(f"PoolShape.slots is {self.slots}; it must be at least 1")
        if self.slot_bytes < 1 or self.slot_bytes % SLOT_ALIGNMENT_BYTES:
            raise ShapeError(
                f"PoolShape.slot_bytes is {self.slot_bytes}; it must be a multiple of {SLOT_ALIGNMENT_BYTES}"
            )

    @property
    def pool_bytes(self) -> int:
        return self.slots * self.slot_bytes


class Arena:
    """One mapping that holds the slots of every pool.

    All methods are plain and may be called from any thread; which slot may be touched when is the caller's to know.
    Whatever is handed out (view, array, tensor) aliases the slots and keeps the mapping alive.
    """

    def __init__(self, pools: Sequence[PoolShape], *, shared: bool = False) -> None:
        """Map zeroed memory for ``pools``. Pages are taken when first touched: see ``prefault``.

        A private arena (the default) starts each pool at a multiple of 2 MiB, and a forked child does not have it. A
        ``shared`` one can be mapped by other processes (``fd`` and ``attach``) and is inherited by ``fork``; its
        pools start at a multiple of 2 MiB in the memfd, and in memory wherever the kernel has shared huge pages.

        Raises ``ConfigError`` if the machine (or the container's memory limit) has not that much memory.
        """
        wanted_bytes = _mapped_bytes(pools)
        refuse_more_than_available(wanted_bytes)
        if shared:
            fd = sealed_memfd(wanted_bytes)
            try:
                self._adopt(pools, map_memory(wanted_bytes, fd), fd)
            except BaseException:
                os.close(fd)
                raise
        else:
            # Python cannot ask for an aligned mapping: take one huge page more and start inside it. It costs nothing.
            self._adopt(pools, map_memory(wanted_bytes + POOL_ALIGNMENT_BYTES), None)

    @classmethod
    def attach(cls, fd: int, pools: Sequence[PoolShape]) -> Arena:
        """Map the shared arena behind ``fd``, made by another rank with the same ``pools``. ``fd`` stays the caller's.

        Raises ``ShapeError`` if its size is another one, ``ConfigError`` if it cannot be mapped.
        """
        found_bytes = os.fstat(fd).st_size
        if found_bytes != _mapped_bytes(pools):
            raise ShapeError(
                f"the shared arena has {found_bytes} bytes; these pools need {_mapped_bytes(pools)}: "
                "all ranks must have the same primary capacity and layout"
            )
        arena = cls.__new__(cls)
        arena._adopt(pools, map_memory(found_bytes, fd), os.dup(fd))
        return arena

    def _adopt(self, pools: Sequence[PoolShape], mapping: mmap.mmap, fd: int | None) -> None:
        self._pools = tuple(pools)
        self._fd = fd
        self._mapping: mmap.mmap | None = mapping
        self._bytes: memoryview | None = memoryview(mapping)
        self._starts: list[int] = []
        start = 0
        if fd is None:
            # A child of fork() would otherwise share the pages, and each first write here would copy one.
            mapping.madvise(mmap.MADV_DONTFORK)
            start = -np.frombuffer(mapping, np.uint8).ctypes.data % POOL_ALIGNMENT_BYTES
        for pool in self._pools:
            self._starts.append(start)
            start += _round_up(pool.pool_bytes, POOL_ALIGNMENT_BYTES)
        self._huge_pages = ask_for_huge_pages(mapping, self.array(0).reshape(-1), fresh=fd is None)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots of all pools."""
        return sum(pool.pool_bytes for pool in self._pools)

    @property
    def pools(self) -> tuple[PoolShape, ...]:
        """The shape of each pool."""
        return self._pools

    @property
    def shared(self) -> bool:
        """Whether other processes can map it."""
        return self._fd is not None

    @property
    def huge_pages(self) -> bool:
        """Whether the kernel gave a huge page when the first pool's first bytes were touched."""
        return self._huge_pages

    @property
    def fd(self) -> int:
        """The memfd of a shared arena, for ``attach`` in another process. The arena's own: it is closed with it."""
        if self._bytes is None:
            raise ClosedError("the arena is closed")
        if self._fd is None:
            raise TieringError("the arena is private; open it with shared=True to map it from other processes")
        return self._fd

    @property
    def quarantined(self) -> bool:
        """Whether the arena was closed and its mapping is still there: views of it are alive, or it was abandoned."""
        return self._bytes is None and self._mapping is not None

    def view(self, pool: int, slot: int, length: int | None = None) -> memoryview:
        """The first ``length`` bytes of a slot (None: all), writable and flat, without a copy.

        Raises ``ShapeError`` if there is no such slot or it is shorter, ``ClosedError`` after ``close``.
        """
        shape = self._shape(pool)
        count = shape.slot_bytes if length is None else length
        if not 0 <= slot < shape.slots or not 0 <= count <= shape.slot_bytes:
            raise ShapeError(
                f"no {count} bytes in slot {slot}: pool {pool} has {shape.slots} slots of {shape.slot_bytes} bytes"
            )
        start = self._starts[pool] + slot * shape.slot_bytes
        return self._open()[start : start + count]

    def array(self, pool: int) -> Rows:
        """All slots of a pool as an array ``(slots, slot_bytes)``, without a copy."""
        shape = self._shape(pool)
        flat = np.frombuffer(self._open(), np.uint8, shape.pool_bytes, self._starts[pool])
        return flat.reshape(shape.slots, shape.slot_bytes)

    def tensor(self, pool: int) -> torch.Tensor:
        """All slots of a pool as a CPU tensor ``uint8 (slots, slot_bytes)``, without a copy."""
        import torch  # Here: it takes a second, and only transfer engines need it.

        return torch.from_numpy(self.array(pool))

    def fill(self, pool: int, slots: Sequence[int], source: Rows) -> None:
        """Copy row i of ``source`` (``(len(slots), payload_bytes)``) into ``slots[i]`` and zero the rest of the slot.

        Blocks for the copy, without the GIL, one copy a run of consecutive slots: call it from a thread.
        Raises ``ShapeError`` before anything is written.
        """
        rows, numbers = self._checked_rows(pool, slots, source, "source")
        heads, tails = rows[:, : source.shape[1]], rows[:, source.shape[1] :]
        copy, heads, source = _copier(heads, source)
        for first, end, slot in _runs(numbers):
            copy(heads[slot : slot + end - first], source[first:end])
            if tails.size:
                tails[slot : slot + end - first] = 0

    def take(self, pool: int, slots: Sequence[int], out: Rows) -> None:
        """Copy the head of ``slots[i]`` into row i of ``out`` (``(len(slots), payload_bytes)``). Blocks as ``fill`` does."""
        rows, numbers = self._checked_rows(pool, slots, out, "out")
        copy, out, heads = _copier(out, rows[:, : out.shape[1]])
        for first, end, slot in _runs(numbers):
            copy(out[first:end], heads[slot : slot + end - first])

    def prefault(self) -> int:
        """Take all pages now, so that no copy pays for them later; returns the bytes taken.

        Blocks for seconds a GiB where the kernel must clear memory; safe while slots are in use, also by other
        threads, since no byte changes. Stops early, with fewer bytes, once the arena is closed or on a kernel before
        Linux 5.14, where pages are taken at first use instead. Raises ``TieringError`` when memory runs out.
        """
        taken_bytes = 0
        for pool, shape in enumerate(self._pools):
            for start in range(0, shape.pool_bytes, _PREFAULT_PIECE_BYTES):
                try:
                    piece = self.array(pool).reshape(-1)[start : start + _PREFAULT_PIECE_BYTES]
                except ClosedError:
                    return taken_bytes
                failure = populate(piece)
                if failure == errno.EINVAL:
                    return taken_bytes
                if failure:
                    raise TieringError(
                        f"cannot take the arena's memory ({os.strerror(failure)}); lower primary.capacity"
                    )
                taken_bytes += piece.nbytes
        return taken_bytes

    def close(self, *, abandon: bool = False) -> None:
        """Unmap the memory, unless something may still touch it. Idempotent.

        While a view, array, tensor or copy is alive the mapping stays, ``quarantined`` is true, and another ``close``
        tries again. With ``abandon`` it is never unmapped: for a hung transfer, which may know the bare address alone.
        """
        self._bytes = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._mapping is None or self._mapping in _abandoned:
            return
        if abandon:
            _abandoned.append(self._mapping)
            return
        try:
            self._mapping.close()
        except BufferError:
            # Somebody still has a view; `quarantined` says so.
            return
        self._mapping = None

    def _open(self) -> memoryview:
        whole = self._bytes
        if whole is None:
            raise ClosedError("the arena is closed")
        return whole

    def _shape(self, pool: int) -> PoolShape:
        if not 0 <= pool < len(self._pools):
            raise ShapeError(f"no pool {pool}: the arena has {len(self._pools)}")
        return self._pools[pool]

    def _checked_rows(
        self, pool: int, slots: Sequence[int], rows: Rows, name: str
    ) -> tuple[Rows, npt.NDArray[np.intp]]:
        shape = self._shape(pool)
        numbers = np.asarray(slots, dtype=np.intp)
        if rows.ndim != 2 or rows.dtype != np.uint8 or len(rows) != len(numbers) or rows.shape[1] > shape.slot_bytes:
            raise ShapeError(
                f"{name} is {rows.dtype} {rows.shape}; expected uint8 ({len(numbers)}, at most {shape.slot_bytes})"
            )
        # numpy takes -1 for the last slot.
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < shape.slots:
            raise ShapeError(f"slots {numbers.min()} to {numbers.max()} of pool {pool}, which has {shape.slots} slots")
        return self.array(pool), numbers


def _runs(numbers: npt.NDArray[np.intp]) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive slot numbers: where each starts and ends in ``numbers``, and its first slot."""
    if len(numbers):
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
        for first, end in itertools.pairwise([0, *breaks.tolist(), len(numbers)]):
            yield first, end, int(numbers[first])


def _copier(target: Rows, source: Rows) -> tuple[_Copy, npt.NDArray[Any], npt.NDArray[Any]]:
    """How to copy rows of ``source`` to rows of ``target``, and both as it wants them.

    memcpy, which is behind ``copyto``, falls to a third of its speed for up to 512 KiB when it writes a few bytes behind
    where it reads, modulo a page: the processor takes the next read for one of what was just written. That is so for
    every slot and an ``out`` from ``numpy.empty``, 16 bytes off a page. A loop over words does not suffer from it.
    """
    distance = (_address(target) - _address(source)) % SLOT_ALIGNMENT_BYTES
    same_for_all_rows = not (target.strides[0] % SLOT_ALIGNMENT_BYTES or source.strides[0] % SLOT_ALIGNMENT_BYTES)
    whole_words = not (target.shape[1] % 8 or distance % 8) and target.strides[1] == source.strides[1] == 1
    if 0 < distance < _ALIASED_BELOW_BYTES and same_for_all_rows and whole_words:
        return _copy_words, target.view(np.uint64), source.view(np.uint64)
    return np.copyto, target, source


def _copy_words(target: npt.NDArray[np.uint64], source: npt.NDArray[np.uint64]) -> None:
    np.positive(source, out=target)


def _address(rows: Rows) -> int:
    return int(rows.__array_interface__["data"][0])


def _mapped_bytes(pools: Sequence[PoolShape]) -> int:
    if not pools:
        raise ShapeError("an arena needs at least one pool")
    return sum(_round_up(pool.pool_bytes, POOL_ALIGNMENT_BYTES) for pool in pools)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
