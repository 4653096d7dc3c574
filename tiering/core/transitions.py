"""Every change of a block's state. What does not stand here is an ``InvariantViolation``.

Three small machines: the key in the primary tier, the slot that holds its bytes, and the key in one secondary tier (a
*cell*). The diagrams of ``docs/states.md`` are made from these tables.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class PrimaryState(enum.IntEnum):
    ABSENT = 0
    FILLING = 1
    READY = 2


class SlotState(enum.IntEnum):
    FREE = 0
    FILLING = 1
    HELD = 2
    DOOMED = 3
    """Bytes are still landing for a key that gave the slot up."""
    CONDEMNED = 4
    """Still read by leases of a block that was invalidated."""


class CellState(enum.IntEnum):
    UNKNOWN = 0
    ASKING = 1
    PRESENT = 2
    ABSENT = 3
    STORING = 4
    DELETING = 5


class Move(enum.IntEnum):
    """What happens to a state. One vocabulary for the three machines."""

    GRANT = 0
    """A slot is given to the key."""
    LAND = 1
    """The bytes arrived, whole and verified."""
    FAIL = 2
    """The bytes did not arrive."""
    DOOM = 3
    """Given up while bytes are in motion."""
    EVICT = 4
    CONDEMN = 5
    """Invalidated while leased."""
    RELEASE = 6
    """The last user of the slot is gone."""
    ASK = 7
    FOUND = 8
    """The tier says, or a scan shows, that it has the block."""
    MISS = 9
    """The tier does not have it, or could not tell or give it in time."""
    STORE = 10
    DELETE = 11
    EXPIRE = 12
    """A verdict has aged."""


P, S, C, M = PrimaryState, SlotState, CellState, Move

PRIMARY: Final[Mapping[tuple[PrimaryState, Move], PrimaryState]] = {
    (P.ABSENT, M.GRANT): P.FILLING,
    (P.FILLING, M.LAND): P.READY,
    (P.FILLING, M.FAIL): P.ABSENT,
    (P.FILLING, M.DOOM): P.ABSENT,
    (P.READY, M.EVICT): P.ABSENT,
    (P.READY, M.CONDEMN): P.ABSENT,
}

SLOT: Final[Mapping[tuple[SlotState, Move], SlotState]] = {
    (S.FREE, M.GRANT): S.FILLING,
    (S.FILLING, M.LAND): S.HELD,
    (S.FILLING, M.FAIL): S.FREE,
    (S.FILLING, M.DOOM): S.DOOMED,
    (S.DOOMED, M.RELEASE): S.FREE,
    (S.HELD, M.EVICT): S.FREE,
    (S.HELD, M.CONDEMN): S.CONDEMNED,
    (S.CONDEMNED, M.RELEASE): S.FREE,
}

CELL: Final[Mapping[tuple[CellState, Move], CellState]] = {
    (C.UNKNOWN, M.ASK): C.ASKING,
    (C.UNKNOWN, M.FOUND): C.PRESENT,
    (C.UNKNOWN, M.STORE): C.STORING,
    (C.ASKING, M.FOUND): C.PRESENT,
    (C.ASKING, M.MISS): C.ABSENT,
    (C.ASKING, M.STORE): C.STORING,
    # What only a shared tier has, it may drop without a word: such records are not kept for ever.
    (C.PRESENT, M.EXPIRE): C.UNKNOWN,
    (C.PRESENT, M.MISS): C.ABSENT,
    (C.PRESENT, M.DELETE): C.DELETING,
    (C.ABSENT, M.EXPIRE): C.UNKNOWN,
    (C.ABSENT, M.FOUND): C.PRESENT,
    (C.ABSENT, M.STORE): C.STORING,
    # A block whose read, store or delete failed may still occupy the tier: it is removed like any other.
    (C.ABSENT, M.DELETE): C.DELETING,
    (C.UNKNOWN, M.DELETE): C.DELETING,
    (C.STORING, M.LAND): C.PRESENT,
    (C.STORING, M.FAIL): C.ABSENT,
    (C.DELETING, M.MISS): C.ABSENT,
}


HEADING: Final = """\
# States

Made from `tiering/core/transitions.py`; a change that is not drawn here raises `InvariantViolation`. To make it again:
`.venv/bin/python -m tiering.core.transitions > docs/states.md`."""


def diagram() -> str:
    """The three tables as Mermaid state diagrams: the text of ``docs/states.md``."""
    parts = [HEADING]
    for title, table in (("Primary tier, per key", PRIMARY), ("Slot", SLOT), ("Secondary tier, per key", CELL)):
        lines = [f"## {title}", "", "```mermaid", "stateDiagram-v2"]
        lines += [f"    {old.name} --> {new.name}: {move.name.lower()}" for (old, move), new in table.items()]
        parts.append("\n".join([*lines, "```"]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(diagram(), end="")
