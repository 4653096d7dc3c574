from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from backends.fsspec.config import FsspecConfig
from tests.backends.fsspec import rig

SECRET = "hunter2-hunter2"


def test_the_example_of_the_design_is_legal() -> None:
    given = FsspecConfig.model_validate(
        {
            "type": "fsspec",
            "url": "s3://bucket/kv",
            "storage_options": {"endpoint_url": "https://s3.example", "anon": False},
            "timeout": "5s",
        }
    )
    assert (given.scheme, given.bucket, given.prefix, given.timeout_s) == ("s3", "bucket", "kv", 5.0)
    assert (given.s3_client, given.create_bucket, given.requests_max) == ("auto", False, 32)


@pytest.mark.parametrize(
    "url", ["s3://abc", "s3://abc/", "s3a://a.b-c/x/y/", "memory://x", "file:///a/b", "sftp://h/x"]
)
def test_legal_urls(url: str) -> None:
    assert rig.config(url).url == url


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("bucket/kv", "names no filesystem"),
        ("s3:bucket/kv", "names no filesystem"),
        ("s3://ab/kv", "3 to 63"),
        ("s3:///kv", "3 to 63"),
        ("s3://Bucket/kv", "lower-case"),
        ("file://kv", "absolute"),
        ("file:///", "absolute"),
        ("simplecache::s3://bucket/kv", "chained"),
        (f"s3://key:{SECRET}@bucket/kv", "holds credentials"),
        (f"s3://bucket/kv?secret={SECRET}", "storage_options"),
    ],
)
def test_urls_that_cannot_work_are_named_without_being_shown(url: str, why: str) -> None:
    with pytest.raises(ValidationError, match=why) as raised:
        rig.config(url)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"capacity": "1GiB"}, "lifecycle"),
        ({"policy": "lru"}, "lifecycle"),
        ({"url": "memory://x", "create_bucket": True}, "s3:// alone"),
        ({"url": "file:///x", "s3_client": "s3fs"}, "s3:// alone"),
        ({"requests_max": 0}, "greater than or equal"),
        ({"timeout": 0}, "greater than"),
        ({"storge_options": {}}, "storge_options"),
    ],
)
def test_fields_that_would_be_ignored_are_refused(fields: dict[str, object], why: str) -> None:
    """row 36: nothing is silently dropped."""
    with pytest.raises(ValidationError, match=why):
        FsspecConfig.model_validate({"type": "fsspec", "url": "s3://bucket/kv", **fields})


def test_secrets_are_never_printed() -> None:
    given = rig.config("s3://bucket/kv", storage_options={"secret": SECRET, "client_kwargs": {"x": SECRET}})
    assert SECRET not in f"{given!r} {given}"
    with pytest.raises(ValidationError) as raised:
        rig.config("s3://bucket/kv", storage_options=[SECRET])
    assert SECRET not in str(raised.value)


def test_reading_the_configuration_imports_no_client(root: Path) -> None:
    code = (
        "import sys, backends.fsspec.config, backends.fsspec.backend\n"
        "heavy = {'fsspec', 's3fs', 'obstore', 'aiobotocore', 'botocore', 'aiohttp', 'torch'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert child.stdout.strip() == "[]"
