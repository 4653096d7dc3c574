"""Slow, hung and failing media: what rules 2, 3, 6, 7, 8 and 9 ask for when the medium is not well."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

from tiering.api import BackendError, ClosedError, Outcome
from tiering.testing.conformance.base import (
    CLOSE_GRACE_S,
    MISSING,
    OK,
    Block,
    KitBase,
    Opened,
    Overdue,
    Verdicts,
    in_time,
    require_legal,
)
from tiering.testing.conformance.buffers import Loan
from tiering.testing.conformance.rules import blame, broken, require

START_TURNS: Final = 20
"""Turns of the loop in which a call gets as far as it can before it waits for the medium."""
HUNG_DEADLINE_S: Final = 0.2
"""What ``aclose`` is given while the medium hangs, and how long a cancelled call is watched."""

Call: TypeAlias = Coroutine[Any, Any, list[Outcome]]


class DisturbedRules(KitBase):
    @pytest.mark.asyncio
    async def test_rule_07_cancelled_calls_on_a_hung_medium_leave_the_buffers_alone(self, tmp_path: Path) -> None:
        """A call that was cancelled returns when the medium has let go of the buffer, or can no longer get at it."""
        async with self.opened(tmp_path) as s:
            old, new = (b"old", self.large), (b"new", self.large)
            await s.store_all([old])
            loans = [s.lend(self.large), s.lend_filled(new)]
            with self.hung_medium(tmp_path):
                calls = await _start_three(s, old, new, loans)
                for call in calls:
                    call.cancel()
                await asyncio.wait(calls, timeout=HUNG_DEADLINE_S)
                returned = [loan for loan, call in zip(loans, calls, strict=False) if call.done()]
                for loan in returned:
                    loan.poison()
            await asyncio.wait(calls, timeout=self.call_timeout_s)
            for call in calls:
                name = call.get_name()
                require(call.done(), 7, f"{name} was cancelled, the medium is well again, and it still runs")
                if not call.cancelled() and (error := call.exception()) is not None:
                    raise broken(7, f"{name}, cancelled on a hung medium, raised {error!r}") from error
            for loan in loans:
                if loan not in returned:
                    loan.poison()
            del calls, call
            await self.others_run(s)
            with blame(7, "a store was cancelled on a hung medium and its src was reused"):
                loaded = await s.load([new])
            require(loaded[0] in (OK, MISSING), 7, f"a block whose store was cancelled loads as {loaded}")
            await s.require_loads([old], 7, "stored before the medium hung")
        for loan in loans:
            loan.require_poisoned("the cancelled call")
            await loan.close("the cancelled call")

    @pytest.mark.asyncio
    async def test_rule_08_a_slow_medium_only_takes_longer(self, tmp_path: Path) -> None:
        """Calls overtake each other, some are cancelled; each outcome is right, and so is what remains."""
        async with self.opened(tmp_path) as s:
            old, new, gone = self.blocks(6, tag="old"), self.blocks(6, tag="new"), self.blocks(4, tag="gone")
            await s.store_all([*old, *gone])
            can_delete = s.backend.capabilities.can_delete
            loans: list[Loan] = []
            with self.slow_medium(tmp_path):
                calls: list[Awaitable[object]] = [s.require_loads(old[n : n + 3], 8, "a slow medium") for n in range(4)]
                calls += [s.store_all(new[n : n + 2]) for n in (0, 2, 4, 3)]
                calls += [s.require_missing([(b"absent-%d" % n, self.small)], 8, "a slow medium") for n in range(4)]
                if can_delete:
                    calls += [s.delete([key]) for key, _ in gone]
                calls += [self._cancelled_load(s, old[n], loans, turns=1 << n) for n in range(6)]
                with blame(8, "calls overtake each other on a slow medium"):
                    await asyncio.gather(*calls)
                await s.require_loads([*old, *new], 8, "stored on a slow medium")
                if can_delete:
                    await s.require_missing(gone, 8, "deleted on a slow medium")
        for loan in loans:
            loan.require_poisoned("the cancelled load")
            await loan.close("the cancelled load")

    @pytest.mark.asyncio
    async def test_rule_09_aclose_keeps_its_deadline_on_a_hung_medium(self, tmp_path: Path) -> None:
        """row 8: past the deadline it raises ``BackendError``; the buffers stay lent until the calls end, and it can be repeated."""
        async with self.opened(tmp_path) as s:
            old, new = (b"old", self.large), (b"new", self.large)
            await s.store_all([old])
            loans = [s.lend(self.large), s.lend_filled(new)]
            with self.hung_medium(tmp_path):
                calls = await _start_three(s, old, new, loans)
                told = await _close_hung(s)
                returned = [loan for loan, call in zip(loans, calls, strict=False) if call.done()]
                running = [call.get_name() for call in calls if not call.done()]
                require(
                    told or not running, 9, f"aclose returned though {running} still run; raise BackendError instead"
                )
                for loan in returned:
                    loan.poison()
                await _require_closed(s)
            await asyncio.wait(calls, timeout=self.call_timeout_s)
            for call in calls:
                require(call.done(), 9, f"the medium is well again, and {call.get_name()} still runs")
                error = None if call.cancelled() else call.exception()
                legal = error is None or isinstance(error, ClosedError | BackendError)
                require(legal, 9, f"{call.get_name()}, in flight at aclose, raised {error!r}")
            for loan in loans:
                if loan not in returned:
                    loan.poison()
            del calls, call
        for loan in loans:
            loan.require_poisoned("a call that outlasted aclose")
            await loan.close("a call that outlasted aclose")

    @pytest.mark.asyncio
    async def test_rule_02_a_failing_medium_is_told_and_overcome(self, tmp_path: Path) -> None:
        """row 18: FAILED or REFUSED a block, or ``BackendError`` for the call; no other exception, no false OK, no part."""
        async with self.opened(tmp_path) as s:
            old, new, more = (self.blocks(6, tag=tag) for tag in ("old", "new", "more"))
            await s.store_all(old)
            claimed: list[Block] = []
            with self.failing_medium(tmp_path):
                for batch in (new[:1], new[1:], [old[0], *more]):
                    outcomes = await self._suffer(s, "store", batch)
                    claimed += [block for block, code in zip(batch, outcomes, strict=True) if code is OK]
                await self._suffer(s, "load", [*old, *new])
            await s.require_loads(claimed, 6, "store said OK though the medium failed")
            loaded = await s.load([*old, *new, *more])
            legal = set(loaded) <= {OK, MISSING}
            require(legal, 6, f"after the medium had failed load gave {loaded}; whole or MISSING are legal")
            await s.require_loads(old[1:], 3, "stored before the medium failed, and not touched since")
            await s.store_all([*old, *new, *more])
            await s.require_loads([*old, *new, *more], 2, "the medium is well again")

    async def _suffer(self, s: Opened, op: str, blocks: Sequence[Block]) -> Verdicts:
        """The outcomes of a call on a failing medium; whatever a load calls OK is compared. A failed call is FAILED."""
        loans = [s.lend_filled(block) if op == "store" else s.lend(block[1]) for block in blocks]
        items = [(key, loan.view()) for (key, _), loan in zip(blocks, loans, strict=True)]
        outcomes = [Outcome.failed("the call")] * len(items)
        try:
            outcomes = await in_time(getattr(s.backend, op)(items), self.call_timeout_s)
        except BackendError:
            # The call failed as a whole, which is legal now.
            pass
        except Overdue:
            raise broken(2, f"{op} on a failing medium did not return within {self.call_timeout_s} s") from None
        except Exception as error:
            message = f"{op} on a failing medium raised {error!r}"
            raise broken(2, f"{message}; report FAILED or REFUSED for each block, or raise BackendError") from error
        finally:
            del items
        require_legal(op, len(blocks), outcomes)
        for block, loan, outcome in zip(blocks, loans, outcomes, strict=True):
            loan.require_guards(op)
            if op == "load" and outcome.ok:
                s.require_whole(block, loan)
            await loan.close(op)
        return Verdicts(outcomes)

    async def _cancelled_load(self, s: Opened, block: Block, loans: list[Loan], *, turns: int) -> None:
        loan = s.lend(block[1])
        loans.append(loan)
        call = asyncio.create_task(s.backend.load([(block[0], loan.view())]), name="kit-cancelled")
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait((call,))
        loan.poison()


async def _start_three(s: Opened, old: Block, new: Block, loans: Sequence[Loan]) -> list[asyncio.Task[list[Outcome]]]:
    """A load of ``old``, a store of ``new`` and a lookup, each as far as it gets."""
    calls: dict[str, Call] = {
        "load": s.backend.load([(old[0], loans[0].view())]),
        "store": s.backend.store([(new[0], loans[1].view())]),
        "contains": s.backend.contains([old[0], new[0]]),
    }
    tasks = [asyncio.create_task(call, name=f"a {name} in flight") for name, call in calls.items()]
    for _ in range(START_TURNS):
        await asyncio.sleep(0)
    return tasks


async def _close_hung(s: Opened) -> bool:
    """``aclose`` on a hung medium; whether it said that calls still run."""
    try:
        await in_time(s.backend.aclose(HUNG_DEADLINE_S), HUNG_DEADLINE_S + CLOSE_GRACE_S)
    except BackendError:
        return True
    except Overdue:
        late = f"had not returned {CLOSE_GRACE_S} s after its deadline"
        raise broken(9, f"aclose({HUNG_DEADLINE_S}) on a hung medium {late}") from None
    except Exception as error:
        raise broken(9, f"aclose on a hung medium raised {error!r}; raise BackendError") from error
    return False


async def _require_closed(s: Opened) -> None:
    answer: object
    try:
        answer = await in_time(s.backend.contains([b"any"]), CLOSE_GRACE_S)
    except ClosedError:
        return
    except Exception as error:
        answer = error
    raise broken(9, f"after an aclose that gave up, contains gave {answer!r}; raise ClosedError first of all")
