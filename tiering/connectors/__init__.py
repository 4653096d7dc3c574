"""What an engine drives: the scheduler's half, the worker's half, and the values that travel between them."""

from tiering.connectors.requests import EngineRequest, RequestLimits, ScheduledRequest, StepOutput
from tiering.connectors.scheduler import OffloadingConnectorScheduler
from tiering.connectors.wire import ConnectorMetadata, LoadJob, StoreJob, WorkerOutput
from tiering.connectors.worker import OffloadingConnectorWorker

__all__ = [
    "ConnectorMetadata",
    "EngineRequest",
    "LoadJob",
    "OffloadingConnectorScheduler",
    "OffloadingConnectorWorker",
    "RequestLimits",
    "ScheduledRequest",
    "StepOutput",
    "StoreJob",
    "WorkerOutput",
]
