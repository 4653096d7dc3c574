"""A naive model beside the core: plain dicts that know what bytes are really where. Driven by Hypothesis.

The model plays the callers, the driver and the tiers. It believes nothing that the core says: it writes slots when a
copy lands, reads them when a tier stores, and looks at them when a load is told that they are its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from tests.core.explore import drain
from tests.core.model_holds import PATHS, HoldRules, Load, runs
from tests.core.worlds import (
    BLOCK_BYTES,
    CANCELLED,
    CORRUPT,
    FAILED,
    MISSING,
    OK,
    REFUSED,
    STORED_BYTES,
    exclusive,
    shared,
)
from tiering.core import events as ev
from tiering.core.commands import (
    Cancel,
    Command,
    Delete,
    Demote,
    FlushDone,
    IoCommand,
    JobDone,
    Probe,
    Promote,
    RestoreDue,
    SlotsFreed,
    Touch,
)
from tiering.core.invariants import check
from tiering.core.machine import TieringCore
from tiering.core.state import PRIMARY, CoreSpec, PoolSpec
from tiering.policies import ARCPolicy, LRUPolicy, PrefixPolicy
from tiering.types import Outcome, ScanEntry, TierState

STEPS = 0
"""Steps taken by all machines of this process, for ``verify``."""

SLOTS = (4, 2)
NEAR, FAR = "near", "far"
ROOM = 4

Bytes = tuple[int, bytes]
"""What stands for a block's content: the epoch and the key."""


@dataclass
class Device:
    """What a tier really holds."""

    holds: dict[Bytes, str] = field(default_factory=dict)
    """"good" or "bad", by content."""
    foreign: set[bytes] = field(default_factory=set)
    arriving: list[Bytes] = field(default_factory=list)
    """Stores under way."""

    def occupied_bytes(self) -> int:
        return STORED_BYTES * (len(self.foreign) + len({*self.holds, *self.arriving}))


class CoreMachine(HoldRules):
    """See the module."""

    @initialize(
        policy=st.sampled_from((PrefixPolicy, LRUPolicy, ARCPolicy)),
        near_rule=st.sampled_from(("on_store", "on_evict", "never", 1)),
        far_rule=st.sampled_from(("on_store", "never", 2)),
        batch=st.integers(1, 3),
        window=st.integers(1, 4),
        found=st.integers(0, ROOM + 2),
        strangers=st.integers(0, 2),
    )
    def begin(
        self, policy: Any, near_rule: Any, far_rule: Any, batch: int, window: int, found: int, strangers: int
    ) -> None:
        pools = tuple(PoolSpec(n, BLOCK_BYTES, 16, reserve, policy) for n, reserve in zip(SLOTS, (1, 0), strict=True))
        near = exclusive(NEAR, room=ROOM, rule=near_rule, queue=3, batch=batch, policy=policy)
        far = shared(FAR, rule=far_rule, queue=2, batch=batch)
        self.core = TieringCore(CoreSpec(pools, (near, far), window * BLOCK_BYTES, verdicts_max=6, events=True))
        self.followed: set[tuple[int, bytes]] = set()
        """(tier, key) that a follower of the changes believes in."""
        self.now_s = 0.0
        self.epoch = 0
        self.slots: dict[tuple[int, int], Bytes | None] = {(p, s): None for p, n in enumerate(SLOTS) for s in range(n)}
        self.devices = {NEAR: Device(), FAR: Device()}
        self.io: dict[int, IoCommand] = {}
        self.io_epoch: dict[int, int] = {}
        self.cancelled: set[int] = set()
        self.late: set[int] = set()
        self.copies: dict[int, tuple[int, tuple[ev.Grant, ...], int]] = {}
        self.loads: dict[int, Load] = {}
        self.holds: dict[int, tuple[int, tuple[bytes, ...]]] = {}
        self.stepped: dict[int, tuple[int, tuple[bytes, ...], int]] = {}
        """(pool, keys held so far, how many of the first are held no more)."""
        self.flushes: set[int] = set()
        self.queries = self.hits = 0
        self.reset_while_full = False
        device = self.devices[NEAR]
        device.foreign = {b"foreign-%040d" % n for n in range(strangers)}
        path = PATHS[0][0][:found]
        device.holds = {(0, key): "good" for key in path}
        entries = [ScanEntry(handle, STORED_BYTES, foreign=True) for handle in sorted(device.foreign)]
        entries += [ScanEntry(key, STORED_BYTES, parent) for key, parent in zip(path, (None, *path), strict=False)]
        self.give(ev.TierScanned(0.0, NEAR, tuple(entries)))
        self.budget = max(ROOM * STORED_BYTES, device.occupied_bytes())
        for name in (NEAR, FAR):
            self.give(ev.TierChanged(0.0, name, TierState.UP))

    # -- the core's end of the bench

    def give(self, event: ev.Event) -> Any:
        global STEPS
        STEPS += 1
        reply, commands = self.core.handle(event)
        for command in commands:
            self.take(command)
        if isinstance(event, ev.Reset):
            self.followed.clear()
        for change in self.core.take_changes():
            (self.followed.add if change.stored else self.followed.discard)((change.tier, change.key))
        check(self.core.world)
        return reply

    def take(self, command: Command) -> None:
        match command:
            case Demote():
                for item in command.items:
                    self.lent_holds(item)
                    self.devices[command.tier].arriving.append((self.epoch, item.key))
            case Promote():
                for item in command.items:
                    assert not self.users((item.pool, item.slot)), "a slot is filled while somebody uses it"
            case Cancel():
                self.cancelled.add(command.op)
            case JobDone():
                self.ended(command)
            case FlushDone():
                self.flushes.discard(command.job)
            case RestoreDue() | SlotsFreed() | Touch() | Probe() | Delete():
                pass
        if isinstance(command, Probe | Promote | Demote | Delete):
            self.io[command.op] = command
            self.io_epoch[command.op] = self.epoch

    def users(self, where: tuple[int, int]) -> list[str]:
        """Who touches the slot: by the model's own books."""
        users = [f"load {n}" for n, load in self.loads.items() if where in {(load.pool, s) for s in load.slots}]
        users += [
            f"copy {n}" for n, (pool, grants, _) in self.copies.items() if where in {(pool, g.slot) for g in grants}
        ]
        for op, command in self.io.items():
            if isinstance(command, Promote | Demote) and where in {(i.pool, i.slot) for i in command.items}:
                users.append(f"{type(command).__name__} {op}")
        return users

    def lent_holds(self, item: Any) -> None:
        found = self.slots[item.pool, item.slot]
        assert found == (self.epoch, item.key), f"{item.key!r} is to be stored from a slot that holds {found}"

    def ended(self, command: JobDone) -> None:
        load = self.loads.get(command.job)
        assert load is not None
        assert not load.done, "a load is told its end twice"
        self.settle(load, self.core.job_slots(command.job))
        assert command.blocks == len(load.slots)

    def settle(self, load: Load, slots: tuple[int, ...]) -> None:
        load.done, load.slots = True, slots
        self.hits += len(slots)
        self.leased_holds(load)

    def leased_holds(self, load: Load) -> None:
        for key, slot in zip(load.keys, load.slots, strict=False):
            found = self.slots[load.pool, slot]
            assert found == (load.epoch, key), f"a lease of {key!r} is of a slot that holds {found}"

    # -- callers

    mostly = st.sampled_from((True, True, True, True, False))

    @rule(run=runs, patient=st.booleans(), tell_parent=st.booleans(), copied=mostly)
    def store(self, run: Any, patient: bool, tell_parent: bool, copied: bool) -> None:
        pool, path, first, length = run
        keys = path[first : first + length]
        parent = path[first - 1] if first and tell_parent else None
        free = {(pool, slot) for slot in range(SLOTS[pool]) if not self.users((pool, slot))}
        plan = self.give(ev.StoreRequested(self.now_s, pool, keys, parent, patient))
        assert {(pool, grant.slot) for grant in plan.grants} <= free, "a slot in use was granted"
        assert [keys[grant.index] for grant in plan.grants] == [grant.key for grant in plan.grants]
        assert {grant.index for grant in plan.grants} | set(plan.present) >= set(range(plan.stop))
        self.begin_copy(pool, plan)
        if plan.job and copied:
            self.end_copy(plan.job, [True] * max(SLOTS))

    def begin_copy(self, pool: int, plan: ev.StorePlan) -> None:
        assert bool(plan.job) == bool(plan.grants)
        for grant in plan.grants:
            self.slots[pool, grant.slot] = None
        if plan.job:
            self.copies[plan.job] = (pool, plan.grants, self.epoch)

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), good=st.lists(mostly, min_size=5, max_size=5))
    def copied(self, data: st.DataObject, good: list[bool]) -> None:
        self.end_copy(data.draw(st.sampled_from(sorted(self.copies))), good)

    def end_copy(self, job: int, good: list[bool]) -> None:
        pool, grants, epoch = self.copies.pop(job)
        outcomes = tuple(OK if fine else FAILED for fine in good[: len(grants)])
        for grant, outcome in zip(grants, outcomes, strict=True):
            if outcome.ok:
                self.slots[pool, grant.slot] = (epoch, grant.key)
        self.give(ev.StoreFinished(self.now_s, job, outcomes))

    @rule(run=runs)
    def load(self, run: Any) -> None:
        pool, path, first, length = run
        keys = path[first : first + length]
        job = self.core.world.last_id + 1
        self.loads[job] = load = Load(pool, keys, self.epoch)
        self.queries += len(keys)
        plan = self.give(ev.LoadRequested(self.now_s, pool, keys))
        assert plan.job == job
        if plan.done:
            self.settle(load, plan.slots)
        else:
            load.slots = plan.slots
            self.leased_holds(load)

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), overdue=st.booleans())
    def end_load(self, data: st.DataObject, overdue: bool) -> None:
        job = data.draw(st.sampled_from(sorted(self.loads)))
        if overdue:
            self.give(ev.LoadOverdue(self.now_s, job))
            assert self.loads[job].done
        else:
            self.give(ev.Released(self.now_s, job))
            del self.loads[job]

    @rule(run=runs)
    def look(self, run: Any) -> None:
        pool, path, first, length = run
        keys = path[first : first + length]
        result = self.core.lookup(pool, keys, self.now_s)
        assert 0 <= result.match.loadable_blocks <= result.match.blocks <= len(keys)
        assert sum(result.match.by_tier.values()) == result.match.blocks
        if result.undecided:
            self.give(ev.ProbeRequested(self.now_s, pool, result.undecided))

    @rule(run=runs)
    def touch(self, run: Any) -> None:
        pool, path, first, length = run
        self.give(ev.Touched(self.now_s, pool, path[first : first + length]))

    @precondition(lambda self: not self.flushes)
    @rule()
    def flush(self) -> None:
        job = self.core.world.last_id + 1
        self.flushes.add(job)
        assert self.give(ev.FlushRequested(self.now_s)) == job

    # -- tiers

    @precondition(lambda self: self.io)
    @rule(data=st.data(), mood=st.sampled_from(("works", "works", "works", "fails", "refuses")), half=st.booleans())
    def answer(self, data: st.DataObject, mood: str, half: bool) -> None:
        self.finish(data.draw(st.sampled_from(sorted(self.io))), mood, half)

    @rule(rounds=st.integers(1, 3))
    def all_goes_well(self, rounds: int) -> None:
        """Whatever is under way comes to a good end, and what follows from it."""
        for _ in range(rounds):
            for job in list(self.copies):
                self.end_copy(job, [True] * max(SLOTS))
            for op in list(self.io):
                self.finish(op, "works", half=False)

    def finish(self, op: int, mood: str, half: bool) -> None:
        command = self.io.pop(op)
        device = self.devices[command.tier]
        epoch = self.io_epoch[op]
        if op in self.cancelled and half and isinstance(command, Promote):
            outcomes = (CANCELLED,) * len(command.items)
        elif isinstance(command, Promote):
            outcomes = tuple(self.read(device, epoch, item, mood) for item in command.items)
        elif isinstance(command, Demote):
            outcomes = tuple(self.write(device, epoch, item, mood, half) for item in command.items)
        elif isinstance(command, Probe):
            outcomes = tuple(FAILED if mood == "fails" else self.knows(device, (epoch, key)) for key in command.keys)
        else:
            outcomes = tuple(self.remove(device, epoch, key, mood) for key in command.keys)
        self.give(ev.OpFinished(self.now_s, op, outcomes))

    def knows(self, device: Device, content: Bytes) -> Outcome:
        return OK if content in device.holds else MISSING

    def read(self, device: Device, epoch: int, item: Any, mood: str) -> Outcome:
        content = (epoch, item.key)
        if mood == "fails":
            return FAILED
        if content not in device.holds:
            return MISSING
        if device.holds[content] == "bad":
            return CORRUPT
        where = (item.pool, item.slot)
        assert not self.users(where), f"bytes land in a slot that is used by {self.users(where)}"
        self.slots[where] = content
        return OK

    def write(self, device: Device, epoch: int, item: Any, mood: str, half: bool) -> Outcome:
        content = (epoch, item.key)
        found = self.slots[item.pool, item.slot]
        assert found == content, f"a tier stores {found} as {content}"
        device.arriving.remove(content)
        if mood == "refuses":
            return REFUSED
        if mood == "works" or half:  # a failed store may have stored
            device.holds[content] = "good"
        return OK if mood == "works" else FAILED

    def remove(self, device: Device, epoch: int, key: bytes, mood: str) -> Outcome:
        if mood == "fails":
            return FAILED
        if len(key) > 36:
            found = key in device.foreign
            device.foreign.discard(key)
        else:
            found = device.holds.pop((epoch, key), None) is not None
        return OK if found else MISSING

    @precondition(lambda self: self.io.keys() - self.late)
    @rule(data=st.data())
    def overdue(self, data: st.DataObject) -> None:
        op = data.draw(st.sampled_from(sorted(self.io.keys() - self.late)))
        self.late.add(op)
        self.give(ev.OpOverdue(self.now_s, op))

    @rule(
        name=st.sampled_from((NEAR, FAR)),
        state=st.sampled_from((TierState.UP, TierState.UP, TierState.DEGRADED, TierState.DOWN)),
    )
    def change_tier(self, name: str, state: TierState) -> None:
        self.give(ev.TierChanged(self.now_s, name, state))

    @precondition(lambda self: self.devices[FAR].holds)
    @rule(data=st.data(), rot=st.booleans())
    def others_meddle(self, data: st.DataObject, rot: bool) -> None:
        """Somebody else removes a block of the shared tier, or bits rot."""
        holds = self.devices[FAR].holds
        content = data.draw(st.sampled_from(sorted(holds)))
        if rot:
            holds[content] = "bad"
        else:
            del holds[content]

    @precondition(lambda self: self.devices[NEAR].holds)
    @rule(data=st.data())
    def bits_rot(self, data: st.DataObject) -> None:
        holds = self.devices[NEAR].holds
        holds[data.draw(st.sampled_from(sorted(holds)))] = "bad"

    @rule(key=st.sampled_from([key for paths in PATHS.values() for path in paths for key in path]))
    def others_store(self, key: bytes) -> None:
        """Another process computed the same block."""
        self.devices[FAR].holds[self.epoch, key] = "good"

    # -- time and epochs

    @rule(seconds=st.sampled_from((0.01, 0.2, 6.0)))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.epoch < 2)
    @rule(really=st.sampled_from((False, False, True)))
    def reset(self, really: bool) -> None:
        """New weights. The tiers open again under the new namespace: the old blocks are foreign now."""
        if not really:  # seldom, or little else would happen
            return
        self.give(ev.Reset(self.now_s))
        self.epoch += 1
        assert all(load.done for load in self.loads.values())
        device = self.devices[NEAR]
        for content in (*device.holds, *device.arriving):
            device.foreign.add(b"old-%d-%s" % (content[0], content[1].rjust(40)))
        device.holds.clear()
        entries = tuple(ScanEntry(handle, STORED_BYTES, foreign=True) for handle in sorted(device.foreign))
        self.give(ev.TierScanned(self.now_s, NEAR, entries))
        self.budget = max(self.budget, device.occupied_bytes())
        for name in (NEAR, FAR):
            self.give(ev.TierChanged(self.now_s, name, TierState.UP))

    # -- what must hold

    @invariant()
    def leases_hold_what_they_say(self) -> None:
        for load in getattr(self, "loads", {}).values():
            self.leased_holds(load)

    @invariant()
    def the_device_is_not_overfull(self) -> None:
        if hasattr(self, "budget") and self.epoch == 0:
            device = self.devices[NEAR]
            assert device.occupied_bytes() <= self.budget
            assert device.occupied_bytes() <= self.core.world.tiers[0].used_bytes, "bytes that nobody accounts for"
            self.budget = max(ROOM * STORED_BYTES, min(self.budget, device.occupied_bytes()))

    @invariant()
    def ready_slots_hold_their_blocks(self) -> None:
        for pool in self.core.world.pools if hasattr(self, "core") else ():
            for slot, block in enumerate(pool.owner):
                if block is not None and block.state.name == "READY":
                    assert self.slots[pool.index, slot] == (self.epoch, block.key)

    @invariant()
    def a_follower_knows_what_is_where(self) -> None:
        blocks = self.core.world.blocks.values() if hasattr(self, "core") else ()
        ready = {(PRIMARY, block.key) for block in blocks if block.state.name == "READY"}
        present = {
            (tier, block.key)
            for block in blocks
            for tier, cell in enumerate(block.cells)
            if cell is not None and cell.state.name == "PRESENT"
        }
        if hasattr(self, "core"):
            # Beyond what is known it may believe in blocks whose verdict was forgotten, not refuted.
            assert {pair for pair in self.followed if pair[0] == PRIMARY} == ready
            assert present <= self.followed

    @invariant()
    def counters_agree(self) -> None:
        if hasattr(self, "core"):
            counters = self.core.counters
            assert counters.query_blocks == self.queries
            assert counters.hit_blocks == self.hits

    def teardown(self) -> None:
        """Then all goes well, and everything comes to rest."""
        if hasattr(self, "core"):
            drain(self.core)
            assert not self.core.world.waiting
