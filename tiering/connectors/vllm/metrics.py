"""Counters of the connector on vLLM's own metrics page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS: Final[Mapping[str, str]] = {
    "query_tokens": "Prompt tokens that vLLM's own prefix cache lacked and the tiers were asked for.",
    "hit_tokens": "Of these, tokens that the tiers were to give.",
    "resumed_hit_tokens": "Of these, for requests that had been preempted: vLLM does not count those as hits.",
    "stored_blocks": "Blocks copied from the device to CPU memory.",
    "loaded_blocks": "Blocks copied from CPU memory to the device.",
    "restored_blocks": "Blocks copied to CPU memory again while the device still held them.",
    "short_tokens": "Tokens that were promised and had to be computed.",
    "failed_store_jobs": "Copies to CPU memory that failed.",
    "failed_load_jobs": "Copies to the device that failed.",
}
"""Names in the scheduler half's ``stats()``, and what they count. vLLM shows them as ``vllm:tiering_<name>_total``."""


class TieringStats(KVConnectorStats):
    """What was counted since the last report."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        names = [*self.data, *(name for name in other.data if name not in self.data)]
        return TieringStats({name: self.data.get(name, 0) + other.data.get(name, 0) for name in names})

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class TieringPromMetrics(KVConnectorPromMetrics):
    """The same as Prometheus counters, one an engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: {engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()}
            for name, text in COUNTERS.items()
            for counter in [self._counter_cls(name=f"vllm:tiering_{name}", documentation=text, labelnames=labelnames)]
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, counters in self._counters.items():
            if amount := transfer_stats_data.get(name, 0):
                counters[engine_idx].inc(amount)
