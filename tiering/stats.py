"""``stats()``: one plain dict of all numbers. The metrics page is made from it, so the two cannot disagree."""

from __future__ import annotations

from typing import Any

from tiering.build import Parts


def collect_stats(parts: Parts) -> dict[str, Any]:
    """Counters are monotonic since open; gauges are of this moment. Sizes in bytes, times in seconds. Any thread."""
    core = parts.gate.snapshot()
    health = parts.driver.health()
    counters = parts.driver.counters()
    fused, alive = parts.gate.fused, parts.io.alive
    pools = core["pools"]
    tiers = {name: {**gauges, "health": health[name], "io": counters[name]} for name, gauges in core["tiers"].items()}
    return {
        "healthy": alive and not fused and all(tier["state"] == "up" for tier in tiers.values()),
        "fused": bool(fused),
        "fused_reason": fused,
        "io_thread_alive": alive,
        "primary": {
            "capacity_bytes": parts.arena.capacity_bytes,
            "used_bytes": sum((p["slots"] - p["free_slots"]) * p["payload_bytes"] for p in pools),
            "huge_pages": parts.arena.huge_pages,
            "slots": sum(p["slots"] for p in pools),
            "free_slots": sum(p["free_slots"] for p in pools),
            "busy_slots": sum(p["busy_slots"] for p in pools),
            "ready_blocks": sum(p["ready_blocks"] for p in pools),
            "leases": sum(p["leases"] for p in pools),
            "pools": pools,
        },
        "tiers": tiers,
        "known_blocks": core["known_blocks"],
        "open_loads": core["open_loads"],
        "open_stores": core["open_stores"],
        "open_ops": core["open_ops"],
        "holds": core["holds"],
        "holes": sum(p["holes"] for p in pools),
        "hole_tokens": sum(p["hole_tokens"] for p in pools),
        "notices": dict(parts.notices),
        **core["counters"],
    }
