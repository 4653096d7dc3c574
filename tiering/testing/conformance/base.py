"""What every part of the kit stands on: the author's hooks, and calls that check what holds for each call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import ClassVar, Final, TypeAlias, TypeVar

from tiering.api import Backend, ClosedError, Namespace, Outcome, OutcomeCode
from tiering.errors import ShapeError
from tiering.testing.conformance.buffers import FILL, Loan, block_payload
from tiering.testing.conformance.media import failing_files, hung_threads, slow_threads
from tiering.testing.conformance.rules import broken, require
from tiering.types import Group, KVLayout

T = TypeVar("T")
Block: TypeAlias = tuple[bytes, int]
"""A key and the size of its payload in bytes."""

CLOSE_DEADLINE_S: Final = 10.0
CLOSE_GRACE_S: Final = 3.0
"""How long after its deadline ``aclose`` may return on a loaded machine."""

_LEGAL: Final = {
    "contains": {OutcomeCode.OK, OutcomeCode.MISSING, OutcomeCode.FAILED},
    "load": {OutcomeCode.OK, OutcomeCode.MISSING, OutcomeCode.CORRUPT, OutcomeCode.FAILED},
    "store": {OutcomeCode.OK, OutcomeCode.FAILED, OutcomeCode.REFUSED},
    "delete": {OutcomeCode.OK, OutcomeCode.MISSING, OutcomeCode.FAILED},
}
OK: Final = OutcomeCode.OK
MISSING: Final = OutcomeCode.MISSING
CORRUPT: Final = OutcomeCode.CORRUPT


class Verdicts(list[OutcomeCode]):
    """The codes of a batch's outcomes; printed in words, with the reasons that the backend gave."""

    def __init__(self, outcomes: Iterable[Outcome | OutcomeCode]) -> None:
        outcomes = list(outcomes)
        super().__init__(o.code if isinstance(o, Outcome) else o for o in outcomes)
        self.words = [
            f"{o.code.name} ({o.why})" if isinstance(o, Outcome) and o.why else code.name
            for o, code in zip(outcomes, self, strict=True)
        ]

    def __repr__(self) -> str:
        return "[" + ", ".join(self.words) + "]"


class Opened:
    """An open backend, and calls on it that lend fresh buffers and check rules 1, 4 and 5 each time."""

    def __init__(self, backend: Backend, namespace: Namespace, call_timeout_s: float) -> None:
        self.backend = backend
        self.namespace = namespace
        self.call_timeout_s = call_timeout_s
        self.alignment_bytes = backend.capabilities.alignment_bytes

    def lend(self, size_bytes: int) -> Loan:
        return Loan(size_bytes, self.alignment_bytes)

    def lend_filled(self, block: Block) -> Loan:
        return Loan(block[1], self.alignment_bytes, self.payload(block))

    def payload(self, block: Block) -> bytes:
        return block_payload(self.namespace, *block)

    async def contains(self, keys: Iterable[bytes]) -> Verdicts:
        batch = list(keys)
        return Verdicts(await self.checked("contains", len(batch), self.backend.contains(batch)))

    async def delete(self, keys: Iterable[bytes]) -> Verdicts:
        batch = list(keys)
        return Verdicts(await self.checked("delete", len(batch), self.backend.delete(batch)))

    async def store(self, blocks: Sequence[Block]) -> Verdicts:
        loans = [self.lend_filled(block) for block in blocks]
        items = [(key, loan.view()) for (key, _), loan in zip(blocks, loans, strict=True)]
        outcomes = await self.checked("store", len(items), self.backend.store(items))
        del items
        for block, loan in zip(blocks, loans, strict=True):
            loan.require_guards("store")
            intact = loan.payload == self.payload(block) and not any(loan.padding)
            require(intact, 4, f"store changed src of {block[0]!r} ({block[1]} bytes); it is only lent for reading")
            await loan.close("store")
        return Verdicts(outcomes)

    async def load(self, blocks: Sequence[Block]) -> Verdicts:
        """Every block that comes back OK is compared with its true bytes, read from the lent buffer itself."""
        loans = [self.lend(size) for _, size in blocks]
        items = [(key, loan.view()) for (key, _), loan in zip(blocks, loans, strict=True)]
        outcomes = await self.checked("load", len(items), self.backend.load(items))
        del items
        for block, loan, outcome in zip(blocks, loans, outcomes, strict=True):
            loan.require_guards("load")
            if outcome.ok:
                self.require_whole(block, loan)
            await loan.close("load")
        return Verdicts(outcomes)

    def require_whole(self, block: Block, loan: Loan) -> None:
        """``loan`` holds ``block``, bit for bit, and padding of zeros or as it was lent."""
        key, size = block
        untouched = loan.payload == bytes((FILL,)) * size
        require(
            not untouched,
            4,
            f"load said OK for {key!r} ({size} bytes) but wrote nothing into dest itself; fill the lent view, then verify "
            "what it holds",
        )
        whole = loan.payload == self.payload(block)
        require(whole, 5, f"load said OK for {key!r} ({size} bytes) but dest holds other bytes; verify() tells")
        padding = set(loan.padding)
        require(
            padding <= {0} or padding <= {FILL},
            4,
            f"load of {key!r} left padding bytes {sorted(padding)[:4]} behind the payload; leave zeros or nothing",
        )

    async def checked(self, op: str, items: int, call: Awaitable[list[Outcome]]) -> list[Outcome]:
        """The outcomes of one call on a healthy medium, after the checks that hold for every call."""
        try:
            outcomes = await in_time(call, self.call_timeout_s)
        except Overdue:
            raise broken(1, f"{op} of {items} items did not return within {self.call_timeout_s} s") from None
        except (ClosedError, ShapeError):
            # Some tests are about these; elsewhere they speak for themselves.
            raise
        except Exception as error:
            if not items:
                raise broken(1, f"{op} of an empty batch raised {error!r}") from error
            message = f"{op} of {items} items raised {error!r} on a healthy medium"
            raise broken(2, f"{message}; report missing and bad blocks as outcomes") from error
        return require_legal(op, items, outcomes)

    async def store_all(self, blocks: Sequence[Block]) -> None:
        """Store where every block must succeed: the medium of a kit's test has room."""
        outcomes = await self.store(blocks)
        require(outcomes == [OK] * len(blocks), 6, f"a plain store of {len(blocks)} blocks gave {outcomes}")

    async def require_loads(self, blocks: Sequence[Block], rule: int, when: str) -> None:
        """All of ``blocks`` are found and load whole."""
        found = await self.contains(key for key, _ in blocks)
        require(found == [OK] * len(blocks), rule, f"{when}: contains gave {found} for stored blocks")
        loaded = await self.load(blocks)
        require(loaded == [OK] * len(blocks), rule, f"{when}: load gave {loaded} for stored blocks")

    async def require_missing(self, blocks: Sequence[Block], rule: int, when: str) -> None:
        """None of ``blocks`` is found or loads."""
        found = await self.contains(key for key, _ in blocks)
        require(found == [MISSING] * len(blocks), rule, f"{when}: contains gave {found}, all must be MISSING")
        loaded = await self.load(blocks)
        require(loaded == [MISSING] * len(blocks), rule, f"{when}: load gave {loaded}, all must be MISSING")


class KitBase:
    """The author's hooks. Only ``make_backend`` must be overridden."""

    payload_sizes: ClassVar[tuple[int, ...]] = (4096, 4097, 65536, 1_000_000)
    """Payload sizes in bytes that the kit stores; they share one namespace. At least two different ones."""
    corrupt_supported: ClassVar[bool] = False
    """Set True together with ``corrupt``. Left False, the damage tests are reported as skipped: rule 5 is then proven
    for lengths and namespaces only, not for a medium that returns bad bytes."""
    crash_supported: ClassVar[bool] = True
    """Set False if a child process cannot reach the medium; the test of a killed writer is then reported as skipped."""
    call_timeout_s: ClassVar[float] = 30.0
    """Seconds within which a call on a healthy medium returns; past it, it counts as hung."""
    heavy_modules: ClassVar[frozenset[str]] = frozenset()
    """Top-level modules that only ``open`` may import, beside the well-known clients that the kit knows of."""

    def make_backend(self, tmp_path: Path) -> Backend:
        """A new, unopened backend. Equal ``tmp_path``: the same medium, empty at first; another one: another medium.

        The medium has room for 64 blocks of each of ``payload_sizes``. The kit may call it in a child process, on a
        plain instance: reach the medium by ``tmp_path``, class attributes or environment variables there.
        """
        raise NotImplementedError(f"override make_backend in {type(self).__name__}")

    def corrupt(self, tmp_path: Path, key: bytes, edit: Callable[[bytes], bytes]) -> bool:
        """Replace what the medium holds for ``key`` by ``edit`` of it, behind the open backend's back.

        ``edit`` gets the stored bytes, header, payload and all, and may return fewer or more; a medium of fixed slots
        pads or cuts. If several namespaces hold ``key``, the one stored last counts. Returns whether the block was
        found and written.
        """
        return False

    def slow_medium(self, tmp_path: Path) -> AbstractContextManager[None]:
        """Within the block the medium takes its time. Entered on the running loop, beside an open backend.

        By default every call of the loop's default executor, where ``run_blocking`` and ``aiofiles`` work, starts up to
        ``SLOW_CALL_S`` late. Override it where the backend waits for something else.
        """
        return slow_threads()

    def hung_medium(self, tmp_path: Path) -> AbstractContextManager[None]:
        """Within the block the medium does not answer; afterwards it answers what was asked meanwhile, too.

        By default no call of the loop's default executor starts. Override it for another kind of medium, such as by
        stopping a server's process with SIGSTOP. A backend that answers all the same breaks no rule.
        """
        return hung_threads()

    def failing_medium(self, tmp_path: Path) -> AbstractContextManager[None]:
        """Within the block the medium takes no writes; reads may fail, too. Afterwards it is well.

        By default no file grows in this process (``RLIMIT_FSIZE``), which to a backend on files is a disk that fails.
        Override it for another kind of medium. A backend that stores all the same breaks no rule.
        """
        return failing_files()

    def namespace(self, tmp_path: Path, *, epoch: str = "0", model: str = "kit") -> Namespace:
        """A namespace of all ``payload_sizes``, of this test alone: media such as a server may be shared by tests."""
        groups = [Group("full", 16, size) for size in self.payload_sizes]
        return Namespace.of(KVLayout(groups, model=f"{model} {tmp_path}"), epoch=epoch)

    @asynccontextmanager
    async def opened(self, tmp_path: Path, *, epoch: str = "0", model: str = "kit") -> AsyncIterator[Opened]:
        """A backend on the medium of ``tmp_path``, open for the block and closed after it."""
        backend = self.make_backend(tmp_path)
        namespace = self.namespace(tmp_path, epoch=epoch, model=model)
        try:
            await self.open(backend, namespace)
            yield Opened(backend, namespace, self.call_timeout_s)
        finally:
            await close(backend)

    async def open(self, backend: Backend, namespace: Namespace) -> None:
        """``backend.open`` on a healthy medium."""
        try:
            await in_time(backend.open(namespace), self.call_timeout_s)
        except Overdue:
            raise broken(2, f"open did not return within {self.call_timeout_s} s on a healthy medium") from None
        except Exception as error:
            raise broken(2, f"open raised {error!r} on a healthy medium") from error

    def blocks(self, count: int, *, size: int | None = None, tag: str = "") -> list[Block]:
        """``count`` different blocks, of ``size`` bytes or of all sizes in turn."""
        sizes = self.payload_sizes if size is None else (size,)
        return [(f"{tag}{n:04d}".encode(), sizes[n % len(sizes)]) for n in range(count)]

    async def others_run(self, s: Opened) -> None:
        """Give whatever still runs the time of a few whole calls, and see that the backend is well."""
        blocks = self.blocks(4, tag="after-")
        await s.store_all(blocks)
        await s.require_loads(blocks, 7, "after cancelled calls")

    @property
    def small(self) -> int:
        return min(self.payload_sizes)

    @property
    def large(self) -> int:
        return max(self.payload_sizes)


class Overdue(Exception):
    """A call had not returned in time, and was cancelled."""


async def in_time(call: Awaitable[T], timeout_s: float) -> T:
    """What ``call`` gives. Raises ``Overdue`` after ``timeout_s``; a ``TimeoutError`` of the backend's own passes."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await call
    except TimeoutError:
        if limit.expired():
            raise Overdue from None
        raise


async def close(backend: Backend) -> None:
    """``aclose`` with a deadline that a healthy medium keeps."""
    try:
        await in_time(backend.aclose(CLOSE_DEADLINE_S), CLOSE_DEADLINE_S + CLOSE_GRACE_S)
    except Overdue:
        raise broken(9, f"aclose({CLOSE_DEADLINE_S}) had not returned {CLOSE_GRACE_S} s after its deadline") from None
    except Exception as error:
        raise broken(9, f"aclose raised {error!r} on a healthy medium") from error


def require_legal(op: str, items: int, outcomes: list[Outcome]) -> list[Outcome]:
    """``outcomes``, which ``op`` returned for ``items`` items, if they are what rule 1 asks for."""
    answer: object = outcomes
    is_list = isinstance(answer, list) and all(isinstance(outcome, Outcome) for outcome in answer)
    require(is_list, 1, f"{op} returned {outcomes!r:.200}; return a list of Outcome")
    require(len(outcomes) == items, 1, f"{op} got {items} items and returned {len(outcomes)} outcomes")
    illegal = sorted({outcome.code.name for outcome in outcomes if outcome.code not in _LEGAL[op]})
    require(not illegal, 1, f"{op} returned {illegal}; its outcomes are {sorted(c.name for c in _LEGAL[op])}")
    return outcomes
