"""What the engine is put through."""

import importlib

MODULES = ("reuse", "pressure", "faults", "lifetime", "restore", "storms")


def register_all() -> None:
    """Import every module here: each registers its scenarios."""
    for name in MODULES:
        importlib.import_module(f"{__name__}.{name}")
