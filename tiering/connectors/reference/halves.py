"""What the engine calls of the connector's two halves, in the order in which a step calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tiering.connectors.requests import EngineRequest, RequestLimits, StepOutput
from tiering.connectors.wire import ConnectorMetadata, WorkerOutput


class SchedulerHalf(Protocol):
    """In the engine's scheduler: ``tiering.connectors.OffloadingConnectorScheduler``."""

    def on_new_request(self, request: EngineRequest, limits: RequestLimits | None = None) -> None: ...

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]: ...

    def update_state_after_alloc(
        self, request: EngineRequest, block_ids: tuple[Sequence[int], ...], num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, step: StepOutput) -> ConnectorMetadata: ...

    def update_connector_output(self, output: WorkerOutput) -> None: ...

    def request_finished(self, request: EngineRequest, block_ids: tuple[Sequence[int], ...]) -> tuple[bool, None]: ...

    def has_pending_work(self) -> bool: ...

    def reset(self) -> None: ...


class WorkerHalf(Protocol):
    """One a rank, beside the model: ``tiering.connectors.OffloadingConnectorWorker``."""

    def handle_preemptions(self, metadata: ConnectorMetadata) -> None: ...

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None: ...

    def start_load_kv(self) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self) -> tuple[set[str], set[str]]: ...

    def take_output(self) -> WorkerOutput | None: ...

    def clear_connector_metadata(self) -> None: ...
