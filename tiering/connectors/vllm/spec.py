"""Door (b): ``TieringSpec`` under vLLM's own ``OffloadingConnector``."""

from __future__ import annotations

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingSpec, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig

from tiering.connectors.vllm.arena import address_of
from tiering.connectors.vllm.layout import blocks_of_offloading, read_config
from tiering.connectors.vllm.managers import open_manager
from tiering.connectors.vllm.offloading_manager import TieringSpecManager
from tiering.connectors.vllm.offloading_worker import TieringSpecWorker


class TieringSpec(OffloadingSpec):
    """Our manager decides what is kept where; vLLM's scheduler half decides what is stored and loaded when.

    ``kv_connector_extra_config``: ``{"spec_name": "TieringSpec", "spec_module_path": "tiering.connectors.vllm",
    "tiering_config": "tiering.yaml"}``.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._tiering = read_config(config.extra_config)
        self._blocks = blocks_of_offloading(config)
        self._manager: TieringSpecManager | None = None

    def get_manager(self) -> OffloadingManager:
        """In the scheduler's process; opens the tiers."""
        if self._manager is None:
            manager = open_manager(self._tiering, self._blocks.layout)
            self._manager = TieringSpecManager(manager, self._blocks, address_of(manager), self.config.parallel.pp_size)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """In each worker's process."""
        return TieringSpecWorker(kv_caches, self._blocks.blocks_per_slot, self._blocks.ranks, self.config.parallel.rank)
