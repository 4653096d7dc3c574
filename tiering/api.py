"""All that a backend or policy author imports. The contract is prose here and code in ``tiering.testing.BackendTests``."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from tiering.errors import BackendError, ClosedError, ConfigError, ShapeError
from tiering.support.blocking import run_blocking
from tiering.support.seal import HEADER_BYTES, seal, verify
from tiering.support.units import ByteCount, Seconds
from tiering.types import KEY_BYTES_MAX, BlockKey, InspectedBlock, Namespace, Outcome, OutcomeCode, ScanEntry, Usage

API_VERSION = 1

__all__ = [
    "API_VERSION",
    "HEADER_BYTES",
    "KEY_BYTES_MAX",
    "Backend",
    "BackendCapabilities",
    "BackendConfig",
    "BackendError",
    "BlockKey",
    "ByteCount",
    "ClosedError",
    "ConfigError",
    "EvictionPolicy",
    "InspectedBlock",
    "Namespace",
    "Outcome",
    "OutcomeCode",
    "ScanEntry",
    "Seconds",
    "ShapeError",
    "Usage",
    "run_blocking",
    "seal",
    "verify",
]


class AfterHits(BaseModel):
    """Demote a block once it has been loaded ``after_hits`` times."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    after_hits: Annotated[int, Field(ge=1)]


DemoteWhen = Literal["on_store", "on_evict", "never"] | AfterHits


class BackendConfig(BaseModel):
    """Base of a backend's configuration: one entry of ``tiers:`` in the YAML. Subclass it and add your own fields.

    ``backend`` is the import path ``"package.module:Class"`` of the backend, so that reading a configuration never
    imports a heavy client. The fields below belong to the tier and are used by the manager, not by the backend.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    backend: ClassVar[str]

    type: str
    name: str = ""
    """The tier's name in metrics and reports; the type when empty."""
    capacity_bytes: ByteCount | None = Field(default=None, alias="capacity")
    """Limit of an exclusive tier, kept by the manager's own accounting. Unused by shared tiers."""
    demote_when: DemoteWhen = "on_store"
    load_when: Literal["always"] = "always"
    deadline_s: Seconds = Field(default=2.0, alias="deadline", gt=0)
    """A load or lookup that takes longer, queueing included, is a miss."""
    policy: str | None = None
    """Eviction policy of an exclusive tier; the primary tier's when absent."""
    queue_bytes_max: ByteCount = Field(default=256 << 20, alias="queue_bytes", gt=0)
    """Most primary-tier bytes that stores to this tier may pin at a time."""
    ops_max: int = Field(default=8, ge=1, le=256)
    """Most backend calls of each direction under way at a time."""
    batch_blocks_max: int = Field(default=8, ge=1, le=1024)
    """Most blocks in one backend call."""


@dataclass(frozen=True, slots=True)
class BackendCapabilities:
    """What the manager must know about a tier. Fixed for the life of a backend object."""

    persistent: bool
    """Blocks outlive the process."""
    shared: bool
    """Other processes add and remove blocks; lookups must ask, and verdicts age."""
    exclusive: bool
    """Ours alone: the manager accounts its bytes and deletes from it."""
    alignment_bytes: int = 1
    """Address and length of every lent view are multiples of it (a power of two, at most 4096)."""
    header_bytes: int = HEADER_BYTES
    """What a block occupies beside its payload."""
    overhead_bytes: int = 0
    """Fixed part of the capacity that holds no blocks (journal, index)."""
    batch_blocks_max: int = 1024
    value_bytes_max: int | None = None
    """Largest payload the tier takes; None: no limit."""
    can_delete: bool = True
    can_scan: bool = False

    def stored_bytes(self, payload_bytes: int) -> int:
        """Bytes that a block of ``payload_bytes`` occupies in the tier, header and padding included."""
        padded = -(-payload_bytes // self.alignment_bytes) * self.alignment_bytes
        return self.header_bytes + padded


class Backend(abc.ABC):
    """One secondary tier. All coroutines run on the manager's I/O loop; none may block it (``run_blocking``).

    The ten rules (DESIGN section 6; each is checked by ``tiering.testing.BackendTests``):

    1. Batch in, one outcome an item, same order; empty batches and repeated keys are legal.
    2. Missing is a value. An exception means that the whole call failed; raise ``BackendError``.
    3. Partial failure is normal; the rest of the batch is still tried.
    4. ``src`` and ``dest`` are the caller's flat byte memoryviews: read or write them in place, keep none after return.
       Their address and length are multiples of ``alignment_bytes``: the payload, zero-padded.
       ``namespace.payload_of(len(view), alignment_bytes)`` is the payload's own length.
    5. A load is OK only if ``dest`` holds the whole, verified block. Short, long, foreign or bad bytes are CORRUPT.
    6. Store is idempotent and atomic: no reader, in this process or another, ever sees a part.
    7. On cancellation do not return until nothing of yours touches the buffers (``asyncio.to_thread`` breaks this).
    8. Calls may overlap, also on one key. Bound your own fan-out; queues, deadlines, retries, breaker are the driver's.
    9. ``aclose(deadline_s)`` is idempotent and waits for calls in flight, at most that long; afterwards each method
       raises ``ClosedError``. Nothing happens in ``__del__``.
    10. Quiet: no log line a block, no thread or loop that outlives ``aclose``, no heavy client imported before ``open``.

    A backend is constructed with its config alone and does nothing until ``open``. Subclasses set ``capabilities``
    in ``__init__``.
    """

    capabilities: BackendCapabilities

    @abc.abstractmethod
    async def open(self, namespace: Namespace) -> None:
        """Connect, recover, and serve ``namespace`` from now on. Called once.

        Raises ``ConfigError`` for what an operator must fix (an unwritable path, wrong credentials, a second owner),
        with the place and the remedy; ``BackendError`` for what may pass.
        """

    @abc.abstractmethod
    async def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """OK or MISSING for each key (FAILED if it could not be told)."""

    @abc.abstractmethod
    async def load(self, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        """Fill each ``dest`` with the verified block: OK, MISSING, CORRUPT (and deleted or quarantined), FAILED."""

    @abc.abstractmethod
    async def store(self, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        """Make each block durable to the tier's standard: OK, FAILED, REFUSED (``why`` in words)."""

    @abc.abstractmethod
    async def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        """Remove each block: OK or MISSING, FAILED. Also takes the handles of foreign blocks that ``scan`` gave."""

    @abc.abstractmethod
    async def aclose(self, deadline_s: float) -> None:
        """Wait for calls in flight, then release everything. Raises ``BackendError`` if they outlast the deadline."""

    def scan(self) -> AsyncIterator[list[ScanEntry]]:
        """Everything the tier holds, least recently used first, in batches. Only with ``can_scan``."""
        raise NotImplementedError(f"{type(self).__name__} has can_scan unset")

    def inspect(self, *, verify: bool) -> AsyncIterator[list[InspectedBlock]]:
        """Every block on the medium, of all namespaces, in batches; for people. Called on a backend that is not open.

        ``verify`` reads and checks each. Changes nothing. Raises ``ConfigError`` if the medium is in use elsewhere.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot list its medium")

    async def usage(self) -> Usage | None:
        """Bytes in use now; None if the tier cannot tell."""
        return None

    def link(self, parents: Mapping[BlockKey, BlockKey]) -> None:  # noqa: B027 - optional hook
        """Advice before a store: the parent of each key in its prefix. In memory only, never blocks, may be lost."""

    def touch(self, keys: Sequence[BlockKey]) -> None:  # noqa: B027 - optional hook
        """Advice: these blocks were used, in this order. In memory only, never blocks, may be lost."""


class EvictionPolicy(abc.ABC):
    """Decides which resident block goes first. Pure and deterministic: no clock, no randomness, no I/O.

    The core calls it under its lock. Keys a policy has not been told of are ignored. Costs count: everything here
    runs a few hundred thousand times a second.
    """

    leaf_first: ClassVar[bool] = False
    """True: the core protects a block that has a child in any tier, unless another tier holds a copy of the block."""

    def __init__(self, capacity_blocks: int) -> None:  # noqa: B027 - a policy may need no hint
        """``capacity_blocks``: how many blocks the tier can hold (a sizing hint, at least 1)."""

    @abc.abstractmethod
    def admit(self, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        """``keys``, a contiguous run of one prefix behind ``parent``, became resident. Known keys count as touched."""

    @abc.abstractmethod
    def touch(self, path: Sequence[BlockKey]) -> None:
        """A request used this path, head first. Members that are not resident are skipped."""

    @abc.abstractmethod
    def victims(self, n: int, protected: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """Up to ``n`` distinct resident keys that are not ``protected``, first to go first. Changes nothing that a caller can see.

        The list is valid as a whole: a parent may follow its last child in it.
        """

    @abc.abstractmethod
    def forget(self, keys: Sequence[BlockKey], *, evicted: bool) -> None:
        """``keys`` left the tier: ``evicted`` by choice (a policy may keep a ghost), or lost (reset, corrupt, missing)."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Resident keys."""
