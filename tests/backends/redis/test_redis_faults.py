"""Servers that restart, fill up, forget, lie and hang up."""

from __future__ import annotations

import asyncio
import gc
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.redis import rig
from tests.backends.redis.rig import CORRUPT, FAILED, KIB, MIB, MISSING, OK, REFUSED, key_of, name_of, payload_of
from tests.backends.redis.test_redis_cancellation import behind_relay
from tests.servers import valkey as servers

SIZE = 4097
KEYS = [key_of(n) for n in range(40)]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[servers.Valkey]:
    """A server of the test's own, to be killed."""
    with servers.valkey(tmp_path / "own") as started:
        yield started


@pytest.mark.parametrize("over", ["tcp", "unix"])
async def test_dead_connection_is_replaced_without_a_failed_call(own: servers.Valkey, over: str) -> None:
    """row 10: restarted between two calls, the server costs no store, no load and no lookup."""
    async with rig.opened(own if over == "tcp" else f"unix://{own.path}") as backend:
        assert await asyncio.gather(*(rig.store(backend, [key]) for key in KEYS)) == [[OK]] * 40
        own.kill()
        own.start()
        assert await rig.contains(backend, KEYS) == [MISSING] * 40
        assert await asyncio.gather(*(rig.store(backend, [key]) for key in KEYS)) == [[OK]] * 40
        assert await asyncio.gather(*(rig.load(backend, [key]) for key in KEYS)) == [[OK]] * 40


async def test_dead_connection_errors_are_visible_while_the_server_is_down(own: servers.Valkey) -> None:
    """rows 9 and 10: each block is FAILED and may be tried again; "down" is not "missing"; the first call after the
    server's return works."""
    async with rig.opened(own) as backend:
        await rig.store(backend, KEYS)
        own.kill()
        loads = [(key, memoryview(bytearray(SIZE))) for key in KEYS]
        stores = [(key, memoryview(payload_of(key, SIZE))) for key in KEYS]
        for _ in range(3):
            for outcomes in (
                await backend.contains(KEYS), await backend.load(loads), await backend.store(stores),
                await backend.delete(KEYS),
            ):  # fmt: skip
                assert {outcome.code for outcome in outcomes} == {FAILED}
                assert all(outcome.retryable for outcome in outcomes)
                assert all(f"127.0.0.1:{own.port} cannot be reached" in outcome.why for outcome in outcomes)
        own.start()
        assert await rig.store(backend, KEYS) == [OK] * 40
        assert await rig.load(backend, KEYS) == [OK] * 40


async def test_dead_connection_while_calls_are_under_way(own: servers.Valkey) -> None:
    """row 10: killed under load and started again: no wrong byte, nothing hangs, everything works afterwards."""
    async with rig.opened(own) as backend:
        stopped = asyncio.Event()
        seen: set[object] = set()

        async def use(number: int) -> None:
            while not stopped.is_set():
                keys = KEYS[number : number + 4]
                seen.update(await rig.store(backend, keys, 256 * KIB))
                seen.update(await rig.load(backend, keys, 256 * KIB))

        async with asyncio.TaskGroup() as group:
            for n in range(4):
                group.create_task(use(4 * n))
            for _ in range(3):
                await rig.eventually(lambda: OK in seen)
                await asyncio.to_thread(own.kill)
                await rig.eventually(lambda: FAILED in seen)
                await asyncio.to_thread(own.start)
                seen.clear()
            await rig.eventually(lambda: OK in seen)
            stopped.set()
        assert seen <= {OK, MISSING, FAILED}
        assert await rig.store(backend, KEYS) == [OK] * 40


@pytest.mark.parametrize("how", ["cut", "half_close"])
async def test_dead_connection_idle_and_in_the_middle_of_a_reply(
    server: servers.Valkey, tmp_path: Path, how: str
) -> None:
    """row 10: connections that a middle box reset, or that the server ended while ours stays open."""
    async with behind_relay(server, tmp_path, connections_max=2) as (backend, wire):
        keys = KEYS[:6]
        assert await rig.store(backend, keys) == [OK] * 6
        for _ in range(3):
            getattr(wire, how)()
            assert await rig.load(backend, keys) == [OK] * 6
            assert await rig.store(backend, keys) == [OK] * 6
        for point in (3, 100, 2000, 5000):
            wire.close_valve_after(point)
            load = asyncio.create_task(rig.load(backend, keys))
            await wire.held.wait()
            getattr(wire, how)()
            wire.open_valve()
            assert await load == [OK] * 6
        assert await rig.contains(backend, [*keys, b"absent"]) == [OK] * 6 + [MISSING]


async def test_wrong_bytes_that_nobody_asked_for(server: servers.Valkey, tmp_path: Path) -> None:
    """row 13: an answer that arrives on an idle connection is not taken for that of the next command."""
    async with behind_relay(server, tmp_path, connections_max=1) as (backend, wire):
        await rig.store(backend, KEYS[:1])
        for stray in (b":1\r\n", b"$-1\r\n", b"+OK\r\n", b"x"):
            before = wire.connections
            await wire.inject(stray)
            assert await rig.contains(backend, [b"absent"]) == [MISSING]
            assert await rig.load(backend, KEYS[:1]) == [OK]
            assert wire.connections == before + 1


async def test_a_full_server_refuses_stores_and_serves_loads(tmp_path: Path) -> None:
    """Row 18's kind: `OOM command not allowed` is REFUSED a block; room made later is used at once."""
    with servers.valkey(tmp_path / "small", "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as small:
        async with rig.opened(small) as backend:
            codes = await rig.store(backend, KEYS, MIB)
            kept = codes.count(OK)
            assert 2 <= kept < 8
            assert codes.count(REFUSED) == 40 - kept
            (outcome,) = await backend.store([(b"x", memoryview(payload_of(b"x", MIB)))])
            assert outcome.code is REFUSED
            assert outcome.why.startswith("OOM command not allowed")
            held = [key for key, code in zip(KEYS, codes, strict=True) if code is OK]
            assert await rig.load(backend, held, MIB) == [OK] * kept
            assert await rig.contains(backend, [*held, b"x"]) == [OK] * kept + [MISSING]
            assert set(await rig.delete(backend, held)) == {OK}
            servers.until(lambda: not small("DBSIZE"), "the deleted blocks are gone")
            assert await rig.store(backend, KEYS[:2], MIB) == [OK, OK]


async def test_a_server_that_evicts_by_itself_gives_misses(tmp_path: Path) -> None:
    """row 21: what `maxmemory-policy` took is a miss, and no error."""
    with servers.valkey(tmp_path / "small", "--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru") as small:
        async with rig.opened(small) as backend:
            assert await rig.store(backend, KEYS, MIB) == [OK] * 40
            codes = await rig.load(backend, KEYS, MIB)
            assert set(codes) == {OK, MISSING}
            assert codes.count(OK) < 8


async def test_vanished_block_is_a_miss(server: servers.Valkey, tmp_path: Path) -> None:
    """row 21: contains said yes, another client deletes, load says MISSING."""
    prefix = rig.prefix_of(tmp_path)
    async with rig.opened(server, prefix=prefix) as backend:
        await rig.store(backend, KEYS[:3])
        assert await rig.contains(backend, KEYS[:3]) == [OK] * 3
        assert server("DEL", name_of(prefix, rig.namespace(), KEYS[1])) == 1
        assert await rig.load(backend, KEYS[:3]) == [OK, MISSING, OK]


async def test_a_block_expires(server: servers.Valkey, tmp_path: Path) -> None:
    """Without `ttl` it never does; with it, each store counts anew. The server tells."""
    prefix, spoken = rig.prefix_of(tmp_path), rig.namespace()
    name = name_of(prefix, spoken, KEYS[0])
    async with rig.opened(server, prefix=prefix) as backend:
        await rig.store(backend, KEYS[:1])
        assert server("TTL", name) == -1
    async with rig.opened(server, prefix=prefix, ttl="90min") as backend:
        await rig.store(backend, KEYS[:1])
        assert server("TTL", name) in (5399, 5400)
        server("EXPIRE", name, 7)
        await rig.store(backend, KEYS[:1])
        assert server("TTL", name) in (5399, 5400)
        assert server("PEXPIRE", name, 1) == 1
        servers.until(lambda: not server("EXISTS", name), "the key expires")
        assert await rig.load(backend, KEYS[:1]) == [MISSING]


async def test_batch_poisoned_by_one_value_that_is_none_of_ours(server: servers.Valkey, tmp_path: Path) -> None:
    """rows 13 and 23: another type, an empty value, a value that is far too long, all among good blocks."""
    prefix, spoken = rig.prefix_of(tmp_path), rig.namespace()
    async with rig.opened(server, prefix=prefix, connections_max=2) as backend:
        keys = KEYS[:8]
        await rig.store(backend, keys, 256 * KIB)
        names = [name_of(prefix, spoken, key) for key in keys]
        for name in (names[1], names[3], names[4], names[7]):
            server("DEL", name)
        server("RPUSH", names[1], "a", "list")
        server("SET", names[3], bytes(20 * MIB))
        server("SET", names[4], "")
        server("SET", names[7], bytes(300 * KIB))
        expected = [CORRUPT if n in (1, 3, 4, 7) else OK for n in range(8)]
        assert await rig.load(backend, keys, 256 * KIB) == expected
        assert [server("EXISTS", name) for name in names] == [code is OK for code in expected], "bad values stay"
        assert await rig.load(backend, keys, 256 * KIB) == [MISSING if code is CORRUPT else OK for code in expected]


async def test_unbounded_queue_calls_share_a_bounded_number_of_connections(own: servers.Valkey) -> None:
    """row 12: 300 calls at a time take the connections that are allowed, and as many threads; stores take half."""
    async with rig.opened(own, connections_max=5) as backend:
        before = threading.active_count()
        calls = [asyncio.create_task(rig.store(backend, [key_of(n)], 256 * KIB)) for n in range(300)]
        most = 0
        while not all(call.done() for call in calls):
            most = max(most, threading.active_count() - before)
            await asyncio.sleep(0)
        assert [call.result() for call in calls] == [[OK]] * 300
        assert most <= 5
        # The client that asks is one, too.
        assert own.info("connected_clients") == 3
        await asyncio.gather(*(backend.contains(KEYS) for _ in range(50)))
        assert own.info("connected_clients") == 6


async def test_slow_stores_leave_lookups_and_loads_their_connections(own: servers.Valkey) -> None:
    """Row 11's kind: the server holds up every write, and as many stores as there may be wait for it."""
    async with rig.opened(own, connections_max=2) as backend:
        await rig.store(backend, KEYS[:2])
        own("CLIENT", "PAUSE", 60_000, "WRITE")
        stores = [asyncio.create_task(rig.store(backend, [key])) for key in KEYS[2:]]
        assert await rig.contains(backend, KEYS[:3]) == [OK, OK, MISSING]
        assert await rig.load(backend, KEYS[:3]) == [OK, OK, MISSING]
        assert not any(store.done() for store in stores)
        own("CLIENT", "UNPAUSE")
        assert await asyncio.gather(*stores) == [[OK]] * 38


async def test_a_failed_call_keeps_none_of_its_buffers(server: servers.Valkey, tmp_path: Path) -> None:
    """Rule 4: neither do the failure's traceback and what refers to it; no garbage collection is needed to close them."""
    async with behind_relay(server, tmp_path, timeout="100ms") as (backend, wire):
        await rig.store(backend, KEYS[:2])
        lent = [mmap.mmap(-1, SIZE) for _ in range(2)]
        gc.disable()
        try:
            wire.close_valve_after(100)
            outcomes = await backend.load([(key, memoryview(one)) for key, one in zip(KEYS, lent, strict=False)])
            assert rig.codes(outcomes) == [FAILED, FAILED]
            for one in lent:
                one.close()
        finally:
            gc.enable()


async def test_silent_thread_death_is_the_callers_error_and_costs_its_connection_only(
    server: servers.Valkey, tmp_path: Path
) -> None:
    """row 34: what nobody expected in a thread (here a buffer that cannot be written) arrives in the call."""
    async with behind_relay(server, tmp_path, connections_max=1) as (backend, wire):
        await rig.store(backend, KEYS[:2])
        before = wire.connections
        with pytest.raises((TypeError, BufferError, ValueError)):
            await backend.load([(KEYS[0], memoryview(bytes(SIZE)))])
        assert await rig.load(backend, KEYS[:2]) == [OK, OK]
        assert wire.connections == before + 1
    gc.collect()


async def test_names_on_the_server_are_as_documented(server: servers.Valkey, tmp_path: Path) -> None:
    """PREFIX:NAMESPACE DIGEST IN HEX:BLOCK KEY, binary and all."""
    prefix, spoken = rig.prefix_of(tmp_path), rig.namespace()
    key = b"\r\n{\0}*:\xff"
    async with rig.opened(server, prefix=prefix) as backend:
        await rig.store(backend, [key])
    assert server("KEYS", f"{prefix}:*") == [prefix.encode() + b":" + spoken.digest.hex().encode() + b":" + key]
