"""What travels between the two connectors of one engine: our values in vLLM's envelopes."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from tiering.connectors.wire import ConnectorMetadata, WorkerOutput


@dataclass
class TieringMetadata(KVConnectorMetadata):
    """Scheduler to workers, once a step."""

    step: ConnectorMetadata = field(default_factory=ConnectorMetadata)


@dataclass
class TieringWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler: how jobs ended. vLLM merges the ranks' messages of a step."""

    output: WorkerOutput

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, TieringWorkerMetadata)
        return TieringWorkerMetadata(self.output.merge(other.output))
