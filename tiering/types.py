"""Plain values shared by every layer: outcomes, layouts, namespaces, reports. No behaviour beyond arithmetic."""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from tiering.errors import ShapeError

BlockKey: TypeAlias = bytes
"""1-36 opaque bytes. Equal key in an equal namespace means equal bytes."""

KEY_BYTES_MAX = 36
FORMAT_VERSION = 1
"""Version of the sealed block format; part of every namespace, so a change of format is a clean miss."""


class OutcomeCode(enum.Enum):
    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    FAILED = "failed"
    REFUSED = "refused"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one block in one batch. ``why`` is for people; ``retryable`` is set on FAILED alone."""

    code: OutcomeCode
    why: str = ""
    retryable: bool = False

    OK: ClassVar[Outcome]
    MISSING: ClassVar[Outcome]
    CANCELLED: ClassVar[Outcome]

    @property
    def ok(self) -> bool:
        return self.code is OutcomeCode.OK

    @staticmethod
    def corrupt(why: str) -> Outcome:
        return Outcome(OutcomeCode.CORRUPT, why)

    @staticmethod
    def failed(why: str, *, retryable: bool = False) -> Outcome:
        return Outcome(OutcomeCode.FAILED, why, retryable)

    @staticmethod
    def refused(why: str) -> Outcome:
        return Outcome(OutcomeCode.REFUSED, why)


Outcome.OK = Outcome(OutcomeCode.OK)
Outcome.MISSING = Outcome(OutcomeCode.MISSING)
Outcome.CANCELLED = Outcome(OutcomeCode.CANCELLED)

_KIND = re.compile(r"full|recurrent|sliding_window\([1-9][0-9]*\)")


def sliding_window(tokens: int) -> str:
    """The ``Group.kind`` of layers that attend to the last ``tokens`` tokens only."""
    return f"sliding_window({tokens})"


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share an attention kind: ``"full"``, ``sliding_window(tokens)`` or ``"recurrent"``.

    ``block_bytes`` is the size of one block: ``tokens_per_block`` tokens, all layers of the group, all ranks.
    """

    kind: str
    tokens_per_block: int
    block_bytes: int

    def __post_init__(self) -> None:
        if not _KIND.fullmatch(self.kind):
            raise ShapeError(f'Group.kind is {self.kind!r}; use "full", "recurrent" or "sliding_window(N)"')
        for name in ("tokens_per_block", "block_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ShapeError(f"Group.{name} is {value!r}; it must be a whole number of at least 1")


def encode_fields(*values: str | bytes | int | Sequence[int]) -> bytes:
    """Injective encoding of typed fields: a type byte and an 8-byte length before each value.

    Plain concatenation would let ("ab", "c") and ("a", "bc") collide, and with them two tenants' blocks.
    """
    out = bytearray()
    for value in values:
        if isinstance(value, str):
            tag, body = b"s", value.encode()
        elif isinstance(value, bytes):
            tag, body = b"b", value
        elif isinstance(value, int):
            tag, body = b"i", value.to_bytes(16, "big", signed=True)
        else:
            tag, body = b"l", encode_fields(*value)
        out += tag + len(body).to_bytes(8, "big") + body
    return bytes(out)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What the bytes of a block mean. Two layouts that differ in any field never share a block."""

    groups: tuple[Group, ...]
    model: str
    revision: str = ""
    dtype: str = "uint8"
    ranks: int = 1

    def __init__(
        self, groups: Iterable[Group], *, model: str, revision: str = "", dtype: str = "uint8", ranks: int = 1
    ) -> None:
        checked = tuple(groups)
        if not checked:
            raise ShapeError("KVLayout.groups is empty; give at least one Group")
        if not model:
            raise ShapeError("KVLayout.model is empty; name the model, so that two models never share blocks")
        if ranks < 1:
            raise ShapeError(f"KVLayout.ranks is {ranks!r}; it must be at least 1")
        for name, value in (
            ("groups", checked), ("model", model), ("revision", revision), ("dtype", str(dtype)), ("ranks", ranks)
        ):  # fmt: skip
            object.__setattr__(self, name, value)

    @staticmethod
    def uniform(
        *,
        model: str,
        tokens_per_block: int,
        block_bytes: int,
        revision: str = "",
        dtype: str = "uint8",
        ranks: int = 1,
    ) -> KVLayout:
        """A layout of one full-attention group."""
        group = Group("full", tokens_per_block, block_bytes)
        return KVLayout([group], model=model, revision=revision, dtype=dtype, ranks=ranks)

    def key_seed(self, group: int) -> bytes:
        """The part of a block key's seed that the layout gives: model, revision, dtype, tokens a block."""
        return encode_fields(self.model, self.revision, self.dtype, self.groups[group].tokens_per_block)


@dataclass(frozen=True, slots=True)
class Namespace:
    """Fingerprint of all that makes bytes interchangeable. ``digest`` is 32 bytes (sha256)."""

    digest: bytes
    payload_bytes: tuple[int, ...]
    """Distinct payload sizes that blocks of this namespace have, one a group."""
    fields: Mapping[str, str] = field(compare=False, hash=False, repr=False)
    """The fields behind the digest, for people (manifests, ``tiering inspect``)."""

    @staticmethod
    def of(layout: KVLayout, *, epoch: str, codec: str = "raw") -> Namespace:
        groups = ";".join(f"{g.kind}:{g.tokens_per_block}:{g.block_bytes}" for g in layout.groups)
        fields = {
            "model": layout.model, "revision": layout.revision, "dtype": layout.dtype, "groups": groups,
            "ranks": str(layout.ranks), "codec": codec, "epoch": epoch, "format": str(FORMAT_VERSION),
        }  # fmt: skip
        pairs = [part for item in fields.items() for part in item]
        digest = hashlib.sha256(encode_fields("kvtiering namespace", *pairs)).digest()
        return Namespace(digest, tuple(sorted({g.block_bytes for g in layout.groups})), fields)

    def payload_of(self, view_bytes: int, alignment_bytes: int) -> int:
        """Payload size of a block lent in a view of ``view_bytes``, which is the payload padded to the alignment.

        Where two groups pad to the same length the larger payload counts for both: the padding is zero.
        """
        for payload in reversed(self.payload_bytes):
            if -(-payload // alignment_bytes) * alignment_bytes == view_bytes:
                return payload
        raise ShapeError(
            f"no block of this namespace fits a view of {view_bytes} bytes (payloads: {self.payload_bytes})"
        )


class TierState(enum.Enum):
    OPENING = "opening"
    UP = "up"
    DEGRADED = "degraded"
    """Loads work, stores do not."""
    DOWN = "down"
    CLOSING = "closing"
    CLOSED = "closed"
    ABANDONED = "abandoned"
    """Hung at close: its slots are quarantined for the life of the process."""


@dataclass(frozen=True, slots=True)
class ScanEntry:
    """One block that a tier holds at open.

    ``handle`` is the block's key; for a ``foreign`` block (another namespace's, which shares the byte budget) it is
    an opaque name of more than 36 bytes that ``Backend.delete`` understands. ``stored_bytes`` is what it occupies.
    """

    handle: bytes
    stored_bytes: int
    parent: BlockKey | None = None
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """``allocated_bytes``: what the tier occupies on its medium, all included. ``live_bytes``: of it, blocks that can be loaded."""

    allocated_bytes: int
    live_bytes: int


@dataclass(frozen=True, slots=True)
class InspectedBlock:
    """One block as ``Backend.inspect`` found it on the medium, of whatever namespace.

    ``place`` names where it lies, in words (a file and a slot). ``outcome`` is None where the block was not read.
    """

    namespace_digest: bytes
    namespace_fields: Mapping[str, str]
    """Of the ``Namespace``; empty where the medium does not tell."""
    key: BlockKey
    parent: BlockKey | None
    stored_bytes: int
    place: str
    outcome: Outcome | None


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest contiguous run that some tier has.

    ``blocks`` counts what any tier has, ``tokens`` the tokens they stand for, ``loadable_blocks`` what ``load`` can
    give now (a run longer than the primary tier yields its head). ``by_tier`` tells the nearest tier of each block.
    """

    blocks: int
    tokens: int
    loadable_blocks: int
    by_tier: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StoreReport:
    """``stored`` blocks were copied, ``present`` needed no copy, ``refused`` found no room (or failed).

    ``outcomes`` has one entry a key, in the caller's order.
    """

    stored: int
    present: int
    refused: int
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class FlushReport:
    """``acknowledged`` demotions reached their tier since the flush began; ``lost`` ones did not (``by_tier`` tells where)."""

    acknowledged: int
    lost: int
    lost_by_tier: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class KvEvent:
    """Blocks that came to a tier or went from it.

    ``kind``: ``"stored"``, ``"removed"``, or ``"cleared"`` (a reset: no tier has anything, and the other fields are empty).
    ``keys`` of a ``stored`` event follow each other in one prefix, behind ``parent`` (None: unknown, or the beginning).
    """

    kind: str
    tier: str = ""
    group: int = 0
    keys: tuple[BlockKey, ...] = ()
    parent: BlockKey | None = None


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """What one step of the manager changed. ``sequence`` grows by one from 0: a jump means that batches were missed, and
    that what a follower believes of the tiers is no more to be trusted."""

    sequence: int
    time_s: float
    """Seconds since 1970."""
    events: tuple[KvEvent, ...]
