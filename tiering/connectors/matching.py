"""How much of a prompt the tiers can give: one prefix that every group can serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiering.connectors.geometry import Geometry, GroupGeometry
from tiering.runtime.gate import KEYS_PER_HOLD_MAX
from tiering.sync import SyncFace
from tiering.types import BlockKey


@dataclass(frozen=True, slots=True)
class Match:
    """``tokens`` of the prefix (those computed already among them) can be had now; ``possible_tokens`` if all answers
    and fills that are on their way turn out well."""

    tokens: int
    possible_tokens: int

    @property
    def pending(self) -> bool:
        return self.possible_tokens > self.tokens


def match_prefix(
    sync: SyncFace,
    geometry: Geometry,
    keys: Sequence[Sequence[BlockKey]],
    computed_tokens: int,
    tokens_max: int,
    load_tiers: frozenset[str] | None,
) -> Match:
    """The longest prefix of at most ``tokens_max`` tokens that every group can serve. Looks only.

    ``keys``: by group, from the prompt's beginning. ``computed_tokens`` of it are on the GPU. ``load_tiers``: a block whose
    nearest tier is another one is a miss.
    """
    step = geometry.step_tokens
    tokens = possible = tokens_max // step * step
    for group in geometry.groups:
        if not group.windowed:
            now, later = _run(sync, group, keys[group.group], computed_tokens, possible, load_tiers)
            tokens, possible = min(tokens, now // step * step), min(possible, later // step * step)
    windows = [
        _Window(sync, group, keys[group.group], possible, load_tiers) for group in geometry.groups if group.windowed
    ]
    tokens = _fixpoint(windows, computed_tokens, tokens, step, maybe=False)
    possible = _fixpoint(windows, computed_tokens, possible, step, maybe=True)
    return Match(max(tokens, computed_tokens), max(possible, computed_tokens))


def _run(
    sync: SyncFace,
    group: GroupGeometry,
    keys: Sequence[BlockKey],
    computed_tokens: int,
    tokens_max: int,
    load_tiers: frozenset[str] | None,
) -> tuple[int, int]:
    """Tokens that a group of full attention has now, and has if all goes well."""
    size = group.tokens_per_block
    wanted = group.to_load(computed_tokens, tokens_max)
    part = keys[wanted.start : wanted.stop]
    if load_tiers is not None:
        part = part[: _allowed_run(sync, group, part, load_tiers)]
    if not part:
        return wanted.start * size, wanted.start * size
    result = sync.look(part, group=group.group)
    now = wanted.start + result.match.loadable_blocks
    later = wanted.start + len(part) if result.pending else now
    return now * size, later * size


def _allowed_run(sync: SyncFace, group: GroupGeometry, keys: Sequence[BlockKey], tiers: frozenset[str]) -> int:
    """How many leading blocks no forbidden tier would serve. What is on its way counts: its tier is not known yet."""
    run = 0
    for start in range(0, len(keys), KEYS_PER_HOLD_MAX):
        part = keys[start : start + KEYS_PER_HOLD_MAX]
        for where in sync.lookup_each(part, group=group.group).where:
            if where is not None and where not in tiers:
                return run
            run += 1
    return run


class _Window:
    """Where a group that needs the end of a prefix alone has unbroken runs, now and perhaps."""

    def __init__(
        self,
        sync: SyncFace,
        group: GroupGeometry,
        keys: Sequence[BlockKey],
        tokens_max: int,
        load_tiers: frozenset[str] | None,
    ) -> None:
        end = min(len(keys), tokens_max // group.tokens_per_block)
        self._group = group
        self._room = sync.slots_for_loads(group=group.group)
        # A hit that lies further back than one look reaches is given up: the request then computes what it could have had.
        self._first = max(0, end - KEYS_PER_HOLD_MAX)
        looked = sync.lookup_each(keys[self._first : end], group=group.group)
        self._now, self._maybe = [0], [0]
        """Length of the run that ends before each block from ``_first`` on."""
        for position, where in enumerate(looked.where):
            has = where is not None and (load_tiers is None or where in load_tiers)
            self._now.append(self._now[-1] + 1 if has else 0)
            self._maybe.append(self._maybe[-1] + 1 if has or position in looked.awaited else 0)

    def serves(self, computed_tokens: int, tokens: int, *, maybe: bool) -> bool:
        """All blocks that a prefix of ``tokens`` needs beyond the GPU's are there."""
        needed = self._group.to_load(computed_tokens, tokens)
        at = needed.stop - self._first
        if at <= 0 or len(needed) > self._room:
            return not needed
        runs = self._maybe if maybe else self._now
        return at < len(runs) and runs[at] >= len(needed)


def _fixpoint(windows: Sequence[_Window], computed_tokens: int, tokens: int, step: int, *, maybe: bool) -> int:
    """The longest prefix up to ``tokens`` that all windows serve. (A shorter prefix is served by full groups as well.)"""
    while tokens > computed_tokens:
        if all(window.serves(computed_tokens, tokens, maybe=maybe) for window in windows):
            return tokens
        tokens -= step
    return computed_tokens
