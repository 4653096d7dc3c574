"""Door (c): ``TieringConnector``, our own scheduler and worker halves in vLLM's place for a connector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from tiering.connectors.scheduler import OffloadingConnectorScheduler
from tiering.connectors.vllm.layout import blocks_of, read_config
from tiering.connectors.vllm.managers import open_manager, reset
from tiering.connectors.vllm.messages import TieringMetadata, TieringWorkerMetadata
from tiering.connectors.vllm.metrics import COUNTERS, TieringPromMetrics, TieringStats
from tiering.connectors.vllm.pages import device_blocks
from tiering.connectors.vllm.pauses import pause
from tiering.connectors.vllm.steps import limits_of, step_of, tables_of
from tiering.connectors.wire import WorkerOutput
from tiering.connectors.worker import OffloadingConnectorWorker
from tiering.manager import TieringOffloadingManager
from tiering.memory.transfer.blocks import Placement

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class TieringConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM makes two of it: one in the scheduler's process, one in each worker's.

    ``--kv-transfer-config '{"kv_connector": "TieringConnector", "kv_connector_module_path": "tiering.connectors.vllm",
    "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"tiering_config":
    "tiering.yaml"}}'``
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._blocks = blocks_of(vllm_config, kv_cache_config)
        self._scheduler: OffloadingConnectorScheduler | None = None
        self._worker: OffloadingConnectorWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            extra = self._kv_transfer_config.kv_connector_extra_config
            self._manager = open_manager(read_config(extra), self._blocks.layout)
            self._scheduler = OffloadingConnectorScheduler(
                self._manager,
                gpu_tokens_per_block=self._blocks.gpu_tokens_per_block,
                tokens_per_hash=self._blocks.tokens_per_hash,
                world_size=self._blocks.ranks,
                prompt_only=bool(extra.get("offload_prompt_only", False)),
            )
            self._resumed_hit_tokens = 0
            self._told: dict[str, int] = {}
            """Counters as of the last report to vLLM."""
        else:
            self._worker = OffloadingConnectorWorker(rank=vllm_config.parallel_config.rank)
            self._output: WorkerOutput | None = None
            """Of this step, until vLLM has fetched all parts of it."""
            self._loading: dict[str, frozenset[int]] = {}
            """GPU blocks that a request's load is to fill. Kept where vLLM takes failures by request."""

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that is not stored is a later miss, and no reason to compute a request again."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Layers first: a block of a layer is one page, and pages of neighbouring blocks touch."""
        return "LBHNC"

    # -- the scheduler's process --------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> OffloadingConnectorScheduler:
        """The scheduler's half."""
        assert self._scheduler is not None, "this is a worker's connector"
        return self._scheduler

    @property
    def manager(self) -> TieringOffloadingManager:
        """The tiers; in the scheduler's process alone."""
        return self._manager

    def on_new_request(self, request: Request) -> None:
        self.scheduler.on_new_request(request, limits_of(request))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.skip_reading_prefix_cache:
            return 0, False
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        table = tables_of(blocks.get_block_ids(), self._blocks)
        self.scheduler.update_state_after_alloc(request, table, num_external_tokens)
        if request.num_preemptions:
            self._resumed_hit_tokens += num_external_tokens

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if not scheduler_output.total_num_scheduled_tokens:
            pause()
        return TieringMetadata(self.scheduler.build_connector_meta(step_of(scheduler_output, self._blocks)))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, TieringWorkerMetadata):
            self.scheduler.update_connector_output(meta.output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.request_finished(request, tables_of(block_ids, self._blocks))

    def has_pending_push_work(self) -> bool:
        return self.scheduler.has_pending_work()

    def reset_cache(self) -> bool | None:
        self.scheduler.reset()
        reset(self._manager)
        return True

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler is None:
            return None
        counters = self._scheduler.stats() | {
            "resumed_hit_tokens": self._resumed_hit_tokens,
            "restored_blocks": self._manager.organs.core.counters.restored_blocks,
        }
        now = {name: value for name, value in counters.items() if name in COUNTERS}
        stats = TieringStats({name: value - self._told.get(name, 0) for name, value in now.items()})
        self._told = now
        return None if stats.is_empty() else stats

    # -- a worker's process -------------------------------------------------------------------------------------------

    @property
    def worker(self) -> OffloadingConnectorWorker:
        """The worker's half."""
        assert self._worker is not None, "this is the scheduler's connector"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        blocks = device_blocks(kv_caches, self._kv_cache_config, self._blocks)
        spans = (self._blocks.blocks_per_slot,) * len(self._blocks.group_ids)
        self.worker.register_kv_caches(blocks, Placement(spans, self._blocks.ranks))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, TieringMetadata)
        self.worker.handle_preemptions(kv_connector_metadata.step)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, TieringMetadata)
        self.worker.bind_connector_metadata(connector_metadata.step)
        if len(self._blocks.group_ids) > 1:
            for job in connector_metadata.step.load_jobs.values():
                ids = frozenset(job.spec.destination.block_ids) | frozenset(job.missing_block_ids)
                self._loading[job.request_id] = ids

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.worker.clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.start_load_kv()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a load is whole before its request runs."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are stored whole, in the next step."""

    def wait_for_save(self) -> None:
        self.worker.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        finished = self.worker.get_finished()
        self._output = self.worker.take_output()
        return finished

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if len(self._blocks.group_ids) > 1:
            invalid = self._output.invalid_block_ids if self._output is not None else frozenset()
            for request_id in results.finished_recving:
                if not self._loading.pop(request_id, frozenset()).isdisjoint(invalid):
                    results.failed_recving.add(request_id)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        if self._output is None or len(self._blocks.group_ids) > 1:
            return set()
        return set(self._output.invalid_block_ids)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        output, self._output = self._output, None
        return None if output is None else TieringWorkerMetadata(output)

    # -- both ---------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.shutdown()
            self._manager.sync.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return TieringStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return TieringPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
