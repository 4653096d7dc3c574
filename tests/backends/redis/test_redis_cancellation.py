"""What a cancelled call leaves behind: no late byte, no connection in the middle of a reply, no waiting."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from backends.redis.backend import RedisBackend
from tests.backends.redis import rig
from tests.backends.redis.rig import FAILED, HEADER_BYTES, MIB, MISSING, OK, key_of, payload_of
from tests.servers import valkey as servers
from tests.servers.relay import Relay, relay
from tiering.api import ClosedError, Namespace

SIZE = 4097
REPLY_BYTES = len(b"$4225\r\n") + HEADER_BYTES + SIZE + 2
PROMPT_S = 1.0
"""A call that was given up returns within this, on a machine that is busy with other things too."""

POISON = b"\xee" * SIZE


@asynccontextmanager
async def behind_relay(
    server: servers.Valkey, tmp_path: Path, spoken: Namespace | None = None, **fields: object
) -> AsyncIterator[tuple[RedisBackend, Relay]]:
    async with relay(server.path) as wire:
        url = f"redis://127.0.0.1:{wire.port}"
        async with rig.opened(url, spoken or rig.namespace(SIZE), prefix=rig.prefix_of(tmp_path), **fields) as backend:
            yield backend, wire
            wire.open_valve()


@pytest.mark.parametrize("tail", [False, True], ids=["the block", "the block behind it"])
async def test_wrong_bytes_after_a_load_that_was_cancelled_in_the_middle_of_a_reply(
    server: servers.Valkey, tmp_path: Path, tail: bool
) -> None:
    """row 13: the rest of the reply is nobody's: it neither lands in the old buffer nor answers the next call."""
    async with behind_relay(server, tmp_path, connections_max=1) as (backend, wire):
        keys = [key_of(n) for n in range(4)]
        await rig.store(backend, keys, SIZE)
        points = [0, 1, 5, 6, 7, 8, HEADER_BYTES + 6, HEADER_BYTES + 7, HEADER_BYTES + 8, 2000]
        for point in [*points, *(REPLY_BYTES - n for n in (1, 2, 3))]:
            before = wire.connections
            dests = [memoryview(bytearray(SIZE)) for _ in range(2)]
            wire.close_valve_after(point + tail * REPLY_BYTES)
            call = asyncio.create_task(backend.load(list(zip(keys, dests, strict=False))))
            await wire.held.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            for dest in dests:
                dest[:] = POISON
            wire.open_valve()
            # Whatever these find is compared with the true bytes.
            assert await rig.load(backend, list(reversed(keys)), SIZE) == [OK] * 4
            assert await rig.contains(backend, [keys[0], b"absent", keys[1]]) == [OK, MISSING, OK]
            assert dests[0] == dests[1] == POISON, f"bytes came in late, after {point}"
            assert wire.connections == before + 1, "the connection of a cancelled call is used again"


async def test_wrong_bytes_after_other_calls_that_were_cancelled_in_the_middle_of_a_reply(
    server: servers.Valkey, tmp_path: Path
) -> None:
    """row 13: a verdict of 1 or 0 that was meant for the call before would be believed."""
    async with behind_relay(server, tmp_path, connections_max=1) as (backend, wire):
        keys = [key_of(n) for n in range(4)]
        await rig.store(backend, keys[:2], SIZE)
        for point in range(4 * len(b":1\r\n")):
            wire.close_valve_after(point)
            call = asyncio.create_task(backend.contains([keys[0]] * 4))
            await wire.held.wait()
            call.cancel()
            await asyncio.wait((call,))
            wire.open_valve()
            assert await rig.contains(backend, [keys[2], keys[3], keys[2], keys[3]]) == [MISSING] * 4


async def test_wrong_bytes_under_random_cancellations(server: servers.Valkey, tmp_path: Path) -> None:
    """row 13: overlapping loads of many blocks, a third of them cancelled at any moment; each OK one is compared."""
    rng = random.Random(7)
    prefix = rig.prefix_of(tmp_path)
    async with rig.opened(server, prefix=prefix, connections_max=3) as backend:
        keys = [key_of(n) for n in range(12)]
        sizes = [rig.SIZES[n % 3] for n in range(12)]
        blocks = list(zip(keys, sizes, strict=True))
        await backend.store([(key, memoryview(payload_of(key, size))) for key, size in blocks])
        used: list[memoryview] = []

        async def load_some() -> None:
            chosen = rng.sample(blocks, 4)
            dests = [memoryview(bytearray(size)) for _, size in chosen]
            items = [(key, dest) for (key, _), dest in zip(chosen, dests, strict=True)]
            call = asyncio.create_task(backend.load(items))
            if rng.random() < 0.33:
                for _ in range(rng.choice((0, 1, 3, 10, 40, 150))):
                    await asyncio.sleep(0)
                call.cancel()
            await asyncio.wait((call,))
            if not call.cancelled():
                assert rig.codes(call.result()) == [OK] * 4
                for (key, size), dest in zip(chosen, dests, strict=True):
                    assert dest == payload_of(key, size)
            for dest in dests:
                dest[:] = b"\xee" * len(dest)
            used.extend(dests)

        for _ in range(12):
            await asyncio.gather(*(load_some() for _ in range(6)))
        assert all(dest == b"\xee" * len(dest) for dest in used)
        assert await rig.contains(backend, keys) == [OK] * 12


async def test_a_store_cancelled_in_the_middle_leaves_nothing_on_the_server(
    server: servers.Valkey, tmp_path: Path
) -> None:
    """row 20's kind: a server never runs half a SET. The call is cancelled while the server reads its command."""
    spoken = rig.namespace(8 * MIB)
    prefix = rig.prefix_of(tmp_path)
    async with behind_relay(server, tmp_path, spoken) as (backend, wire):
        key = key_of(1)
        src = bytearray(payload_of(key, 8 * MIB))
        call = asyncio.create_task(backend.store([(key, memoryview(src))]))
        before = wire.sent_bytes
        while wire.sent_bytes < before + MIB:
            await wire.asked()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert wire.sent_bytes < 8 * MIB
        src[:] = b"\xee" * len(src)
        assert server("EXISTS", rig.name_of(prefix, spoken, key)) == 0
        assert await rig.load(backend, [key], 8 * MIB) == [MISSING]
        assert await rig.store(backend, [key], 8 * MIB) == [OK]
        assert await rig.load(backend, [key], 8 * MIB) == [OK]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[servers.Valkey]:
    """A server of the test's own, to be frozen."""
    with servers.valkey(tmp_path / "own") as started:
        yield started
        started.thaw()


@pytest.mark.parametrize("op", ["contains", "load", "store", "delete"])
async def test_no_deadline_a_call_to_a_frozen_server_ends_when_it_is_cancelled(
    own: servers.Valkey, tmp_path: Path, op: str
) -> None:
    """row 8: and nothing lands in its buffer when the server goes on."""
    async with behind_relay(own, tmp_path) as (backend, wire):
        key = key_of(1)
        assert await rig.store(backend, [key], SIZE) == [OK]
        await wire.asked()
        own.freeze()
        dest = memoryview(bytearray(payload_of(key, SIZE)))
        call = asyncio.create_task({
            "contains": lambda: backend.contains([key]),
            "delete": lambda: backend.delete([key]),
            "load": lambda: backend.load([(key, dest)]),
            "store": lambda: backend.store([(key, dest)]),
        }[op]())  # fmt: skip
        await wire.asked()
        started_s = time.monotonic()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert time.monotonic() - started_s < PROMPT_S
        dest[:] = POISON
        own.thaw()
        assert await rig.store(backend, [key], SIZE) == [OK]
        assert await rig.load(backend, [key], SIZE) == [OK]
        assert dest == POISON


async def test_no_deadline_a_connection_that_is_not_accepted_is_given_up(own: servers.Valkey) -> None:
    """row 8: a cancelled open leaves no thread, task or socket behind."""
    own.freeze()
    backend = RedisBackend(rig.config(own))
    call = asyncio.create_task(backend.open(rig.namespace(SIZE)))
    await asyncio.sleep(0)
    call.cancel()
    started_s = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await call
    await backend.aclose(5)
    assert time.monotonic() - started_s < PROMPT_S


async def test_no_deadline_closing_cuts_off_calls_to_a_frozen_server(own: servers.Valkey, tmp_path: Path) -> None:
    """row 8: close is bounded; what it cut off came back FAILED, so nobody's buffer is in use any more."""
    async with behind_relay(own, tmp_path, connections_max=2) as (backend, wire):
        keys = [key_of(n) for n in range(8)]
        await rig.store(backend, keys, SIZE)
        await wire.asked()
        own.freeze()
        dests = [memoryview(bytearray(SIZE)) for _ in keys]
        calls = [asyncio.create_task(backend.load([item])) for item in zip(keys, dests, strict=True)]
        await wire.asked()
        started_s = time.monotonic()
        await backend.aclose(0.4)
        assert time.monotonic() - started_s < 0.4 + PROMPT_S
        assert [rig.codes(call.result()) for call in calls] == [[FAILED]] * 8
        with pytest.raises(ClosedError):
            await backend.load([(keys[0], dests[0])])
        for dest in dests:
            dest[:] = POISON
        own.thaw()
        assert own("PING") is True
        assert all(dest == POISON for dest in dests)


async def test_no_deadline_a_silent_server_fails_calls_by_itself(own: servers.Valkey, tmp_path: Path) -> None:
    """row 8: also a store, which nobody cancels, ends: its buffers are not held for as long as the server is stopped."""
    async with behind_relay(own, tmp_path, timeout=0.1) as (backend, _):
        keys = [key_of(n) for n in range(2)]
        assert await rig.store(backend, keys, SIZE) == [OK, OK]
        own.freeze()
        for outcomes in (
            await backend.contains(keys),
            await backend.load([(key, memoryview(bytearray(SIZE))) for key in keys]),
            await backend.store([(key, memoryview(payload_of(key, SIZE))) for key in keys]),
        ):
            assert rig.codes(outcomes) == [FAILED, FAILED]
            assert all(outcome.retryable and "silent for 0.1 s" in outcome.why for outcome in outcomes)
        own.thaw()
        assert await rig.load(backend, keys, SIZE) == [OK, OK]
