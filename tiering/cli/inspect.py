"""``tiering inspect``: what a tier holds, namespace by namespace, and whether it is whole."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tiering import registry
from tiering.api import Backend, InspectedBlock
from tiering.config import TieringConfig
from tiering.errors import ConfigError
from tiering.registry import did_you_mean
from tiering.support.units import format_bytes

BAD_BLOCKS_SHOWN_MAX = 100


def inspect(path: Path, tier: str, *, verify: bool) -> dict[str, Any]:
    """Look at every block. ``ok`` is false if ``verify`` found one that is not whole. Changes nothing."""
    config = TieringConfig.from_yaml(path)
    if tier not in config.tier_names:
        known = ", ".join(config.tier_names) or "none"
        raise ConfigError(f"{path}: no tier is named {tier!r}{did_you_mean(tier, config.tier_names)}; tiers: {known}")
    chosen = config.tiers[config.tier_names.index(tier)]
    backend: Backend = registry.backend_class(chosen)(chosen)  # type: ignore[call-arg]
    return {"config": str(path), "tier": tier, "type": chosen.type, **asyncio.run(_inspect(backend, tier, verify))}


async def _inspect(backend: Backend, tier: str, verify: bool) -> dict[str, Any]:
    namespaces: dict[str, dict[str, Any]] = {}
    bad: list[dict[str, str]] = []
    bad_blocks = 0
    try:
        async for batch in backend.inspect(verify=verify):
            for block in batch:
                _count(namespaces, block)
                if block.outcome is not None and not block.outcome.ok:
                    bad_blocks += 1
                    if len(bad) < BAD_BLOCKS_SHOWN_MAX:
                        why = f"{block.outcome.code.value}: {block.outcome.why}"
                        bad.append({"key": block.key.hex(), "place": block.place, "why": why})
    except NotImplementedError:
        raise ConfigError(f"tier {tier!r}: blocks of a {type(backend).__name__} cannot be listed") from None
    return {
        "ok": bad_blocks == 0,
        "verified": verify,
        "blocks": sum(space["blocks"] for space in namespaces.values()),
        "stored_bytes": sum(space["stored_bytes"] for space in namespaces.values()),
        "namespaces": list(namespaces.values()),
        "bad_blocks": bad_blocks,
        "bad": bad,
    }


def _count(namespaces: dict[str, dict[str, Any]], block: InspectedBlock) -> None:
    digest = block.namespace_digest.hex()
    fresh = {"digest": digest, "fields": dict(block.namespace_fields), "blocks": 0, "stored_bytes": 0, "roots": 0}
    space = namespaces.setdefault(digest, fresh)
    space["blocks"] += 1
    space["stored_bytes"] += block.stored_bytes
    space["roots"] += block.parent is None


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title=f"tier {result['tier']}: {result['blocks']:,} blocks, {format_bytes(result['stored_bytes'])}")
    for column in ("namespace", "model", "revision", "dtype", "epoch"):
        table.add_column(column)
    for column in ("blocks", "prefix roots", "size"):
        table.add_column(column, justify="right")
    for space in result["namespaces"]:
        fields = [space["fields"].get(name, "?") for name in ("model", "revision", "dtype", "epoch")]
        counts = (f"{space['blocks']:,}", f"{space['roots']:,}", format_bytes(space["stored_bytes"]))
        table.add_row(space["digest"][:12], *fields, *counts)
    console.print(table)
    if result["verified"]:
        console.print(f"verified: {result['bad_blocks']} of {result['blocks']:,} blocks are not whole")
    for item in result["bad"]:
        console.print(f"  {item['place']} {item['key']}: {item['why']}", highlight=False)
