"""``manifest.json``: what a directory is, for later versions of this backend and for people. Small, written at open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiofiles
import aiofiles.os

from backends.nvme.limits import MANIFEST_BYTES_MAX

MANIFEST = "manifest.json"
MANIFEST_TEMP = "manifest.json.tmp"
FORMAT: Final = 1
_FIELD_CHARACTERS_MAX: Final = 256


@dataclass(slots=True)
class Manifest:
    """``namespaces`` maps the hex digest of each namespace seen, oldest first, to the fields behind it."""

    format: int = FORMAT
    namespaces: dict[str, dict[str, str]] = field(default_factory=dict)
    slot_bytes: list[int] = field(default_factory=list)

    def note(self, digest: bytes, fields: Mapping[str, str]) -> None:
        """The namespace is in use now. Values are cut; they are for people, the digest alone decides."""
        self.namespaces.pop(digest.hex(), None)
        self.namespaces[digest.hex()] = {
            name[:_FIELD_CHARACTERS_MAX]: value[:_FIELD_CHARACTERS_MAX] for name, value in fields.items()
        }

    def to_json(self) -> str:
        """At most ``MANIFEST_BYTES_MAX`` bytes: the namespaces longest out of use are left out where they are too many."""
        names = dict(self.namespaces)
        while True:
            text = json.dumps({"format": self.format, "slot_bytes": self.slot_bytes, "namespaces": names}, indent=1)
            if len(text) <= MANIFEST_BYTES_MAX or not names:
                return text
            names.pop(next(iter(names)))


class UnreadableManifest(Exception):
    """The file is there and is no manifest."""


async def read_manifest(root: Path, executor: Executor) -> Manifest | None:
    """None if there is none. Raises ``OSError``, ``UnreadableManifest``."""
    try:
        async with aiofiles.open(root / MANIFEST, encoding="utf-8", executor=executor) as file:
            text = await file.read(MANIFEST_BYTES_MAX)
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise UnreadableManifest(str(error)) from error
    try:
        return _parse(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableManifest(f"{type(error).__name__}: {error}") from error


def _parse(raw: Any) -> Manifest:
    namespaces = {
        str(digest): {str(name): str(value) for name, value in fields.items()}
        for digest, fields in raw["namespaces"].items()
    }
    return Manifest(int(raw["format"]), namespaces, [int(size) for size in raw["slot_bytes"]])


async def write_manifest(root: Path, manifest: Manifest, executor: Executor) -> None:
    """Atomically. Raises ``OSError``."""
    async with aiofiles.open(root / MANIFEST_TEMP, "w", encoding="utf-8", executor=executor) as file:
        await file.write(manifest.to_json())
    await aiofiles.os.replace(root / MANIFEST_TEMP, root / MANIFEST, executor=executor)
