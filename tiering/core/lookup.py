"""Looking: one dict probe a key for what is READY, verdicts for the rest. Takes no slot and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiering.core import promotion, room
from tiering.core.commands import Probe
from tiering.core.moves import belongs_to, block_of, cell_of, forget_if_idle, note_remote, set_absent, step_cell
from tiering.core.state import Block, Op, Tier, World
from tiering.core.transitions import CellState, Move, PrimaryState
from tiering.types import BlockKey, Outcome, OutcomeCode, PrefixMatch

ABSENT, FILLING, READY = PrimaryState.ABSENT, PrimaryState.FILLING, PrimaryState.READY

PROBE_KEYS_MAX = 512
"""Keys in one ``Probe``."""


@dataclass(frozen=True, slots=True)
class LookupResult:
    """``match`` counts what is known to be there now. ``undecided``: keys some tier must be asked about.

    ``pending``: the match may still grow, because answers or fills are on their way (or ``undecided`` is not empty).
    """

    match: PrefixMatch
    undecided: tuple[BlockKey, ...] = ()
    pending: bool = False


@dataclass(frozen=True, slots=True)
class EachResult:
    """``where[i]`` is the nearest tier that has ``keys[i]``, None if none is known to.

    ``undecided``: keys some tier must be asked about. ``awaited``: positions whose answer or fill is on its way, or must be
    asked for.
    """

    where: tuple[str | None, ...]
    undecided: tuple[BlockKey, ...] = ()
    awaited: frozenset[int] = frozenset()


def lookup(world: World, pool_index: int, keys: Sequence[BlockKey], now_s: float) -> LookupResult:
    """The leading run that some tier has."""
    get = world.blocks.get
    tokens = world.pools[pool_index].spec.tokens_per_block
    n = 0
    for key in keys:
        block = get(key)
        if block is None or block.state is not READY:
            break
        n += 1
    if n == len(keys):
        return LookupResult(PrefixMatch(n, n * tokens, n, {"primary": n} if n else {}))
    return _lookup_beyond(world, pool_index, keys, n, now_s)


def _lookup_beyond(world: World, pool_index: int, keys: Sequence[BlockKey], ready: int, now_s: float) -> LookupResult:
    """From the first key that is not READY on: who has it, who must be asked."""
    by_tier = {"primary": ready} if ready else {}
    undecided: list[BlockKey] = []
    matched, pending, open_end = ready, False, True
    for key in keys[ready:]:
        name, asks, waits = _whereabouts(world, world.blocks.get(key), now_s)
        if asks:
            undecided.append(key)
        if name is None and not asks and not waits:
            break
        if name is None:
            pending = True
            open_end = False
        elif open_end:
            by_tier[name] = by_tier.get(name, 0) + 1
            matched += 1
    pool = world.pools[pool_index]
    head = tuple(keys[:matched])
    loadable = min(matched, promotion.fitting(world, pool, head))
    match = PrefixMatch(matched, matched * pool.spec.tokens_per_block, loadable, by_tier)
    return LookupResult(match, tuple(undecided), pending)


def each(world: World, pool_index: int, keys: Sequence[BlockKey], now_s: float) -> EachResult:
    """Where each key is, not only those of the leading run: for groups that need the end of a prefix alone."""
    get, index = world.blocks.get, pool_index
    where: list[str | None] = []
    undecided: list[BlockKey] = []
    awaited: set[int] = set()
    for position, key in enumerate(keys):
        block = get(key)
        if block is not None and block.state is READY and block.pool == index:
            where.append("primary")
            continue
        name, asks, waits = _whereabouts(world, block, now_s)
        where.append(name)
        if name is None and (asks or waits):
            awaited.add(position)
        if asks:
            undecided.append(key)
    return EachResult(tuple(where), tuple(undecided), frozenset(awaited))


def _whereabouts(world: World, block: Block | None, now_s: float) -> tuple[str | None, bool, bool]:
    """(nearest tier that has the block, some tier must be asked, an answer or a fill is on its way)."""
    if block is not None and block.state is READY:
        return "primary", False, False
    asks, waits = False, block is not None and block.state is FILLING
    for tier in world.tiers:
        if not tier.readable:
            continue
        cell = block.cells[tier.index] if block is not None else None
        if cell is None:
            asks = asks or not tier.authoritative
        elif cell.state is CellState.PRESENT:
            return tier.spec.name, False, False
        elif cell.state is CellState.ASKING:
            waits = True
        elif cell.state is CellState.UNKNOWN or (cell.state is CellState.ABSENT and cell.until_s <= now_s):
            asks = True
    return None, asks, waits


# -- probes -----------------------------------------------------------------------------------------------------------


def request_probes(world: World, pool_index: int, keys: Sequence[BlockKey]) -> None:
    """Ask every readable tier that does not know, in batches; a key that is being asked about is not asked again."""
    for tier in world.tiers:
        if not tier.readable:
            continue
        asked: list[Block] = []
        for key in keys:
            if tier.asking + len(asked) >= world.spec.probe_keys_max:
                break
            block = world.blocks.get(key)
            cell = block.cells[tier.index] if block is not None else None
            if cell is None:
                if tier.authoritative:
                    continue
            elif block is not None and cell.state is CellState.ABSENT and cell.until_s <= world.now_s:
                step_cell(world, block, cell, Move.EXPIRE)
            elif cell.state is not CellState.UNKNOWN:
                continue
            block = block_of(world, key, pool_index)
            if block.state is ABSENT:
                belongs_to(world, block, pool_index)
            step_cell(world, block, cell_of(block, tier), Move.ASK)
            asked.append(block)
        _emit(world, tier, asked)


def _emit(world: World, tier: Tier, blocks: list[Block]) -> None:
    for start in range(0, len(blocks), PROBE_KEYS_MAX):
        op = Op(world.next_id(), "probe", tier.index, world.epoch, [])
        for block in blocks[start : start + PROBE_KEYS_MAX]:
            op.items.append((block, -1, cell_of(block, tier).generation))
        world.ops[op.op] = op
        tier.asking += len(op.items)
        world.counters.probes += len(op.items)
        world.commands.append(Probe(op.op, tier.spec.name, tuple(block.key for block, _, _ in op.items)))


def finish_probe(world: World, op: Op, outcomes: tuple[Outcome, ...]) -> None:
    world.tiers[op.tier].asking -= len(op.items)
    world.counters.stale_completions += _answer(world, op, outcomes)


def probe_overdue(world: World, op: Op) -> None:
    """No answer in time is a miss for a while; the late answer changes nothing."""
    _answer(world, op, (Outcome.failed("overdue"),) * len(op.items))


def _answer(world: World, op: Op, outcomes: tuple[Outcome, ...]) -> int:
    """Set the verdicts that are still awaited; how many were not."""
    if op.epoch != world.epoch:
        return len(op.items)
    tier = world.tiers[op.tier]
    stale = 0
    for (block, _, generation), outcome in zip(op.items, outcomes, strict=True):
        cell = cell_of(block, tier)
        if cell.generation != generation:
            stale += 1
        elif outcome.ok:
            step_cell(world, block, cell, Move.FOUND)
            room.found(world, tier, block, cell)
            if block.state is ABSENT:
                note_remote(world, block)
        else:
            missing = outcome.code is OutcomeCode.MISSING
            if missing:
                room.gone(tier, block, cell)
            set_absent(world, block, cell, Move.MISS, ages=not (missing and tier.authoritative))
            forget_if_idle(world, block)
    return stale
