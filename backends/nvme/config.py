"""The configuration of an NVMe tier. Imported while YAML is read, so it imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from backends.nvme.limits import CAPACITY_BYTES_MIN
from tiering.api import BackendConfig, ByteCount


class NvmeConfig(BackendConfig):
    """``{type: nvme, path: /mnt/nvme/kv, capacity: 200GiB}``."""

    backend: ClassVar[str] = "backends.nvme.backend:NvmeBackend"

    type: Literal["nvme"] = "nvme"
    path: Path
    """A directory on the device; made if missing. Each owner has a subdirectory of it."""
    capacity_bytes: ByteCount = Field(alias="capacity")
    """Most bytes that the owner's subdirectory may occupy on the device, index and metadata included."""
    owner: str = Field(default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the subdirectory. Two engines may share ``path``, each with an ``owner`` and a capacity of its own."""
    sync: Literal["none", "batch"] = "none"
    """``batch``: a store is acknowledged once it would survive a power loss. A killed process loses nothing either way."""
    recover: Literal["none", "quiet", "strict"] = "quiet"
    """At open, ``none`` removes what is there, ``quiet`` drops and counts bad records, ``strict`` refuses to open on one."""
    threads: int = Field(default=4, ge=1, le=16)
    o_direct: bool = True
    """Bypass the page cache. Filesystems that refuse it are used through the cache, with one warning."""

    @field_validator("capacity_bytes")
    @classmethod
    def _enough(cls, value: int) -> int:
        if value < CAPACITY_BYTES_MIN:
            raise ValueError(
                f"{value} bytes hold no useful number of blocks; give at least {CAPACITY_BYTES_MIN} (1MiB)"
            )
        return value
