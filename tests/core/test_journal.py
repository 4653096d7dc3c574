"""The journal: what was written down can be run again, to the same end."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.worlds import FAILED, OK, Bench, chain, exclusive, shared, spec_of
from tiering.core import events as ev
from tiering.core.commands import Demote
from tiering.core.journal import KEYS_MAX, Journal, Recording, load, replay, summary
from tiering.core.machine import TieringCore
from tiering.errors import InvariantViolation, TieringError
from tiering.types import Outcome, OutcomeCode, ScanEntry, TierState

keys = st.binary(min_size=1, max_size=36)
runs = st.lists(keys, max_size=4).map(tuple)
times = st.floats(0, 1e9)
numbers = st.integers(0, 1 << 40)
outcomes = st.lists(
    st.builds(Outcome, st.sampled_from(OutcomeCode), st.text(max_size=5), st.booleans()) | st.just(Outcome.OK),
    max_size=4,
).map(tuple)
entries = st.lists(
    st.builds(ScanEntry, st.binary(min_size=1, max_size=60), numbers, st.none() | keys, st.booleans()), max_size=3
).map(tuple)
anything = st.one_of(
    st.builds(ev.StoreRequested, times, numbers, runs, st.none() | keys, st.booleans()),
    st.builds(ev.StoreFinished, times, numbers, outcomes),
    *(
        st.builds(kind, times, numbers, runs)
        for kind in (ev.ProbeRequested, ev.LoadRequested, ev.LeaseRequested, ev.Touched, ev.HoldExtended)
    ),
    st.builds(ev.HoldRequested, times, numbers, runs, st.booleans()),
    st.builds(ev.HoldTrimmed, times, numbers, numbers),
    st.builds(ev.RestoreStep, times, st.none() | st.lists(numbers, max_size=3).map(tuple), numbers, st.booleans()),
    *(
        st.builds(kind, times, numbers)
        for kind in (ev.LoadOverdue, ev.Released, ev.OpOverdue, ev.FlushOverdue, ev.HoldReleased)
    ),
    st.builds(ev.OpFinished, times, numbers, outcomes),
    st.builds(ev.TierScanned, times, st.text(max_size=5), entries),
    st.builds(ev.TierChanged, times, st.text(max_size=5), st.sampled_from(TierState)),
    st.builds(ev.RestoreRequested, times, numbers, numbers),
    *(st.builds(kind, times) for kind in (ev.FlushRequested, ev.Reset)),
)


@given(st.lists(anything, max_size=20))
def test_what_is_written_down_is_read_back(events: list[ev.Event]) -> None:
    journal = Journal(100)
    for event in events:
        journal(event)
    recording = load(journal.dump())
    assert recording == Recording(tuple(events), 0, None)


def test_every_kind_of_event_is_written_down() -> None:
    assert set(ev.Event.__args__) == {
        ev.StoreRequested, ev.StoreFinished, ev.ProbeRequested, ev.LoadRequested, ev.LoadOverdue, ev.Released, ev.Touched,
        ev.OpFinished, ev.OpOverdue, ev.TierScanned, ev.TierChanged, ev.FlushRequested, ev.FlushOverdue, ev.Reset,
        ev.HoldRequested, ev.HoldReleased, ev.RestoreRequested, ev.LeaseRequested, ev.HoldExtended, ev.HoldTrimmed,
        ev.RestoreStep,
    }  # fmt: skip


SPEC = spec_of(2, exclusive(room=2, batch=2), shared(batch=1), window=2)
KEYS = chain(4)


@st.composite
def histories(draw: st.DrawFn) -> list[ev.Event]:
    """Events that a core may see, drawn beside a core that tells what is in flight."""
    core = TieringCore(SPEC)
    events: list[ev.Event] = [ev.TierChanged(0.0, tier.name, TierState.UP) for tier in SPEC.tiers]
    for event in events:
        core.handle(event)
    now_s = 0.0
    for _ in range(draw(st.integers(0, 30))):
        now_s += draw(st.sampled_from((0.0, 0.0, 1.0, 10.0)))
        at = draw(st.integers(0, 3))
        run = KEYS[at : draw(st.integers(at, 4))]
        choices: list[ev.Event] = [
            ev.StoreRequested(now_s, 0, run, None, draw(st.booleans())),
            ev.LoadRequested(now_s, 0, run),
            ev.ProbeRequested(now_s, 0, run),
            ev.FlushRequested(now_s),
            ev.HoldRequested(now_s, 0, run),
            ev.Reset(now_s),
            *(ev.StoreFinished(now_s, job.job, (OK,) * len(job.slots)) for job in core.world.stores.values()),
            *(
                ev.OpFinished(now_s, op.op, (draw(st.sampled_from((OK, FAILED))),) * len(op.items))
                for op in core.world.ops.values()
            ),
            *(ev.OpOverdue(now_s, op) for op in core.world.ops),
            *(ev.Released(now_s, job) for job in core.world.loads),
            *(ev.RestoreRequested(now_s, hold, 1 << 20) for hold in core.world.holds),
        ]
        events.append(draw(st.sampled_from(choices)))
        core.handle(events[-1])
    return events


@given(histories())
def test_a_replay_ends_where_the_original_did(events: list[ev.Event]) -> None:
    journal = Journal(1000, SPEC)
    core = TieringCore(SPEC, observer=journal)
    commands = [core.handle(event)[1] for event in events]
    recording = load(journal.dump())
    again = TieringCore(SPEC)
    assert [again.handle(event)[1] for event in recording.events] == commands
    other = replay(SPEC, recording)
    for end in (again, other):
        assert asdict(end.counters) == asdict(core.counters)
        assert end.world.last_id == core.world.last_id
        assert {k: (b.state, b.slot, b.copies) for k, b in end.world.blocks.items()} == {
            k: (b.state, b.slot, b.copies) for k, b in core.world.blocks.items()
        }
        assert [tier.used_bytes for tier in end.world.tiers] == [tier.used_bytes for tier in core.world.tiers]


def test_a_journal_without_its_beginning_is_not_replayed() -> None:
    journal = Journal(3)
    for n in range(5):
        journal(ev.Released(0.0, n))
    recording = load(journal.dump())
    assert recording.dropped == 2
    assert [event.job for event in recording.events if isinstance(event, ev.Released)] == [2, 3, 4]
    with pytest.raises(TieringError, match="first 2 events were dropped"):
        replay(SPEC, recording)


def test_a_journal_is_bounded_by_keys_too() -> None:
    journal = Journal(1000)
    for n in range(10):
        journal(ev.ProbeRequested(0.0, 0, (b"%d" % n,) * (KEYS_MAX // 4)))
    assert load(journal.dump()).dropped == 6
    journal(ev.ProbeRequested(0.0, 0, (b"k",) * (2 * KEYS_MAX)))
    assert len(load(journal.dump()).events) == 1, "the newest stays, whatever its size"


def test_a_journal_of_another_spec_is_not_replayed() -> None:
    journal = Journal(10, SPEC)
    with pytest.raises(TieringError, match="another spec"):
        replay(spec_of(3), load(journal.dump()))


def test_the_header_tells_the_spec() -> None:
    header = json.loads(Journal(10, SPEC).dump().splitlines()[0])
    assert header == {"format": 1, "dropped": 0, "spec": summary(SPEC)}
    assert header["spec"]["pools"][0]["policy"] == "PrefixPolicy"
    assert [tier["name"] for tier in header["spec"]["tiers"]] == ["nvme", "redis"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: not the header"),
        ("{}\n", "line 1: not the header"),
        ("[]\n", "line 1: not the header"),
        ('{"format": 99, "dropped": 0, "spec": null}\n', "format 99 is not 1"),
        ('{"format": 1, "dropped": 0, "spec": null}\n{"event": "Nonsense"}\n', "line 2: not an event"),
        ('{"format": 1, "dropped": 0, "spec": null}\n{"event": "Reset"}\n', "line 2: not an event"),
        ('{"format": 1, "dropped": 0, "spec": null}\n[1]\n', "line 2: not an event"),
        ('{"format": 1, "dropped": 0, "spec": null}\nnot json\n', "line 2: not an event"),
    ],
)
def test_what_is_no_journal_is_said_to_be_none(text: str, message: str) -> None:
    with pytest.raises(TieringError, match=message):
        load(text)


# -- the violation's history ------------------------------------------------------------------------------------------


def test_a_violation_tells_the_blocks_history() -> None:
    """The state is broken by hand here: no event can do it."""
    bench = Bench(spec_of(2, shared()))
    bench.put(chain(1))
    demote = bench.one(Demote)
    cell = bench.core.world.blocks[b"00"].cells[0]
    assert cell is not None
    cell.state = type(cell.state).PRESENT
    with pytest.raises(InvariantViolation, match="LAND while PRESENT in a tier") as caught:
        bench.core.handle(ev.OpFinished(0.0, demote.op, (OK,)))
    assert len(caught.value.history) == 1
    assert "StoreRequested" in caught.value.history[0]


def test_a_violation_without_a_block_tells_the_last_events() -> None:
    bench = Bench(spec_of(2))
    bench.put(chain(1))
    plan = bench.load(chain(1))
    bench.core.world.pools[0].loads[0] = 0
    with pytest.raises(InvariantViolation, match="released more often than taken") as caught:
        bench.core.handle(ev.Released(0.0, plan.job))
    assert "Released" in caught.value.history[-1]
