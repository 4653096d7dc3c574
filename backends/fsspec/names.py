"""Where a block lies: ``root/namespace/hh/key``, in hexadecimal, which every filesystem takes."""

from __future__ import annotations

from dataclasses import dataclass

from tiering.api import BlockKey, Namespace


@dataclass(frozen=True, slots=True)
class Names:
    """Paths of one namespace's objects. ``root`` has no slash at its end and may be empty."""

    root: str
    namespace: str

    @staticmethod
    def of(root: str, namespace: Namespace) -> Names:
        return Names(root.rstrip("/"), namespace.digest.hex())

    @property
    def directory(self) -> str:
        return f"{self.root}/{self.namespace}" if self.root else self.namespace

    @property
    def temporary(self) -> str:
        """Where objects are written that are moved to their place when they are whole."""
        return f"{self.directory}/tmp"

    def block(self, key: BlockKey) -> str:
        # The directory in between keeps listings of a filesystem short.
        name = key.hex()
        return f"{self.directory}/{name[:2]}/{name}"
