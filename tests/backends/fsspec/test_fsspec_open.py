"""What an operator sees at open: each mistake is named with its remedy, and no message or log line holds a secret."""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from pathlib import Path

import pytest

from backends.fsspec.backend import FsspecBackend
from backends.fsspec.config import FsspecConfig
from tests.backends.fsspec import rig
from tests.backends.fsspec.rig import FAILED, OK, codes, key_of
from tests.servers.seaweed import ACCESS_KEY, READER_ACCESS_KEY, READER_SECRET_KEY, SECRET_KEY, SeaweedServer
from tiering.api import HEADER_BYTES, BackendError, ConfigError

KEY = key_of(1)
WRONG_SECRET = "a-wrong-secret-that-nobody-may-see"


@pytest.fixture(params=rig.CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def no_credentials_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the machine itself would give: nothing, until a test gives it."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


def without_keys(s3: SeaweedServer, client: str, **options: object) -> FsspecConfig:
    return rig.config(
        f"s3://{rig.BUCKET}/open",
        s3_client=client,
        storage_options={"endpoint_url": s3.endpoint_url, "region": "us-east-1", **options},
    )


async def open_error(given: FsspecConfig) -> Exception:
    """What ``open`` raises; closed afterwards, as the manager does."""
    backend = FsspecBackend(given)
    try:
        with pytest.raises((ConfigError, BackendError)) as raised:
            await backend.open(rig.namespace())
    finally:
        await backend.aclose(5)
    return raised.value


async def works(given: FsspecConfig) -> bool:
    async with rig.opened(given) as backend:
        stored = codes(await rig.store(backend, [KEY]))
        return stored == codes(await rig.load(backend, [KEY])) == [OK]


async def test_a_missing_bucket_is_named_and_can_be_asked_for(s3: SeaweedServer, client: str) -> None:
    options = s3.storage_options()
    url = f"s3://made-by-{client}/kv"
    error = await open_error(rig.config(url, s3_client=client, storage_options=options))
    assert isinstance(error, ConfigError)
    assert f"made-by-{client}" in str(error)
    assert "NoSuchBucket" in str(error)
    assert "create_bucket: true" in str(error)
    assert await works(rig.config(url, s3_client=client, storage_options=options, create_bucket=True))
    assert await works(rig.config(url, s3_client=client, storage_options=options, create_bucket=True)), "it is there"


async def test_two_processes_may_create_the_bucket_at_a_time(s3: SeaweedServer, client: str) -> None:
    given = rig.config(
        f"s3://contended-{client}/kv", s3_client=client, storage_options=s3.storage_options(), create_bucket=True
    )
    assert all(await asyncio.gather(works(given), works(given)))


@pytest.mark.parametrize(
    ("key", "secret", "code"),
    [(ACCESS_KEY, WRONG_SECRET, "SignatureDoesNotMatch"), ("nobody-known-here", WRONG_SECRET, "InvalidAccessKeyId")],
)
async def test_wrong_credentials_are_a_clear_error_and_never_shown(
    s3: SeaweedServer, client: str, caplog: pytest.LogCaptureFixture, key: str, secret: str, code: str
) -> None:
    given = without_keys(s3, client, key=key, secret=secret)
    with caplog.at_level(logging.DEBUG):
        error = await open_error(given)
    assert isinstance(error, ConfigError)
    assert code in str(error)
    assert "s3:ListBucket" in str(error)
    said = "".join(traceback.format_exception(error)) + repr(given) + str(given) + caplog.text
    assert WRONG_SECRET not in said


async def test_credentials_that_may_only_read_serve_loads(s3: SeaweedServer, client: str) -> None:
    assert await works(without_keys(s3, client, key=ACCESS_KEY, secret=SECRET_KEY))
    async with rig.opened(without_keys(s3, client, key=READER_ACCESS_KEY, secret=READER_SECRET_KEY)) as backend:
        assert codes(await rig.load(backend, [KEY])) == [OK]
        (refused,) = await rig.store(backend, [KEY])
        assert (refused.code, refused.retryable) == (FAILED, False)
        assert "AccessDenied" in refused.why


async def test_no_credentials_anywhere_is_a_clear_error(s3: SeaweedServer, client: str) -> None:
    error = await open_error(without_keys(s3, client))
    assert isinstance(error, ConfigError)
    assert "credentials" in str(error)


async def test_credentials_come_from_the_environment(
    s3: SeaweedServer, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    assert await works(without_keys(s3, client))


async def test_credentials_come_from_the_shared_files_and_their_profiles(
    s3: SeaweedServer, client: str, tmp_path: Path
) -> None:
    text = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    (tmp_path / "credentials").write_text(f"[default]\n{text}[other]\n{text}")
    assert await works(without_keys(s3, client))
    assert await works(without_keys(s3, client, profile="other"))
    error = await open_error(without_keys(s3, client, profile="nobody"))
    assert isinstance(error, ConfigError)
    assert "nobody" in str(error)


async def test_the_endpoint_and_the_region_come_from_the_environment_too(
    s3: SeaweedServer, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    options = {"key": ACCESS_KEY, "secret": SECRET_KEY}
    assert await works(rig.config(f"s3://{rig.BUCKET}/open", s3_client=client, storage_options=options))


@pytest.mark.parametrize(
    "options",
    [
        {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY, "endpoint": "{url}", "region": "r"},
        {"key": ACCESS_KEY, "secret": SECRET_KEY, "client_kwargs": {"endpoint_url": "{url}", "region_name": "r"}},
    ],
)
async def test_both_clients_understand_each_others_words(
    s3: SeaweedServer, client: str, options: dict[str, object]
) -> None:
    def fill(value: object) -> object:
        if isinstance(value, dict):
            return {name: fill(item) for name, item in value.items()}
        return str(value).replace("{url}", s3.endpoint_url)

    filled = {name: fill(value) for name, value in options.items()}
    assert await works(rig.config(f"s3://{rig.BUCKET}/open", s3_client=client, storage_options=filled))


async def test_an_option_that_the_client_does_not_know_is_named(s3: SeaweedServer, client: str) -> None:
    error = await open_error(without_keys(s3, client, key=ACCESS_KEY, secret=SECRET_KEY, no_such_option="x"))
    assert isinstance(error, ConfigError)
    assert "storage_options" in str(error)
    assert "no_such_option" in str(error)
    assert SECRET_KEY not in "".join(traceback.format_exception(error))


async def test_a_block_above_one_put_is_refused_at_open(s3: SeaweedServer, client: str) -> None:
    limit = 5 * 1024**3 - HEADER_BYTES
    backend = FsspecBackend(rig.s3_config("open", s3_client=client))
    assert backend.capabilities.value_bytes_max == limit
    with pytest.raises(ConfigError, match=str(limit)):
        await backend.open(rig.namespace(limit + 1))
    await backend.aclose(5)


async def test_a_cancelled_open_leaves_nothing(s3: SeaweedServer, client: str) -> None:
    for turns in (0, 1, 2, 3, 5, 8, 13, 21):
        backend = FsspecBackend(rig.s3_config("open", s3_client=client))
        opening = asyncio.create_task(backend.open(rig.namespace()))
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait((opening,))
        await backend.aclose(5)
        assert opening.cancelled() or opening.exception() is None
    assert [task.get_name() for task in asyncio.all_tasks()] == [asyncio.current_task().get_name()]  # type: ignore[union-attr]


async def test_a_process_may_end_as_soon_as_the_tier_is_closed(s3: SeaweedServer, root: Path) -> None:
    """obstore's threads must be out of the interpreter by then, or they abort it."""
    code = (
        "import asyncio, sys\n"
        "from tests.backends.fsspec import rig\n"
        "async def main():\n"
        "    async with rig.opened(rig.s3_config('end', s3_client='obstore')) as backend:\n"
        "        await rig.load(backend, [rig.key_of(n) for n in range(32)])\n"
        "asyncio.run(main())\n"
    )
    children = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=root, stderr=asyncio.subprocess.PIPE)
        for _ in range(4)
    ]
    ends = [(await child.communicate(), child.returncode) for child in children]
    assert [status for _, status in ends] == [0] * 4, ends
