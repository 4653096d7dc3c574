"""The metrics page: read as Prometheus reads it, and compared with ``stats()`` number by number."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.manager.world import BLOCK_BYTES, LAYOUT, backend_of, blank, config, faulty, keys_of, opened, rows
from tiering import BackendError, Group, KVLayout, Outcome, TieringOffloadingManager, block_keys
from tiering.core.state import Counters

LATENCY_EDGES_S = [
    "0.0005",
    "0.001",
    "0.002",
    "0.005",
    "0.01",
    "0.02",
    "0.05",
    "0.1",
    "0.2",
    "0.5",
    "1.0",
    "2.0",
    "5.0",
    "10.0",
    "+Inf",
]
Page = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def page_of(manager: TieringOffloadingManager) -> tuple[Page, dict[str, str]]:
    """Every sample by name and labels, and the type of each family."""

    def fetch() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{manager.metrics_port}/metrics", timeout=20) as answer:
            return str(answer.read().decode())

    samples: Page = {}
    types: dict[str, str] = {}
    for family in text_string_to_metric_families(await asyncio.to_thread(fetch)):
        assert family.name not in types, f"{family.name} comes twice"
        types[family.name] = family.type
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in samples, f"{key} comes twice"
            samples[key] = sample.value
    return samples, types


def numbers(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every number of a stats dict, with the names on the way to it."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from numbers(inner, (*path, str(name)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from numbers(inner, (*path, str(index)))
    elif isinstance(value, bool | int | float):
        yield path, float(value)


def series_of(path: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """By hand, what the documentation promises: the name of the series of a number, and its labels."""
    labels: dict[str, str] = {}
    if path[0] == "tiers":
        labels["tier"] = path[1]
        path = ("tier", *path[2:])
    if path[:2] == ("primary", "pools"):
        labels["pool"] = path[2]
        path = ("primary", "pool", *path[3:])
    for name, label in (("hit_blocks_by_tier", "tier"), ("restore_skipped", "reason"), ("notices", "kind")):
        if path[0] == name:
            labels[label] = path[1]
            path = path[:1]
    if path[:2] == ("tier", "io"):
        rest = {"errors": "error", "breaker_opens": "side"}
        if path[2] == "blocks":
            labels |= {"op": path[3], "outcome": path[4]}
            path = path[:3]
        elif len(path) == 4:
            labels[rest.get(path[2], "op")] = path[3]
            path = path[:3]
    monotonic = path[0] in {*Counters.__dataclass_fields__, "notices"} or path[:2] == ("tier", "io")
    return "kvtiering_" + "_".join(path) + ("_total" if monotonic else ""), labels


@pytest.fixture
def work() -> Any:
    async def do(manager: TieringOffloadingManager, plan: Any) -> None:
        """A little of everything, so that few numbers are zero."""
        keys = keys_of(8)
        plan.outcomes("store", Outcome.failed("injected"), keys=[keys[7]], times=1)
        await manager.store(keys, rows(keys))
        await manager.flush()
        await manager.flush()
        plan.outcomes("load", Outcome.corrupt("injected"), keys=[keys[3]])
        for n in (2, 8, 5):
            await manager.load(keys[:n], blank(n))
        plan.heal()
        async with manager.holding(keys, rows(keys)):
            await manager.match(keys)
        await manager.flush()

    return do


async def test_metrics_that_lie_the_page_is_the_stats(work: Any) -> None:
    """row 35: every number of ``stats()`` is on the page with the same value, and there is nothing else on it."""
    tier, plan = faulty("far")
    async with opened(4, tier, metrics={"prometheus_port": 0}) as manager:
        await work(manager, plan)
        stats = manager.stats()
        samples, types = await page_of(manager)
        assert json.loads(json.dumps(manager.stats())) == json.loads(json.dumps(stats)), "a number moved meanwhile"
        expected: Page = {}
        for path, value in numbers(stats):
            if "latency" in path:
                continue
            name, labels = series_of(path)
            expected[name, frozenset(labels.items())] = value
        for name, gauges in stats["tiers"].items():
            texts = {"kvtiering_tier_state": gauges["state"], "kvtiering_tier_health_state": gauges["health"]["state"]}
            texts |= {f"kvtiering_tier_health_{s}_breaker": gauges["health"][s]["breaker"] for s in ("read", "write")}
            for series, text in texts.items():
                expected[series, frozenset({("tier", name), ("state", text)})] = 1.0
            for op, latency in gauges["io"]["latency"].items():
                base, own = "kvtiering_tier_io_latency_seconds", {("tier", name), ("op", op)}
                for index, edge in enumerate(LATENCY_EDGES_S):
                    key = f"{base}_bucket", frozenset(own | {("le", edge)})
                    expected[key] = float(sum(latency["buckets"][: index + 1]))
                expected[f"{base}_count", frozenset(own)] = float(latency["calls"])
                expected[f"{base}_sum", frozenset(own)] = latency["sum_s"]
        assert samples == expected
        assert types["kvtiering_tier_io_latency_seconds"] == "histogram"
        assert types["kvtiering_query_blocks"] == types["kvtiering_tier_io_calls"] == "counter"
        assert types["kvtiering_tier_used_bytes"] == types["kvtiering_fused"] == "gauge"


async def test_metrics_that_lie_invariants_on_the_page(work: Any) -> None:
    """row 35: as an operator's dashboard adds them up; usage equals what the tier itself holds."""
    tier, plan = faulty("far")
    async with opened(4, tier, metrics={"prometheus_port": 0}) as manager:
        await work(manager, plan)
        samples, _ = await page_of(manager)

        def total(name: str, **labels: str) -> float:
            wanted = set(labels.items())
            return sum(value for (series, found), value in samples.items() if series == name and wanted <= found)

        assert total("kvtiering_query_blocks_total") == 2 + 8 + 5
        assert total("kvtiering_hit_blocks_total") + total("kvtiering_miss_blocks_total") == 2 + 8 + 5
        assert total("kvtiering_hit_blocks_by_tier_total") == total("kvtiering_hit_blocks_total")
        usage = await backend_of(tier).usage()
        assert usage is not None
        assert total("kvtiering_tier_used_bytes", tier="far") == usage.live_bytes > 0
        used = total("kvtiering_primary_slots") - total("kvtiering_primary_free_slots")
        assert total("kvtiering_primary_used_bytes") == used * BLOCK_BYTES
        for op in ("probe", "load", "store", "delete"):
            submitted = total("kvtiering_tier_io_submitted_ops_total", op=op)
            assert submitted == total("kvtiering_tier_io_finished_ops_total", op=op)
            blocks = total("kvtiering_tier_io_blocks_total", op=op)
            assert blocks == total("kvtiering_tier_io_submitted_blocks_total", op=op)
        assert (total("kvtiering_healthy"), total("kvtiering_fused"), total("kvtiering_io_thread_alive")) == (1, 0, 1)


async def test_names_and_labels_are_legal_whatever_tiers_are_called() -> None:
    """The parser above is lenient; a Prometheus server is not."""
    first, _ = faulty("2nd.tier-of_3")
    second, plan = faulty("far")
    layout = KVLayout([Group("full", 4, 4096), Group("full", 4, 1000)], model="hybrid")
    async with opened(40, first, second, layout=layout, metrics={"prometheus_port": 0}) as manager:
        keys = {group: block_keys(list(range(8)), layout, group=group) for group in (0, 1)}
        plan.fail_calls("store", lambda: BackendError("injected"), times=1)
        await manager.store(keys, {0: rows(keys[0]), 1: rows(keys[1], 1000)})
        await manager.flush()
        samples, _ = await page_of(manager)
    for name, labels in samples:
        assert re.fullmatch(r"kvtiering_[a-z][a-z0-9_]*", name)
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label, _ in labels)
    assert {dict(labels)["tier"] for name, labels in samples if name == "kvtiering_tier_used_bytes"} == {
        "2nd.tier-of_3", "far"
    }  # fmt: skip
    assert {dict(labels)["pool"] for name, labels in samples if name == "kvtiering_primary_pool_slots"} == {"0", "1"}


async def test_a_tier_that_is_down_is_seen_on_the_page() -> None:
    tier, plan = faulty("far")
    plan.fail_calls("open", lambda: BackendError("injected"))
    async with opened(4, tier, metrics={"prometheus_port": 0}) as manager:
        samples, _ = await page_of(manager)
        assert samples["kvtiering_healthy", frozenset()] == 0
        assert samples["kvtiering_tier_state", frozenset({("tier", "far"), ("state", "down")})] == 1
        notices = samples["kvtiering_notices_total", frozenset({("kind", "state")})]
        assert notices == manager.stats()["notices"]["state"] > 0
        plan.heal()


async def test_no_page_unless_it_is_asked_for_and_none_after_the_close() -> None:
    async with TieringOffloadingManager(config(4), LAYOUT) as manager:
        assert manager.metrics_port is None
    manager = TieringOffloadingManager(config(4, metrics={"prometheus_port": 0}), LAYOUT)
    async with manager:
        port = manager.metrics_port
        assert port
    with pytest.raises(OSError, match=r"refused"):
        await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/metrics", timeout=5)


async def test_stats_cost_little_however_large_the_primary_tier_is() -> None:
    """They are read every few seconds, under the lock that every lookup needs: no walk over slots or blocks."""
    layout = KVLayout.uniform(model="test", tokens_per_block=1, block_bytes=16)
    cpu_s = []
    for slots in (500, 16_000):
        keys = block_keys(list(range(slots)), layout)
        async with TieringOffloadingManager(config(slots), layout) as manager:
            assert (await manager.store(keys, blank(slots, 16))).stored == slots
            assert manager.stats()["primary"]["ready_blocks"] == slots
            started_s = time.thread_time()
            for _ in range(50):
                manager.stats()
            cpu_s.append(time.thread_time() - started_s)
    small, large = cpu_s
    assert large < 6 * small


async def test_stats_from_any_thread_while_the_manager_works() -> None:
    tier, _ = faulty("far", blocks=256)
    async with opened(8, tier) as manager:
        stop, failures = threading.Event(), []

        def watch() -> None:
            try:
                while not stop.is_set():
                    stats = manager.stats()
                    primary = stats["primary"]
                    assert 0 <= primary["free_slots"] + primary["ready_blocks"] <= primary["slots"]
                    assert stats["hit_blocks"] == sum(stats["hit_blocks_by_tier"].values())
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=watch) for _ in range(2)]
        for thread in threads:
            thread.start()
        for i in range(20):
            keys = keys_of(4, salt=bytes([i]))
            await manager.store(keys, rows(keys))
            await manager.load(keys, blank(4))
        stop.set()
        for thread in threads:
            thread.join()
        assert not failures
