"""The numbers of ``stats()`` as a Prometheus page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tiering.core.state import Counters
from tiering.errors import ConfigError

PREFIX = "kvtiering"
_MONOTONIC = frozenset(Counters.__dataclass_fields__)


class StatsCollector(Collector):
    """Turns the dict into metrics: nested keys join with ``_``, a tier's numbers carry the label ``tier``.

    Core counters become counters, every other number a gauge, texts such as a state a gauge of 1 with the text as label.
    """

    def __init__(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        stats = dict(self._stats())
        for tier, values in stats.pop("tiers").items():
            _walk(families, ("tier",), values, tier)
        _walk(families, (), stats, None)
        yield from families.values()


def _walk(families: dict[str, Metric], path: tuple[str, ...], values: Mapping[str, Any], tier: str | None) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping):
            _walk(families, (*path, name), value, tier)
        elif isinstance(value, bool | int | float | str):
            _add(families, (*path, name), value, tier)


def _add(families: dict[str, Metric], path: tuple[str, ...], value: float | str, tier: str | None) -> None:
    labels = {} if tier is None else {"tier": tier}
    base = path
    if path[0] in _MONOTONIC and len(path) == 2:  # a counter by tier or by reason
        base, labels = path[:1], {"kind": path[1]}
    if isinstance(value, str):
        labels["text"] = value
        value = 1.0
    name = "_".join((PREFIX, *base))
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    kind = CounterMetricFamily if base[0] in _MONOTONIC else GaugeMetricFamily
    if name not in families:
        families[name] = kind(name, " ".join(base).replace("_", " "), labels=list(labels))
    families[name].add_metric(list(labels.values()), float(value))  # type: ignore[attr-defined]


class MetricsServer:
    """Serves the page until ``close``, on a thread of its own."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]], host: str, port: int) -> None:
        """Raises ``ConfigError`` if the address cannot be taken. ``port`` 0 takes any free one."""
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
