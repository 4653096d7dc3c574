"""The core's input, kept and written down, so that an incident can be run again. Text only: JSON lines, bytes as hex."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tiering.core import events as ev
from tiering.core.machine import TieringCore
from tiering.core.ring import EventRing
from tiering.core.state import CoreSpec
from tiering.errors import TieringError
from tiering.types import Outcome, OutcomeCode, ScanEntry, TierState

FORMAT_VERSION = 1
KEYS_MAX = 100_000
"""Most keys that the kept events may name, all together: bounds the memory and the dump (about 7 MB)."""


class Journal:
    """The core's ``observer``: keeps the newest ``events_max`` events. ``spec`` goes into the header of the dump."""

    def __init__(self, events_max: int, spec: CoreSpec | None = None) -> None:
        self._ring = EventRing(events_max, KEYS_MAX)
        self._spec = spec

    def __call__(self, event: ev.Event) -> None:
        self._ring.append(event)

    def dump(self) -> str:
        """One line for the header, one an event, oldest first."""
        header = {
            "format": FORMAT_VERSION,
            "dropped": self._ring.dropped,
            "spec": None if self._spec is None else summary(self._spec),
        }
        lines = [json.dumps(header), *(json.dumps(_encode(event)) for event in self._ring)]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Recording:
    """A journal that was read back."""

    events: tuple[ev.Event, ...]
    dropped: int
    """Older events that were not kept."""
    spec: dict[str, Any] | None
    """``summary`` of the core's spec, if the journal knew it."""


def load(text: str) -> Recording:
    """Read what ``dump`` wrote. Raises ``TieringError`` that names the line if it is something else."""
    lines = text.splitlines()
    try:
        header = json.loads(lines[0])
        version, dropped, spec = header["format"], header["dropped"], header["spec"]
    except (IndexError, KeyError, TypeError, ValueError):
        raise TieringError("journal, line 1: not the header of a journal") from None
    if version != FORMAT_VERSION:
        raise TieringError(f"journal, line 1: format {version!r} is not {FORMAT_VERSION}, the one this version reads")
    events = []
    for number, line in enumerate(lines[1:], 2):
        try:
            events.append(_decode(json.loads(line)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TieringError(f"journal, line {number}: not an event ({error!r})") from None
    return Recording(tuple(events), dropped, spec)


def replay(spec: CoreSpec, recording: Recording) -> TieringCore:
    """A new core that has seen all the events.

    Raises ``TieringError`` if the journal does not begin at the beginning, or was made with another spec; and whatever
    the core raised in its time.
    """
    if recording.dropped:
        raise TieringError(
            f"the journal's first {recording.dropped} events were dropped, so the state before the others is unknown;"
            " keep more events to replay from the beginning"
        )
    if recording.spec is not None and recording.spec != summary(spec):
        raise TieringError(f"the journal was made with another spec: {recording.spec}")
    core = TieringCore(spec)
    for event in recording.events:
        core.handle(event)
    return core


def summary(spec: CoreSpec) -> dict[str, Any]:
    """The spec as JSON values; policies by the names of their classes."""
    document: dict[str, Any] = dataclasses.asdict(spec)
    for part in (*document["pools"], *document["tiers"]):
        part["policy"] = getattr(part["policy"], "__name__", repr(part["policy"]))
    document["pools"], document["tiers"] = list(document["pools"]), list(document["tiers"])
    return document


# -- events as JSON ---------------------------------------------------------------------------------------------------


def _encode(event: ev.Event) -> dict[str, Any]:
    fields: dict[str, Any] = {"event": type(event).__name__}
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        codec = _CODECS.get(field.name)
        fields[field.name] = value if codec is None else codec[0](value)
    return fields


def _decode(fields: dict[str, Any]) -> ev.Event:
    kind = _EVENTS[fields.pop("event")]
    event: ev.Event = kind(**{n: _CODECS[n][1](value) if n in _CODECS else value for n, value in fields.items()})
    return event


def _encode_outcome(outcome: Outcome) -> str | list[Any]:
    if not outcome.why and not outcome.retryable:
        return outcome.code.value
    return [outcome.code.value, outcome.why, outcome.retryable]


def _decode_outcome(value: str | list[Any]) -> Outcome:
    if isinstance(value, str):
        return Outcome(OutcomeCode(value))
    code, why, retryable = value
    return Outcome(OutcomeCode(code), why, retryable)


def _encode_entry(entry: ScanEntry) -> list[Any]:
    parent = None if entry.parent is None else entry.parent.hex()
    return [entry.handle.hex(), entry.stored_bytes, parent, entry.foreign]


def _decode_entry(value: list[Any]) -> ScanEntry:
    handle, stored_bytes, parent, foreign = value
    return ScanEntry(bytes.fromhex(handle), stored_bytes, None if parent is None else bytes.fromhex(parent), foreign)


_CODECS: Final[dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]] = {
    "keys": (lambda keys: [key.hex() for key in keys], lambda value: tuple(map(bytes.fromhex, value))),
    "parent": (
        lambda key: None if key is None else key.hex(),
        lambda value: None if value is None else bytes.fromhex(value),
    ),
    "outcomes": (lambda items: [_encode_outcome(o) for o in items], lambda value: tuple(map(_decode_outcome, value))),
    "entries": (lambda items: [_encode_entry(e) for e in items], lambda value: tuple(map(_decode_entry, value))),
    "holds": (lambda holds: holds, lambda value: None if value is None else tuple(value)),
    "state": (lambda state: state.value, TierState),
}
"""By field name; every other field is a JSON value as it stands."""

_EVENTS: Final[dict[str, Any]] = {kind.__name__: kind for kind in ev.Event.__args__}
