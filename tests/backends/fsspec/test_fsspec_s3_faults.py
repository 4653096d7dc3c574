"""What goes wrong between a client and S3: every answer, and every end of a connection, has the right outcome."""

from __future__ import annotations

import asyncio
import gc
import mmap
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from backends.fsspec.backend import FsspecBackend
from tests.backends.fsspec import rig
from tests.backends.fsspec.rig import CORRUPT, FAILED, LARGE, MISSING, OK, REFUSED, codes, key_of
from tests.servers.http_proxy import Body, HttpProxy, http_proxy
from tests.servers.seaweed import SeaweedServer
from tiering.api import BackendError, ClosedError, Outcome, OutcomeCode

KEYS = [key_of(n) for n in range(6)]


@pytest.fixture(params=rig.CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return rig.prefix_of(tmp_path)


@asynccontextmanager
async def behind_proxy(
    s3: SeaweedServer, prefix: str, client: str, **fields: Any
) -> AsyncIterator[tuple[FsspecBackend, HttpProxy]]:
    async with http_proxy(s3.endpoint_url) as proxy:
        given = rig.s3_config(prefix, endpoint=proxy.url, s3_client=client, **fields)
        async with rig.opened(given) as backend:
            yield backend, proxy


@pytest.mark.parametrize(
    ("status", "code", "expected", "retryable"),
    [
        (403, "AccessDenied", FAILED, False),
        (403, "SignatureDoesNotMatch", FAILED, False),
        (404, "NoSuchKey", MISSING, False),
        (409, "OperationAborted", FAILED, True),
        (429, "TooManyRequests", FAILED, True),
        (500, "InternalError", FAILED, True),
        (503, "SlowDown", FAILED, True),
        (400, "RequestTimeout", FAILED, True),
        (400, "InvalidRequest", FAILED, False),
    ],
)
async def test_each_status_of_a_load_has_its_outcome(
    s3: SeaweedServer, prefix: str, client: str, status: int, code: str, expected: OutcomeCode, retryable: bool
) -> None:
    """row 23: and the blocks beside the one that failed are loaded."""
    async with behind_proxy(s3, prefix, client) as (backend, proxy):
        assert codes(await rig.store(backend, KEYS[:3])) == [OK] * 3
        proxy.plan("GET", status=status, code=code, path=KEYS[1].hex())
        outcomes = await rig.load(backend, KEYS[:3])
        assert codes(outcomes) == [OK, expected, OK]
        assert outcomes[1].retryable is retryable
        assert proxy.requests["GET"] == 3 + 1, "three blocks and the listing at open: retries are not the backend's"
        assert codes(await rig.load(backend, KEYS[:3])) == [OK] * 3


@pytest.mark.parametrize(
    ("status", "expected", "retryable"),
    [(403, FAILED, False), (404, MISSING, False), (500, FAILED, True), (503, FAILED, True)],
)
async def test_each_status_of_a_lookup_has_its_outcome(
    s3: SeaweedServer, prefix: str, client: str, status: int, expected: OutcomeCode, retryable: bool
) -> None:
    async with behind_proxy(s3, prefix, client) as (backend, proxy):
        await rig.store(backend, KEYS[:3])
        proxy.plan("HEAD", status=status, path=KEYS[1].hex())
        outcomes = await backend.contains(KEYS[:3])
        assert codes(outcomes) == [OK, expected, OK]
        assert outcomes[1].retryable is retryable


@pytest.mark.parametrize(
    ("status", "code", "expected", "retryable"),
    [
        (403, "AccessDenied", FAILED, False),
        (404, "NoSuchBucket", FAILED, False),
        (409, "OperationAborted", FAILED, True),
        (500, "InternalError", FAILED, True),
        (503, "SlowDown", FAILED, True),
        (507, "InsufficientCapacity", REFUSED, False),
    ],
)
async def test_each_status_of_a_store_has_its_outcome(
    s3: SeaweedServer, prefix: str, client: str, status: int, code: str, expected: OutcomeCode, retryable: bool
) -> None:
    """row 18: reported per block, and stored again as soon as the server takes it."""
    async with behind_proxy(s3, prefix, client) as (backend, proxy):
        proxy.plan("PUT", status=status, code=code, path=KEYS[1].hex())
        outcomes = await rig.store(backend, KEYS[:3])
        assert codes(outcomes) == [OK, expected, OK]
        assert outcomes[1].retryable is retryable
        assert code in outcomes[1].why
        assert codes(await backend.contains(KEYS[:3])) == [OK, MISSING, OK]
        assert codes(await rig.store(backend, KEYS[:3])) == [OK] * 3


async def test_wrong_bytes_are_never_served(s3: SeaweedServer, prefix: str, client: str) -> None:
    """row 13: bodies that were cut, shortened, extended or flipped on their way. What is whole in the bucket may go too."""
    async with behind_proxy(s3, prefix, client) as (backend, proxy):
        for body, legal in (
            (Body.CUT, {FAILED}),
            (Body.SHORTENED, {FAILED, CORRUPT}),
            # OK: what is longer than a block is asked for once more, and rig.load compares the bytes.
            (Body.EXTENDED, {FAILED, CORRUPT, OK}),
            (Body.FLIPPED, {CORRUPT}),
        ):
            for size in (rig.SMALL, LARGE):
                assert codes(await rig.store(backend, KEYS[:2], size)) == [OK] * 2
                proxy.plan("GET", body=body, path=KEYS[0].hex())
                bad, good = await rig.load(backend, KEYS[:2], size)
                assert bad.code in legal, f"{body}: {bad}"
                assert bad.retryable is (bad.code is FAILED)
                assert good.ok
                later = codes(await rig.load(backend, KEYS[:2], size))
                assert later == [MISSING if bad.code is CORRUPT else OK, OK], "a corrupt block is removed"


async def test_a_dropped_connection_is_retryable_and_the_next_request_works(
    s3: SeaweedServer, prefix: str, client: str
) -> None:
    """row 10: dead connections are replaced."""
    async with behind_proxy(s3, prefix, client) as (backend, proxy):
        await rig.store(backend, KEYS)
        calls: dict[str, Callable[[], Awaitable[list[Outcome]]]] = {
            "GET": lambda: rig.load(backend, KEYS[:1]),
            "HEAD": lambda: backend.contains(KEYS[:1]),
            "PUT": lambda: rig.store(backend, KEYS[:1]),
        }
        for method, call in calls.items():
            # Clients send a request again when its kept connection ends before any answer.
            proxy.plan(method, drop=True, times=2)
            while proxy.faults[-1].times:
                (outcome,) = await call()
                assert outcome.ok or (outcome.code is FAILED and outcome.retryable), outcome
            assert codes(await call()) == [OK]


async def test_no_deadline_a_hung_body_ends_at_the_time_limit(s3: SeaweedServer, prefix: str, client: str) -> None:
    """row 8: the block fails, its neighbours do not, and bytes that come late land nowhere."""
    async with behind_proxy(s3, prefix, client, timeout="300ms") as (backend, proxy):
        assert codes(await rig.store(backend, KEYS[:2], LARGE)) == [OK] * 2
        proxy.plan("GET", body=Body.HANGS, path=KEYS[0].hex())
        views = [memoryview(bytearray(LARGE)) for _ in range(2)]
        hung, good = await backend.load(list(zip(KEYS[:2], views, strict=True)))
        assert (hung.code, hung.retryable, good.code) == (FAILED, True, OK)
        proxy.release()
        assert codes(await rig.load(backend, KEYS[:2], LARGE)) == [OK] * 2
        assert not any(views[0]), "late bytes landed"


async def test_cancelled_loads_of_hung_bodies_return_at_once(s3: SeaweedServer, prefix: str, client: str) -> None:
    """row 8: cancellation does not wait for the server, and keeps no view: the collector has nothing to do for it."""
    async with behind_proxy(s3, prefix, client) as (backend, proxy):
        await rig.store(backend, KEYS[:2], LARGE)
        proxy.plan("GET", body=Body.HANGS, times=2)
        buffers = [mmap.mmap(-1, LARGE) for _ in range(2)]
        gc.collect()
        gc.disable()
        try:
            call = asyncio.create_task(
                backend.load([(key, memoryview(b)) for key, b in zip(KEYS[:2], buffers, strict=True)])
            )
            await proxy.hung()
            await proxy.hung()
            call.cancel()
            await asyncio.wait((call,), timeout=5)
            assert call.cancelled()
            del call
            for buffer in buffers:
                assert not any(buffer[:]), "bytes landed"
                buffer.close()
        finally:
            gc.enable()
        proxy.release()
        assert codes(await rig.load(backend, KEYS[:2], LARGE)) == [OK] * 2


async def test_aclose_gives_hung_requests_up_and_ends_in_time(s3: SeaweedServer, prefix: str, client: str) -> None:
    """row 8: closing is bounded, also where the server never answers; what waited for a turn is given up too."""
    async with http_proxy(s3.endpoint_url) as proxy:
        given = rig.s3_config(prefix, endpoint=proxy.url, s3_client=client, requests_max=2)
        backend = FsspecBackend(given)
        await backend.open(rig.namespace())
        await rig.store(backend, KEYS, LARGE)
        proxy.plan("GET", body=Body.HANGS, times=100)
        call = asyncio.create_task(rig.load(backend, KEYS, LARGE))
        await proxy.hung()
        await proxy.hung()
        started_s = asyncio.get_running_loop().time()
        await backend.aclose(0.4)
        assert asyncio.get_running_loop().time() - started_s < 2
        outcomes = await call
        assert codes(outcomes) == [FAILED] * len(KEYS)
        assert all(outcome.retryable for outcome in outcomes)
        with pytest.raises(ClosedError):
            await backend.contains(KEYS)


async def test_unbounded_queue_requests_and_connections_stay_below_the_limit(
    s3: SeaweedServer, prefix: str, client: str
) -> None:
    """row 12: however many blocks are asked for, and a store that hangs holds up no load."""
    many = [key_of(n) for n in range(40)]
    async with behind_proxy(s3, prefix, client, requests_max=3) as (backend, proxy):
        assert codes(await rig.store(backend, many)) == [OK] * 40
        calls = await asyncio.gather(*(rig.load(backend, many[n : n + 10]) for n in range(0, 40, 10)))
        assert [code for outcomes in calls for code in codes(outcomes)] == [OK] * 40
        assert proxy.most_under_way <= 3
        release = proxy.hold()
        stores = asyncio.create_task(rig.store(backend, many))
        loads = asyncio.create_task(rig.load(backend, many))
        for _ in range(6):
            await proxy.held()
        release()
        assert codes(await stores) == codes(await loads) == [OK] * 40
        assert proxy.most_under_way <= 6
        assert proxy.most_connections <= 9, "three of each kind"


async def test_a_vanished_object_is_a_miss(s3: SeaweedServer, prefix: str, client: str) -> None:
    """row 21: the lookup says yes, then somebody else removes it."""
    async with behind_proxy(s3, prefix, client) as (backend, _):
        await rig.store(backend, KEYS[:3])
        assert codes(await backend.contains(KEYS[:3])) == [OK] * 3
        await rig.bucket_store().delete_async(rig.path_of(prefix, rig.namespace(), KEYS[1]))
        assert codes(await rig.load(backend, KEYS[:3])) == [OK, MISSING, OK]
        assert codes(await backend.contains(KEYS[:3])) == [OK, MISSING, OK]


async def test_objects_that_are_no_block_are_a_miss_for_a_lookup(s3: SeaweedServer, prefix: str, client: str) -> None:
    """row 13: some servers leave an empty object of an upload that was cut off."""
    async with behind_proxy(s3, prefix, client) as (backend, _):
        for n, size in enumerate((0, 1, 127, 128, rig.SMALL)):
            await rig.bucket_store().put_async(rig.path_of(prefix, rig.namespace(), KEYS[n]), bytes(size))
        assert codes(await backend.contains(KEYS[:5])) == [MISSING] * 5
        assert set(codes(await rig.load(backend, KEYS[:5]))) <= {MISSING, CORRUPT}
        assert codes(await rig.store(backend, KEYS[:5])) == [OK] * 5
        assert codes(await rig.load(backend, KEYS[:5])) == [OK] * 5


async def test_a_dead_endpoint_fails_every_call_retryably(s3: SeaweedServer, prefix: str, client: str) -> None:
    async with http_proxy(s3.endpoint_url) as proxy:
        backend = FsspecBackend(rig.s3_config(prefix, endpoint=proxy.url, s3_client=client))
        await backend.open(rig.namespace())
    try:
        for outcomes in (
            await backend.contains(KEYS[:2]),
            await rig.load(backend, KEYS[:2]),
            await rig.store(backend, KEYS[:2]),
            await backend.delete(KEYS[:2]),
        ):
            assert codes(outcomes) == [FAILED] * 2
            assert all(outcome.retryable for outcome in outcomes)
    finally:
        await backend.aclose(5)
    dead = FsspecBackend(rig.s3_config(prefix, endpoint=proxy.url, s3_client=client))
    with pytest.raises(BackendError) as raised:
        await dead.open(rig.namespace())
    assert raised.value.retryable
    await dead.aclose(5)


async def test_no_deadline_a_frozen_server_fails_at_the_time_limit_and_serves_again(
    s3: SeaweedServer, prefix: str, client: str
) -> None:
    """row 8: connections stay open and nothing answers, as in a stopped process; then it goes on, and so does the tier.

    ``freeze`` returns once the whole process has stopped: a request sent in the milliseconds before that is answered.
    """
    async with (
        rig.opened(rig.s3_config(prefix, s3_client=client)) as patient,
        rig.opened(rig.s3_config(prefix, s3_client=client, timeout="1s")) as hasty,
    ):
        assert codes(await rig.store(patient, KEYS[:2])) == [OK] * 2
        s3.freeze()
        try:
            waiting = asyncio.create_task(rig.load(patient, KEYS[:2]))
            calls = (hasty.contains(KEYS[:2]), rig.load(hasty, KEYS[:2]), rig.store(hasty, KEYS[:2]))
            for outcomes in await asyncio.wait_for(asyncio.gather(*calls), 20):
                assert codes(outcomes) == [FAILED] * 2
                assert all(outcome.retryable for outcome in outcomes)
            assert not waiting.done(), "somebody answered"
        finally:
            s3.thaw()
        assert codes(await waiting) == [OK] * 2
        assert codes(await rig.load(patient, KEYS[:2])) == [OK] * 2


async def test_cancelled_calls_to_a_frozen_server_return_at_once(s3: SeaweedServer, prefix: str, client: str) -> None:
    """row 8: nobody has to wait for the time limit who does not want to."""
    async with rig.opened(rig.s3_config(prefix, s3_client=client)) as backend:
        assert codes(await rig.store(backend, KEYS[:2])) == [OK] * 2
        s3.freeze()
        try:
            load = asyncio.create_task(rig.load(backend, KEYS[:2]))
            store = asyncio.create_task(rig.store(backend, KEYS[2:4]))
            done, _ = await asyncio.wait((load, store), timeout=0.1)
            assert not done, "somebody answered"
            for call in (load, store):
                call.cancel()
            await asyncio.wait((load, store), timeout=20)
            assert load.cancelled()
            assert store.cancelled()
        finally:
            s3.thaw()
        assert codes(await rig.load(backend, KEYS[:2])) == [OK] * 2


async def test_a_dead_endpoint_is_told_in_the_words_of_the_system(prefix: str, client: str) -> None:
    """What an operator needs of it is who was asked and why that failed, not how the client tells it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        backend = FsspecBackend(rig.s3_config(prefix, endpoint=endpoint, s3_client=client))
        with pytest.raises(BackendError, match=re.escape(endpoint)) as raised:
            await backend.open(rig.namespace())
    if client == "obstore":
        assert str(raised.value) == f"fsspec.open: bucket {rig.BUCKET}: LIST: {endpoint}: Connection refused"
    await backend.aclose(5)
