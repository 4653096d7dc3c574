"""Who moves whole objects: any async fsspec filesystem, and the two S3 clients in the ways that cost them least."""

from __future__ import annotations

import asyncio
import importlib
import weakref
from typing import Any, Final, Protocol, TypeVar

from backends.fsspec.payloads import Body, pack_array, pack_bytes
from tiering.api import BlockKey, Namespace

T = TypeVar("T")

THREADS_LEAVE_S: Final = 0.1
"""obstore's threads need some microseconds, and five milliseconds if the interpreter is busy."""


class ObjectClient(Protocol):
    """Requests on objects by path. Each raises what its library raises; ``failures`` knows what that means.

    None keeps a buffer of the caller's: a body is the client's own, and a get makes a new one.
    """

    def pack(self, namespace: Namespace, key: BlockKey, src: memoryview) -> Body:
        """A body of ``src`` and its header, which keeps nothing of ``src``. Blocks: called in a thread for large blocks."""

    async def get(self, path: str, bytes_max: int) -> Any:
        """The first ``bytes_max`` bytes, or all if there are fewer: a flat buffer."""

    async def put(self, path: str, body: Any) -> None:
        """Make ``body`` the whole object, at once for every reader."""

    async def size(self, path: str) -> int:
        """Of the object, in bytes. Raises ``FileNotFoundError``, or its HTTP equal, if there is none."""

    async def remove(self, path: str) -> None: ...

    async def probe(self, directory: str) -> None:
        """List a little, as a trial of bucket and credentials. An empty or missing directory is fine."""

    async def aclose(self) -> None: ...


class FilesystemClient:
    """Any fsspec filesystem with ``async_impl``, made inside the running loop with ``asynchronous=True``."""

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem
        self._session: Any = None

    def pack(self, namespace: Namespace, key: BlockKey, src: memoryview) -> Body:
        return pack_bytes(namespace, key, src)

    async def connect(self) -> None:
        """Filesystems over HTTP keep a session, which must be closed on this very loop."""
        if hasattr(self._fs, "set_session"):
            self._session = await self._fs.set_session()

    async def get(self, path: str, bytes_max: int) -> Any:
        # With both ends given no filesystem asks for the size first.
        return await self._fs._cat_file(path, start=0, end=bytes_max)

    async def put(self, path: str, body: Any) -> None:
        await self._fs._pipe_file(path, body)

    async def size(self, path: str) -> int:
        return int((await self._fs._info(path))["size"])

    async def remove(self, path: str) -> None:
        await self._fs._rm_file(path)

    async def probe(self, directory: str) -> None:
        try:
            await self._fs._ls(directory, detail=False)
        except FileNotFoundError:
            return

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class S3fsClient(FilesystemClient):
    """s3fs. Its ``_info`` of a missing object lists the bucket too, so lookups go to the client below."""

    def __init__(self, filesystem: Any, bucket: str) -> None:
        super().__init__(filesystem)
        self._bucket = bucket

    async def connect(self) -> None:
        await super().connect()
        # "Expect: 100-continue" costs a round trip a PUT, and some servers take an upload that is given up before
        # its body for an empty object.
        handlers = importlib.import_module("botocore.handlers")
        self._session.meta.events.unregister("before-call.s3", handlers.add_expect_header)

    async def get(self, path: str, bytes_max: int) -> Any:
        answer = await self._fs._call_s3("get_object", Bucket=self._bucket, Key=path)
        body = answer["Body"]
        try:
            return await (body.read() if answer["ContentLength"] <= bytes_max else body.read(bytes_max))
        finally:
            body.close()

    async def put(self, path: str, body: Any) -> None:
        await self._fs._call_s3("put_object", Bucket=self._bucket, Key=path, Body=body)

    async def size(self, path: str) -> int:
        return int((await self._fs._call_s3("head_object", Bucket=self._bucket, Key=path))["ContentLength"])

    async def remove(self, path: str) -> None:
        await self._fs._call_s3("delete_object", Bucket=self._bucket, Key=path)

    async def probe(self, directory: str) -> None:
        await self._fs._call_s3("list_objects_v2", Bucket=self._bucket, Prefix=f"{directory}/", MaxKeys=1)

    async def create_bucket(self) -> None:
        """Raises ``FileExistsError`` if there is one meanwhile."""
        await self._fs._mkdir(self._bucket, create_parents=True)


class ObstoreClient:
    """obstore, without its fsspec layer, which copies each block once more and lists the bucket at each miss.

    ``api`` is its module of functions: the store's own methods would keep the store, and so its connections, in the
    traceback of whoever was cancelled in them.
    """

    def __init__(self, api: Any, store: Any) -> None:
        self._api = api
        self._store = store
        self._answers: weakref.WeakSet[asyncio.Future[Any]] = weakref.WeakSet()
        """Of requests that obstore's threads have not let go of."""

    def pack(self, namespace: Namespace, key: BlockKey, src: memoryview) -> Body:
        return pack_array(namespace, key, src)

    async def get(self, path: str, bytes_max: int) -> Any:
        # A range is one answer where a plain get is two, head and body; and it bounds what a foreign object may send.
        return await self._noted(self._api.get_range_async(self._store, path, start=0, length=bytes_max))

    async def put(self, path: str, body: Any) -> None:
        await self._noted(self._api.put_async(self._store, path, body, use_multipart=False))

    async def size(self, path: str) -> int:
        return int((await self._noted(self._api.head_async(self._store, path)))["size"])

    async def remove(self, path: str) -> None:
        await self._noted(self._api.delete_async(self._store, path))

    async def probe(self, directory: str) -> None:
        await self._noted(self._api.list_with_delimiter_async(self._store, directory))

    async def aclose(self) -> None:
        # Its connections end with the last reference; requests under way were waited for or given up.
        self._store = None
        # The thread that gave the last answer is still on its way out of the interpreter. A process that ended now
        # would be aborted by it, and nothing but the answer's own end tells when it is gone.
        give_up_at = asyncio.get_running_loop().time() + THREADS_LEAVE_S
        while self._answers and asyncio.get_running_loop().time() < give_up_at:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def _noted(self, answer: asyncio.Future[T]) -> asyncio.Future[T]:
        self._answers.add(answer)
        return answer
