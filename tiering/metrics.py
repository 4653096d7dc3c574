"""The numbers of ``stats()`` as a Prometheus page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tiering.core.state import Counters
from tiering.errors import ConfigError
from tiering.runtime.counters import BUCKETS_S

PREFIX: Final = "kvtiering"
MONOTONIC: Final = frozenset({*Counters.__dataclass_fields__, "notices", "io"})
"""Whatever stands below one of these names only grows."""
LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    "tiers": ("tier",),
    "pools": ("pool",),
    "hit_blocks_by_tier": ("tier",),
    "restore_skipped": ("reason",),
    "notices": ("kind",),
    "submitted_ops": ("op",),
    "submitted_blocks": ("op",),
    "finished_ops": ("op",),
    "blocks": ("op", "outcome"),
    "bytes": ("op",),
    "calls": ("op",),
    "errors": ("error",),
    "breaker_opens": ("side",),
    "latency": ("op",),
}
"""The keys of these mappings are no names: they become label values, one label a level."""
STATES: Final = frozenset({"state", "breaker"})
"""Texts of few values. Other texts are for people, and not on the page."""
NAMES: Final = {"tiers": "tier", "pools": "pool", "latency": "latency_seconds"}


class StatsCollector(Collector):
    """Turns the dict into metrics: nested names join with ``_``; what only grows is a counter, the rest are gauges.

    A state is a gauge of 1 with the state as label, a latency a histogram.
    """

    def __init__(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        page = _Page()
        page.walk((), {}, self._stats())
        yield from page.families.values()


class _Page:
    def __init__(self) -> None:
        self.families: dict[str, Metric] = {}

    def walk(self, path: tuple[str, ...], labels: Mapping[str, str], values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            items = dict(enumerate(value)) if isinstance(value, list) else value
            if name in LABELS and isinstance(items, Mapping):
                self._spread((*path, name), labels, LABELS[name], items)
            else:
                self._put((*path, name), labels, value)

    def _spread(
        self, path: tuple[str, ...], labels: Mapping[str, str], names: tuple[str, ...], items: Mapping[Any, Any]
    ) -> None:
        for key, value in items.items():
            inner = {**labels, names[0]: str(key)}
            if len(names) > 1:
                self._spread(path, inner, names[1:], value)
            else:
                self._put(path, inner, value)

    def _put(self, path: tuple[str, ...], labels: Mapping[str, str], value: object) -> None:
        if isinstance(value, Mapping) and "buckets" in value:
            buckets, total = [], 0
            for edge, calls in zip([*map(str, BUCKETS_S), "+Inf"], value["buckets"], strict=True):
                total += calls
                buckets.append((edge, total))
            self._family(HistogramMetricFamily, path, labels).add_metric(list(labels.values()), buckets, value["sum_s"])
        elif isinstance(value, Mapping):
            self.walk(path, labels, value)
        elif isinstance(value, bool | int | float):
            kind = CounterMetricFamily if MONOTONIC.intersection(path) else GaugeMetricFamily
            self._family(kind, path, labels).add_metric(list(labels.values()), float(value))
        elif isinstance(value, str) and path[-1] in STATES:
            labels = {**labels, "state": value}
            self._family(GaugeMetricFamily, path, labels).add_metric(list(labels.values()), 1.0)

    def _family(self, kind: type[Any], path: Iterable[str], labels: Mapping[str, str]) -> Any:
        words = [NAMES.get(word, word) for word in path]
        name = "_".join((PREFIX, *words))
        if name not in self.families:
            self.families[name] = kind(name, " ".join(words).replace("_", " "), labels=list(labels))
        return self.families[name]


class MetricsServer:
    """Serves the page until ``close``, on a thread of its own."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]], host: str, port: int) -> None:
        """Raises ``ConfigError`` if the address cannot be taken. ``port`` 0 takes any free one. ``stats``: any thread."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(StatsCollector(stats))
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigError(f"metrics: cannot listen on {host}:{port}: {error.strerror or error}") from error
        self.port = int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
