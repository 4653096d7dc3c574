"""One command on its way through a lane, and the one backend call that it becomes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tiering.api import Backend
from tiering.core.commands import Delete, Demote, IoCommand, Probe, Promote
from tiering.errors import BackendError, ClosedError
from tiering.runtime.alarms import Alarm
from tiering.runtime.counters import ErrorKind, Kind
from tiering.runtime.ports import SlotViews
from tiering.types import Outcome, OutcomeCode

DEADLINE: Final = Outcome.failed("deadline")


class Job:
    """A command and what is known of it. Belongs to its lane; everything happens on the I/O loop."""

    __slots__ = (
        "alarm", "command", "died", "due_s", "generation", "judged", "keys", "kind", "lent_bytes", "lost", "outcomes", "overdue",
        "payload_bytes", "resting", "task", "todo", "told", "unwanted", "verdict",
    )  # fmt: skip

    def __init__(self, command: IoCommand, due_s: float, pool_bytes: Sequence[int]) -> None:
        self.command = command
        self.kind, self.keys = _kind_and_keys(command)
        self.payload_bytes = _payload_bytes(command, pool_bytes)
        """Of each item; empty for probes and deletes, which lend no slot."""
        self.lent_bytes = sum(self.payload_bytes)
        """Payload bytes of the slots that it holds."""
        self.due_s = due_s
        """A load's or probe's deadline; for stores and deletes, where retries end, known once it runs."""
        self.outcomes: list[Outcome | None] = [None] * len(self.keys)
        self.todo = list(range(len(self.keys)))
        """Items that the next call is to try. Those beyond have their last outcome."""
        self.task: asyncio.Task[None] | None = None
        self.alarm: Alarm | None = None
        self.generation = 0
        """Of the breaker, when the running call began."""
        self.judged = False
        """The running call was counted by the breaker; it counts once, at its deadline or at its return."""
        self.overdue = False
        self.resting = False
        """Between two tries: no backend call runs."""
        self.unwanted = False
        """Cancelled while it ran: it lands, and is not tried again."""
        self.told = False
        """Its task was cancelled by the lane, so that ``verdict`` is the outcome of what is still to do."""
        self.verdict: Outcome | None = None
        self.died = ""
        self.lost = False
        """Its tier was abandoned while it ran: nothing is reported, so that its slots are never used again."""

    @property
    def op(self) -> int:
        return self.command.op

    @property
    def ok_bytes(self) -> int:
        """Payload bytes of the items that came back OK."""
        if not self.payload_bytes:
            return 0
        pairs = zip(self.payload_bytes, self.outcomes, strict=True)
        return sum(size for size, outcome in pairs if outcome is not None and outcome.ok)

    def take(self, outcomes: Sequence[Outcome]) -> None:
        """Note what became of the items to do; those that may work a little later stay to do."""
        for index, outcome in zip(self.todo, outcomes, strict=True):
            self.outcomes[index] = outcome
        self.todo = [
            i for i, o in zip(self.todo, outcomes, strict=True) if o.code is OutcomeCode.FAILED and o.retryable
        ]

    def settle(self, verdict: Outcome | None) -> None:
        """Nothing more is tried: what has no outcome yet, and with a verdict what was still to do, ends with it."""
        for index in self.todo:
            if verdict is not None or self.outcomes[index] is None:
                self.outcomes[index] = verdict or Outcome.CANCELLED
        self.todo = []

    def final(self) -> tuple[Outcome, ...]:
        self.settle(None)
        return tuple(outcome if outcome is not None else Outcome.CANCELLED for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class Reply:
    """What one backend call came to: an outcome an item, and for a call that failed as a whole, how."""

    outcomes: list[Outcome]
    error: ErrorKind | None = None
    defect: str = ""
    """How the backend broke its contract, in words."""

    @property
    def failed(self) -> bool:
        """Nothing in it worked. MISSING, CORRUPT and REFUSED are answers of a tier that works."""
        return bool(self.outcomes) and all(outcome.code is OutcomeCode.FAILED for outcome in self.outcomes)


async def ask(backend: Backend, job: Job, slots: SlotViews) -> Reply:
    """Call the backend for ``job.todo``. Whatever ``Exception`` the backend raises becomes FAILED outcomes.

    The lent views are dropped before it returns. Raises ``CancelledError`` if the task was cancelled, once the
    backend has let go of the buffers (rule 7), and whatever ``slots.view`` raises.
    """
    command = job.command
    keys = [job.keys[index] for index in job.todo]
    name = f"{type(backend).__name__}.{_METHOD[job.kind]}"
    views: list[tuple[bytes, memoryview]] = []
    if isinstance(command, Promote | Demote):
        views = _views(command, job, backend.capabilities.alignment_bytes, slots)
    defect = ""
    try:
        match command:
            case Probe():
                answer = await backend.contains(keys)
            case Delete():
                answer = await backend.delete(keys)
            case Promote():
                answer = await backend.load(views)
            case Demote():
                defect = _link(backend, command, keys)
                answer = await backend.store(views)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return _broken(f"{name} raised CancelledError though nobody had cancelled it (rule 2)", len(keys))
    except BackendError as error:
        return Reply([Outcome.failed(str(error), retryable=error.retryable)] * len(keys), "raised", defect)
    except ClosedError as error:
        return Reply([Outcome.failed(str(error) or "closed")] * len(keys), "raised", defect)
    except Exception as error:
        return _broken(f"{name} raised {error!r}; rule 2 allows BackendError", len(keys))
    if problem := _shape_problem(answer, len(keys)):
        return _broken(f"{name} {problem} (rule 1)", len(keys))
    return Reply(answer, "failed" if Reply(answer).failed else None, defect)


_METHOD: Final[dict[Kind, str]] = {"probe": "contains", "load": "load", "store": "store", "delete": "delete"}


def _kind_and_keys(command: IoCommand) -> tuple[Kind, tuple[bytes, ...]]:
    match command:
        case Probe(keys=keys):
            return "probe", keys
        case Delete(keys=keys):
            return "delete", keys
        case Promote(items=items):
            return "load", tuple(item.key for item in items)
        case Demote(items=items):
            return "store", tuple(item.key for item in items)


def _payload_bytes(command: IoCommand, pool_bytes: Sequence[int]) -> tuple[int, ...]:
    if isinstance(command, Promote | Demote):
        return tuple(pool_bytes[item.pool] for item in command.items)
    return ()


def _views(
    command: Promote | Demote, job: Job, alignment_bytes: int, slots: SlotViews
) -> list[tuple[bytes, memoryview]]:
    views = []
    for index in job.todo:
        item = command.items[index]
        length = -(-job.payload_bytes[index] // alignment_bytes) * alignment_bytes
        views.append((item.key, slots.view(item.pool, item.slot, length)))
    return views


def _link(backend: Backend, command: Demote, keys: Sequence[bytes]) -> str:
    """Tell the chain links that are known. Advice only: a backend that fails at it still gets the store."""
    parents = {key: command.parents[key] for key in keys if key in command.parents}
    try:
        if parents:
            backend.link(parents)
    except Exception as error:
        return f"{type(backend).__name__}.link raised {error!r}"
    return ""


def _broken(defect: str, count: int) -> Reply:
    return Reply([Outcome.failed(defect)] * count, "defect", defect)


def _shape_problem(answer: object, count: int) -> str:
    if not isinstance(answer, list):
        return f"returned {type(answer).__name__}, not a list of outcomes"
    if len(answer) != count:
        return f"returned {len(answer)} outcomes for {count} items"
    strange = [type(outcome).__name__ for outcome in answer if not isinstance(outcome, Outcome)]
    return f"returned {strange[0]} among its outcomes" if strange else ""
