"""S3 clients made from one vocabulary of options, whichever of obstore and s3fs is installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
from collections.abc import Mapping
from concurrent.futures import Executor
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from backends.fsspec.clients import ObstoreClient, S3fsClient
from backends.fsspec.config import FsspecConfig
from backends.fsspec.failures import Secrets, Trouble, trouble_of
from tiering.api import ConfigError, run_blocking

CONNECT_TIMEOUT_S: Final = 5.0
CREDENTIALS_TTL: Final = timedelta(minutes=10)
"""How long obstore uses credentials that expire. botocore renews them ten minutes before they do."""

_OUR_WORDS: Final = {
    "key": "key",
    "access_key_id": "key",
    "aws_access_key_id": "key",
    "secret": "secret",
    "secret_access_key": "secret",
    "aws_secret_access_key": "secret",
    "token": "token",
    "session_token": "token",
    "aws_session_token": "token",
    "region": "region",
    "region_name": "region",
    "aws_region": "region",
    "endpoint": "endpoint_url",
    "endpoint_url": "endpoint_url",
    "aws_endpoint_url": "endpoint_url",
    "anon": "anon",
    "skip_signature": "anon",
    "profile": "profile",
}
"""What both clients understand, by whichever of its names, and what we call it."""

_TO_OBSTORE: Final = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
    "anon": "skip_signature",
}
_TO_S3FS: Final = ("key", "secret", "token", "endpoint_url", "anon")
_IN_CLIENT_KWARGS: Final = ("region_name", "endpoint_url")


def choose_client(config: FsspecConfig) -> str:
    """``obstore`` or ``s3fs``: as configured, else what is installed. Raises ``ConfigError`` if it is not."""
    wanted = ("obstore", "s3fs") if config.s3_client == "auto" else (config.s3_client,)
    for name in wanted:
        if importlib.util.find_spec(name) is not None:
            return name
    raise ConfigError(f"url: s3:// needs {' or '.join(wanted)}; pip install 'kvtiering[s3]'")


def split_options(storage_options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options that both clients understand, by our names, and the rest, which the client in use must understand."""
    common: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in storage_options.items():
        if word := _OUR_WORDS.get(name):
            common[word] = value
        else:
            rest[name] = value
    nested = rest.get("client_kwargs")
    if isinstance(nested, Mapping):
        # Where s3fs keeps two of them.
        rest["client_kwargs"] = {name: value for name, value in nested.items() if name not in _IN_CLIENT_KWARGS}
        common |= {_OUR_WORDS[name]: nested[name] for name in _IN_CLIENT_KWARGS if name in nested}
        if not rest["client_kwargs"]:
            del rest["client_kwargs"]
    if isinstance(anon := common.get("anon"), str):  # from an environment variable
        common["anon"] = anon.lower() in ("true", "yes", "on", "1")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        common.setdefault("endpoint_url", endpoint)
    return common, rest


async def make_obstore(config: FsspecConfig, secrets: Secrets, executor: Executor) -> ObstoreClient:
    """Raises ``ConfigError`` for options that obstore does not know, and where no credentials are found."""
    await run_blocking(importlib.import_module, "obstore.store", executor=executor)
    obstore = importlib.import_module("obstore")
    common, rest = split_options(config.storage_options)
    client_options = {
        "timeout": f"{config.timeout_s:g}s",
        "connect_timeout": f"{min(config.timeout_s, CONNECT_TIMEOUT_S):g}s",
        "pool_max_idle_per_host": str(config.requests_max),
        "allow_http": str(common.get("endpoint_url", "")).startswith("http://"),
        **rest.pop("client_options", {}),
    }
    # Retries are the manager's: it knows the deadline, and whether the block is still wanted.
    retry_config = {"max_retries": 0, **rest.pop("retry_config", {})}
    provider = None
    if "key" not in common and not common.get("anon"):
        provider = await _chain(common.get("profile"), executor)
        if provider is not None and provider.region:
            common.setdefault("region", provider.region)
    options = {_TO_OBSTORE[name]: value for name, value in common.items() if name in _TO_OBSTORE}
    try:
        store = obstore.store.S3Store(
            config.bucket,
            config={**rest, **options},
            client_options=client_options,
            retry_config=retry_config,
            credential_provider=provider,
        )
    except Exception as error:
        raise _bad_options("obstore", error, secrets) from None
    return ObstoreClient(obstore, store)


async def make_s3fs(config: FsspecConfig, secrets: Secrets, executor: Executor) -> S3fsClient:
    """Raises ``ConfigError`` for options that s3fs does not know."""
    s3fs = await run_blocking(importlib.import_module, "s3fs", executor=executor)
    common, rest = split_options(config.storage_options)
    client_kwargs = {**rest.pop("client_kwargs", {})}
    if "region" in common:
        client_kwargs["region_name"] = common["region"]
    config_kwargs = {
        "connect_timeout": min(config.timeout_s, CONNECT_TIMEOUT_S),
        "read_timeout": config.timeout_s,
        "max_pool_connections": 3 * config.requests_max,
        # Retries are the manager's: it knows the deadline, and whether the block is still wanted.
        "retries": {"mode": "standard", "total_max_attempts": 1},
        # A block's own header vouches for it.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        **rest.pop("config_kwargs", {}),
    }
    options = {name: common[name] for name in _TO_S3FS if name in common}
    legal = inspect.signature(s3fs.S3FileSystem).parameters
    if unknown := sorted(rest.keys() - legal.keys()):
        # It would take any, and ignore it.
        raise ConfigError(f"storage_options: s3fs does not know {', '.join(unknown)} (it knows {', '.join(legal)})")
    try:
        session = importlib.import_module("aiobotocore.session").AioSession(profile=common.get("profile"))
        session.register_component("data_loader", await run_blocking(_service_models, executor=executor))
        filesystem = s3fs.S3FileSystem(
            asynchronous=True,
            skip_instance_cache=True,
            use_listings_cache=False,
            session=session,
            client_kwargs=client_kwargs,
            config_kwargs=config_kwargs,
            **options,
            **rest,
        )
        filesystem.retries = 1
        client = S3fsClient(filesystem, config.bucket)
        await client.connect()
    except Exception as error:
        raise _bad_options("s3fs", error, secrets) from None
    return client


async def create_bucket(config: FsspecConfig, executor: Executor) -> Trouble | None:
    """By s3fs for both clients, since obstore cannot. A bucket that is there meanwhile is fine."""
    in_use = choose_client(config)
    choose_client(config.model_copy(update={"s3_client": "s3fs"}))
    secrets = Secrets(config.storage_options)
    if in_use == "obstore":
        # s3fs would not understand the rest.
        config = config.model_copy(update={"storage_options": split_options(config.storage_options)[0]})
    client = await make_s3fs(config, secrets, executor)
    try:
        await client.create_bucket()
    except FileExistsError:
        return None
    except Exception as error:
        return trouble_of("CREATE", error, secrets)
    finally:
        await client.aclose()
    return None


@functools.cache
def _service_models() -> Any:
    """botocore's description of S3, a megabyte of JSON that would hold up the loop at each open, and at each reset."""
    return importlib.import_module("botocore.session").Session().get_component("data_loader")


class _ChainCredentials:
    """What botocore's chain found: environment, profile, shared files, SSO, web identity, container, instance."""

    def __init__(self, credentials: Any, region: str | None, renews: bool, executor: Executor) -> None:
        self.region = region
        self._credentials = credentials
        self._renews = renews
        self._executor = executor

    async def __call__(self) -> dict[str, Any]:
        """As obstore asks for them. Renewing them is botocore's, and blocks."""
        frozen = await run_blocking(self._credentials.get_frozen_credentials, executor=self._executor)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + CREDENTIALS_TTL if self._renews else None,
        }


async def _chain(profile: str | None, executor: Executor) -> _ChainCredentials | None:
    """None: obstore's own chain suffices (the environment), or is all there is (without botocore)."""
    if profile is None and "AWS_ACCESS_KEY_ID" in os.environ:
        return None
    if importlib.util.find_spec("botocore") is None:
        if profile is None:
            return None
        raise ConfigError("storage_options.profile: reading it needs botocore; pip install 'kvtiering[s3]'")

    def find() -> _ChainCredentials | None:
        session = importlib.import_module("botocore.session").Session(profile=profile)
        credentials = session.get_credentials()
        if credentials is None:
            return None
        renews = hasattr(credentials, "refresh_needed")
        return _ChainCredentials(credentials, session.get_config_variable("region"), renews, executor)

    try:
        found = await run_blocking(find, executor=executor)
    except Exception as error:
        raise ConfigError(
            f"storage_options: the credentials cannot be read ({type(error).__name__}: {error}); give another `profile`,"
            " or `key` and `secret`"
        ) from None
    if found is None:
        raise ConfigError(
            "storage_options: no credentials were found; give `key` and `secret` there, AWS_ACCESS_KEY_ID and"
            " AWS_SECRET_ACCESS_KEY in the environment, or a `profile`; or `anon: true` for a public bucket"
        )
    return found


def _bad_options(client: str, error: Exception, secrets: Secrets) -> ConfigError:
    text = secrets.hide(str(error).partition("\n")[0])
    return ConfigError(f"storage_options: {client} does not take them ({type(error).__name__}: {text})")
