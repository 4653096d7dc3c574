"""``tiering inspect``: what a tier holds, namespace by namespace, and whether it is whole."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from tiering.api import Backend, InspectedBlock, Outcome
from tiering.cli.output import table
from tiering.cli.tiers import make_backend, tier_of
from tiering.config import TieringConfig
from tiering.errors import BackendError, ConfigError
from tiering.support.units import format_bytes

BAD_BLOCKS_SHOWN_MAX: Final = 100
"""Most damaged blocks named; all are counted."""


def inspect(path: Path, tier: str, *, verify: bool) -> dict[str, Any]:
    """Look at every block. ``ok`` is false if ``verify`` found one that is not whole. Changes nothing.

    Raises ``ConfigError`` if there is no such tier, it is in use, or its kind cannot be looked at.
    """
    chosen = tier_of(path, TieringConfig.from_yaml(path), tier)
    try:
        found = asyncio.run(_inspect(make_backend(chosen), verify))
    except NotImplementedError:
        raise ConfigError(
            f"{path}: tier {tier!r}: a tier of type {chosen.type!r} keeps nothing that could be looked at from outside"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: tier {tier!r}: {error}") from error
    except OSError as error:
        raise BackendError(str(error), tier=tier, op="inspect") from error
    return {"config": str(path), "tier": tier, "type": chosen.type, **found}


async def _inspect(backend: Backend, verify: bool) -> dict[str, Any]:
    namespaces: dict[str, dict[str, Any]] = {}
    bad: list[dict[str, str]] = []
    bad_blocks = 0
    async for batch in backend.inspect(verify=verify):
        for block in batch:
            _count(namespaces, block)
            if block.outcome is not None and not block.outcome.ok:
                bad_blocks += 1
                if len(bad) < BAD_BLOCKS_SHOWN_MAX:
                    bad.append(_bad(block, block.outcome))
    return {
        "ok": bad_blocks == 0,
        "verified": verify,
        "blocks": sum(space["blocks"] for space in namespaces.values()),
        "stored_bytes": sum(space["stored_bytes"] for space in namespaces.values()),
        "namespaces": list(namespaces.values()),
        "bad_blocks": bad_blocks,
        "bad": bad,
    }


def _bad(block: InspectedBlock, outcome: Outcome) -> dict[str, str]:
    why = f"{outcome.code.value}: {outcome.why}" if outcome.why else outcome.code.value
    return {"namespace": block.namespace_digest.hex(), "key": block.key.hex(), "place": block.place, "why": why}


def _count(namespaces: dict[str, dict[str, Any]], block: InspectedBlock) -> None:
    digest = block.namespace_digest.hex()
    fresh = {"digest": digest, "fields": dict(block.namespace_fields), "blocks": 0, "stored_bytes": 0, "roots": 0}
    space = namespaces.setdefault(digest, fresh)
    space["blocks"] += 1
    space["stored_bytes"] += block.stored_bytes
    space["roots"] += block.parent is None


def show(console: Console, result: dict[str, Any]) -> None:
    if not result["blocks"]:
        console.print(f"tier {result['tier']} holds no blocks")
        return
    title = f"tier {result['tier']}: {result['blocks']:,} blocks, {format_bytes(result['stored_bytes'])}"
    console.print(title, soft_wrap=True)
    rows = table("namespace", "model", "revision", "dtype", "epoch", "blocks>", "roots>", "size>")
    for space in result["namespaces"]:
        fields = [space["fields"].get(name, "?") for name in ("model", "revision", "dtype", "epoch")]
        counts = (f"{space['blocks']:,}", f"{space['roots']:,}", format_bytes(space["stored_bytes"]))
        rows.add_row(space["digest"][:8], *fields, *counts)
    console.print(rows)
    if result["verified"]:
        console.print(f"verified: {result['bad_blocks']} of {result['blocks']:,} blocks are not whole")
    for item in result["bad"]:
        console.print(f"  {item['place']}: key {item['key']}: {item['why']}", soft_wrap=True)
    if result["bad_blocks"] > len(result["bad"]):
        console.print(f"  and {result['bad_blocks'] - len(result['bad']):,} more")
