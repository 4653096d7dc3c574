"""Into vLLM, by three doors: a connector, an offloading spec and a secondary tier. Nothing else here imports vllm."""

from tiering.connectors.vllm.connector import TieringConnector
from tiering.connectors.vllm.secondary import TieringSecondaryTier
from tiering.connectors.vllm.spec import TieringSpec

__all__ = ["TieringConnector", "TieringSecondaryTier", "TieringSpec"]
