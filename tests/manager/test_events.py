"""KV events: a follower that starts with nothing knows after any traffic which tier has which block."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from tests.manager.world import BLOCK_BYTES, LAYOUT, config, eventually, keys_of, opened, rows
from tiering import TieringOffloadingManager
from tiering.errors import ConfigError
from tiering.types import KvEventBatch

MEMORY = {"type": "memory", "name": "far", "capacity": 64 * (BLOCK_BYTES + 128)}


class Follower:
    """What a router believes: for each tier the keys that it has. Written from the description of the events alone."""

    def __init__(self) -> None:
        self.tiers: dict[str, set[bytes]] = {}
        self.parents: dict[bytes, bytes] = {}
        self.next = 0
        self.missed = False

    def take(self, batch: KvEventBatch) -> None:
        self.missed |= batch.sequence != self.next
        self.next = batch.sequence + 1
        for event in batch.events:
            if event.kind == "cleared":
                self.tiers.clear()
            elif event.kind == "stored":
                self.tiers.setdefault(event.tier, set()).update(event.keys)
                before = event.parent
                for key in event.keys:
                    if before is not None:
                        self.parents[key] = before
                    before = key
            else:
                assert event.kind == "removed"
                self.tiers[event.tier].difference_update(event.keys)


async def _following(manager: TieringOffloadingManager, follower: Follower) -> None:
    async for batch in manager.events(since=0):
        follower.take(batch)


async def test_a_follower_knows_what_each_tier_has() -> None:
    follower = Follower()
    chain, others = keys_of(4), keys_of(3, b"other")
    async with opened(4, MEMORY, events={"enabled": True}) as manager:
        task = asyncio.create_task(_following(manager, follower))
        await manager.store(chain, rows(chain))
        await manager.flush()
        await manager.store(others, rows(others))  # three of the four must go
        await manager.flush()
        last = manager.parts.events.next_sequence if manager.parts.events else 0

        async def caught_up() -> bool:
            return follower.next == last

        await eventually(caught_up)
        assert follower.tiers["far"] == {*chain, *others}
        assert len(follower.tiers["primary"]) == 4
        assert follower.tiers["primary"] >= set(others)
        assert [follower.parents.get(key) for key in chain] == [None, *chain[:-1]]
        await manager.reset("weights-2")
        last += 1
        await eventually(caught_up)
        assert not follower.tiers
        assert not follower.missed
    await task  # the close ended it


async def test_who_is_too_slow_sees_the_sequence_jump() -> None:
    follower = Follower()
    async with opened(64, events={"enabled": True, "batches_max": 2}) as manager:
        for salt in (b"1", b"2", b"3", b"4"):
            keys = keys_of(1, salt)
            await manager.store(keys, rows(keys))
        async for batch in manager.events(since=0):
            follower.take(batch)
            if batch.sequence == 3:
                break
    assert follower.missed
    assert follower.tiers["primary"] == {keys_of(1, b"3")[0], keys_of(1, b"4")[0]}


async def test_without_a_word_about_events_nothing_is_recorded() -> None:
    async with opened(4) as manager:
        with pytest.raises(ConfigError, match=r"events: \{enabled: true\}"):
            await anext(aiter(manager.events()))


# -- over ZeroMQ: the message as vLLM's subscribers read it --------------------------------------------------------------


class _Stored(msgspec.Struct, tag="BlockStored", tag_field="type"):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", tag_field="type"):
    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    data_parallel_rank: int | None = None


def _decoded(parts: Sequence[bytes]) -> tuple[int, _Batch]:
    assert parts[0] == b"kv"
    return int.from_bytes(parts[1], "big"), msgspec.msgpack.decode(parts[2], type=_Batch)


def _events(**more: Any) -> dict[str, Any]:
    return {"zmq_endpoint": "tcp://127.0.0.1:*", "topic": "kv", **more}


async def test_a_subscriber_reads_vllm_events() -> None:
    keys = keys_of(3)
    context = zmq.asyncio.Context()
    try:
        async with opened(2, events=_events(zmq_replay_endpoint="tcp://127.0.0.1:*")) as manager:
            assert manager.events_endpoint is not None
            assert manager.events_replay_endpoint is not None
            await manager.store(keys[:2], rows(keys[:2]))
            await manager.reset("weights-2")
            # Who comes late asks for what it missed.
            asking = context.socket(zmq.REQ)
            asking.connect(manager.events_replay_endpoint)
            await asking.send((0).to_bytes(8, "big"))
            number, payload = await asking.recv_multipart()
            batch = msgspec.msgpack.decode(payload, type=_Batch)
            stored = batch.events[0]
            assert int.from_bytes(number, "big") == 0
            assert isinstance(stored, _Stored)
            assert stored.block_hashes == [key[:32] for key in keys[:2]]
            assert (stored.parent_block_hash, stored.block_size) == (None, LAYOUT.groups[0].tokens_per_block)
            assert (stored.medium, stored.locality, stored.group_idx) == ("CPU", "LOCAL", 0)
            asking.close(0)

            listening = context.socket(zmq.SUB)
            listening.connect(manager.events_endpoint)
            listening.subscribe(b"kv")
            heard: dict[int, _Batch] = {}
            while (
                not heard
            ):  # a subscription takes effect when it has reached the publisher: something always comes after
                salted = keys_of(1, str(len(heard)).encode())
                await manager.store(salted, rows(salted))
                await manager.reset("again")
                while await listening.poll(50):
                    sequence, batch = _decoded(await listening.recv_multipart())
                    heard[sequence] = batch
            assert sorted(heard) == list(range(min(heard), max(heard) + 1))
            assert any(isinstance(event, _Cleared) for batch in heard.values() for event in batch.events)
            listening.close(0)
    finally:
        context.destroy(linger=0)


async def test_an_address_in_use_is_an_error_that_names_the_key() -> None:
    context = zmq.Context()
    taken = context.socket(zmq.PUB)
    try:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(ConfigError, match=rf"events\.zmq_replay_endpoint: cannot use tcp://127\.0\.0\.1:{port}"):
            async with opened(2, events=_events(zmq_replay_endpoint=f"tcp://127.0.0.1:{port}")):
                pass
    finally:
        context.destroy(linger=0)


def test_events_are_off_unless_asked_for() -> None:
    assert not config(2).events.recorded
    assert config(2, events=_events()).events.recorded
