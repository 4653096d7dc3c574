"""The configuration of an fsspec tier. Imported while YAML is read, so it imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, field_validator, model_validator

from tiering.api import BackendConfig, Seconds

S3_SCHEMES = ("s3", "s3a")

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class FsspecConfig(BackendConfig):
    """``{type: fsspec, url: s3://bucket/prefix, storage_options: {endpoint_url: ..., region: ...}}``.

    The tier is shared: nothing here bounds its bytes. Give the bucket a lifecycle rule, or the directory a quota.
    """

    # What is wrong in `storage_options` is told without the value: it may be a secret.
    model_config = ConfigDict(hide_input_in_errors=True)
    backend: ClassVar[str] = "backends.fsspec.backend:FsspecBackend"

    type: Literal["fsspec"] = "fsspec"
    url: str
    """Where the blocks lie: ``s3://bucket/prefix``, ``file:///path``, ``memory://name``, or another fsspec URL."""
    storage_options: Mapping[str, Any] = Field(default_factory=dict, repr=False)
    """Passed to the filesystem. For S3 these mean the same to both clients: ``endpoint_url``, ``region``, ``key``, ``secret``,
    ``token``, ``profile``, ``anon``. Never printed."""
    s3_client: Literal["auto", "obstore", "s3fs"] = "auto"
    """Who speaks to S3. ``auto``: obstore if it is installed, else s3fs."""
    create_bucket: bool = False
    """Create a missing S3 bucket at open (needs s3fs). Otherwise a missing bucket is an error."""
    requests_max: int = Field(default=32, ge=1, le=512)
    """Most requests of each kind (loads, stores, lookups) under way at a time, each on a connection of its own."""
    timeout_s: Seconds = Field(default=30.0, alias="timeout", gt=0)
    """A request that takes longer is given up; its block is FAILED, and may be tried again."""

    @property
    def scheme(self) -> str:
        return urlsplit(self.url).scheme

    @property
    def bucket(self) -> str:
        """Of an S3 URL."""
        return urlsplit(self.url).netloc

    @property
    def prefix(self) -> str:
        """Of an S3 URL, without slashes at its ends."""
        return urlsplit(self.url).path.strip("/")

    @field_validator("url")
    @classmethod
    def _usable_url(cls, url: str) -> str:
        # The messages do not repeat the URL: it may hold what should not be in it.
        if "::" in url:
            raise ValueError("chained URLs (a::b) are not supported; name the filesystem that holds the blocks")
        parts = urlsplit(url)
        if not parts.scheme or "://" not in url:
            raise ValueError("it names no filesystem; write s3://bucket/prefix, file:///path or another fsspec URL")
        if "@" in parts.netloc:
            raise ValueError("it holds credentials; put them into storage_options or the environment")
        if parts.query or parts.fragment:
            raise ValueError("it holds a query or fragment; put options into storage_options")
        if parts.scheme in S3_SCHEMES and not _BUCKET.fullmatch(parts.netloc):
            raise ValueError("its bucket name is not legal; use 3 to 63 lower-case letters, digits, dots and hyphens")
        if parts.scheme == "file" and (parts.netloc or not parts.path.strip("/")):
            raise ValueError("it names no absolute directory; write file:///path")
        return url

    @model_validator(mode="after")
    def _consistent(self) -> FsspecConfig:
        if self.capacity_bytes is not None or self.policy is not None:
            raise ValueError(
                "`capacity` and `policy` bound a tier of one owner; this one is shared: use the bucket's lifecycle rules"
            )
        if self.scheme not in S3_SCHEMES and (self.create_bucket or self.s3_client != "auto"):
            raise ValueError("`create_bucket` and `s3_client` are for s3:// alone")
        return self
