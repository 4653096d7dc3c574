"""From a URL to blocks that can be moved: which filesystem, which client, and what an operator must fix at open."""

from __future__ import annotations

import importlib
from concurrent.futures import Executor
from typing import Any, Final, TypeAlias

from backends.fsspec.clients import FilesystemClient, ObjectClient
from backends.fsspec.config import S3_SCHEMES, FsspecConfig
from backends.fsspec.failures import Kind, Secrets, Trouble, trouble_of
from backends.fsspec.names import Names
from backends.fsspec.remote import RemoteBlocks
from backends.fsspec.s3 import choose_client, create_bucket, make_obstore, make_s3fs
from backends.fsspec.threads import Files, LocalFiles, MemoryFiles, ThreadBlocks
from tiering.api import BackendError, ConfigError, Namespace, run_blocking

Blocks: TypeAlias = RemoteBlocks | ThreadBlocks

S3_OBJECT_BYTES_MAX: Final = 5 << 30
"""What one PUT takes."""


async def find_blocks(config: FsspecConfig, namespace: Namespace, tier: str, executor: Executor) -> Blocks:
    """Nothing is asked of the medium yet. Raises ``ConfigError``: a missing package, options that nobody knows."""
    secrets = Secrets(config.storage_options)
    if config.scheme in S3_SCHEMES:
        make = make_obstore if choose_client(config) == "obstore" else make_s3fs
        return _remote(await make(config, secrets, executor), config, config.prefix, namespace, tier, executor)
    fsspec = await run_blocking(importlib.import_module, "fsspec", executor=executor)
    try:
        kind = await run_blocking(fsspec.get_filesystem_class, config.scheme, executor=executor)
        if kind.async_impl:
            # On the loop: it belongs to the loop that it is made on.
            filesystem = kind(asynchronous=True, skip_instance_cache=True, **config.storage_options)
        else:
            options: Any = {"skip_instance_cache": True, **config.storage_options}
            filesystem = await run_blocking(lambda: kind(**options), executor=executor)
    except (ImportError, ValueError, TypeError) as error:
        text = secrets.hide(str(error))
        raise ConfigError(f"url: no filesystem for {config.scheme}://: {type(error).__name__}: {text}") from None
    except OSError as error:
        raise _open_error(config, trouble_of("connect", error, secrets)) from None
    root = str(filesystem._strip_protocol(config.url))
    if kind.async_impl:
        client = FilesystemClient(filesystem)
        try:
            await client.connect()
        except Exception as error:
            raise _open_error(config, trouble_of("connect", error, secrets)) from None
        return _remote(client, config, root, namespace, tier, executor)
    files = _files(filesystem, Names.of(root, namespace), namespace, config)
    return ThreadBlocks(files, namespace, secrets, executor)


async def open_blocks(blocks: Blocks, config: FsspecConfig, executor: Executor) -> None:
    """Ask the medium for something. Raises ``ConfigError`` with the remedy, ``BackendError`` for what may pass."""
    trouble = await blocks.probe()
    if trouble is not None and trouble.kind is Kind.MISSING and config.create_bucket:
        trouble = await create_bucket(config, executor) or await blocks.probe()
    if trouble is not None:
        raise _open_error(config, trouble)


def _remote(
    client: ObjectClient, config: FsspecConfig, root: str, namespace: Namespace, tier: str, executor: Executor
) -> RemoteBlocks:
    return RemoteBlocks(
        client,
        namespace,
        Names.of(root, namespace),
        Secrets(config.storage_options),
        tier=tier,
        requests_max=config.requests_max,
        timeout_s=config.timeout_s,
        executor=executor,
    )


def _files(filesystem: Any, names: Names, namespace: Namespace, config: FsspecConfig) -> Files:
    if config.scheme == "memory":
        return MemoryFiles(filesystem, names, namespace)
    if config.scheme in ("file", "local"):
        return LocalFiles(filesystem, names, namespace)
    base = importlib.import_module("fsspec.spec").AbstractFileSystem
    if type(filesystem).mv is base.mv:
        raise ConfigError(
            f"url: {config.scheme}:// cannot rename, so that readers would see parts of blocks; use another filesystem"
        )
    return Files(filesystem, names, namespace)


def _open_error(config: FsspecConfig, trouble: Trouble) -> ConfigError | BackendError:
    on_s3 = config.scheme in S3_SCHEMES
    place = f"bucket {config.bucket}" if on_s3 else config.url
    match trouble.kind:
        case Kind.BUSY:
            return BackendError(f"{place}: {trouble.why}", retryable=True)
        case Kind.MISSING if on_s3:
            remedy = "there is no such bucket at this endpoint; create it, or set `create_bucket: true`"
        case Kind.DENIED if on_s3:
            remedy = (
                "the credentials do not suffice; they need s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject and"
                f" s3:DeleteObject on {config.prefix or '*'}. They come from `storage_options` (key, secret, profile), else"
                " from the environment, the shared files or the machine's role"
            )
        case Kind.BROKEN if on_s3:
            remedy = "check `endpoint_url` and `region` in `storage_options`: the bucket may be in another region"
        case Kind.FULL:
            remedy = "make room"
        case _:
            remedy = "give this user the right to read and write it"
    return ConfigError(f"url: {place}: {trouble.why}; {remedy}")
