"""From vLLM's configuration to ours: what a block is, and all that must differ for two blocks to be kept apart."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_offload.config import OffloadingConfig

from tiering.config import TieringConfig
from tiering.errors import ConfigError
from tiering.types import Group, KVLayout, sliding_window

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

CONFIG_KEY = "tiering_config"
"""The key of ``kv_connector_extra_config`` that names our YAML file."""
REVISION_KEY = "model_revision"
"""The key that names the model's revision for ``TieringSpec``, which vLLM does not tell it."""
_WHERE = "kv_connector_extra_config"


def read_config(extra: Any) -> TieringConfig:
    """The YAML file that ``kv_connector_extra_config`` names. Raises ``ConfigError``."""
    path = extra.get(CONFIG_KEY)
    if not isinstance(path, str | Path) or not path:
        raise ConfigError(
            f"{_WHERE}.{CONFIG_KEY} is {path!r}; name the YAML file of the tiers (`tiering config init` writes one)"
        )
    return TieringConfig.from_yaml(path)


@dataclass(frozen=True, slots=True)
class EngineBlocks:
    """An engine's blocks in our terms; group i here is group ``group_ids[i]`` of vLLM."""

    layout: KVLayout
    group_ids: tuple[int, ...]
    gpu_tokens_per_block: tuple[int, ...]
    tokens_per_hash: int
    blocks_per_slot: int
    """GPU blocks in one of our blocks, the same in every group."""
    ranks: int
    layer_names: tuple[tuple[str, ...], ...]

    @property
    def shard_bytes(self) -> tuple[int, ...]:
        """One rank's part of a block, by group."""
        return tuple(group.block_bytes // self.ranks for group in self.layout.groups)


def blocks_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineBlocks:
    """What the engine's blocks are; the same in the scheduler and in every worker.

    Raises ``ConfigError`` for models whose state cannot be told from block tables alone.
    """
    config = build_offloading_config(vllm_config, kv_cache_config)
    _check_supported(vllm_config, kv_cache_config)
    kinds = [_kind(kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec) for group in config.groups]
    model = vllm_config.model_config
    revision = f"{model.revision or ''} code={model.code_revision or ''} quantization={model.quantization or ''}"
    return _engine_blocks(config, kinds, revision)


def blocks_of_offloading(config: OffloadingConfig) -> EngineBlocks:
    """The same from what an ``OffloadingSpec`` is told. vLLM's own scheduler half knows which groups have windows."""
    return _engine_blocks(config, ["full"] * len(config.groups), str(config.extra_config.get(REVISION_KEY, "")))


def _engine_blocks(config: OffloadingConfig, kinds: list[str], revision: str) -> EngineBlocks:
    blocks_per_slot = config.cache.blocks_per_chunk
    ranks = config.parallel.world_size
    groups = [
        Group(kind, group.tokens_per_block * blocks_per_slot, size * blocks_per_slot * ranks)
        for kind, group, size in zip(kinds, config.groups, _gpu_block_bytes(config), strict=True)
    ]
    layout = KVLayout(
        groups, model=config.model.name, revision=_fingerprint(config, revision), dtype=config.model.dtype, ranks=ranks
    )
    return EngineBlocks(
        layout=layout,
        group_ids=tuple(group.group_id for group in config.groups),
        gpu_tokens_per_block=tuple(group.tokens_per_block for group in config.groups),
        tokens_per_hash=config.cache.tokens_per_hash,
        blocks_per_slot=blocks_per_slot,
        ranks=ranks,
        layer_names=tuple(group.layer_names for group in config.groups),
    )


def _gpu_block_bytes(config: OffloadingConfig) -> list[int]:
    """One GPU block of each group on one rank.

    vLLM gives every block a page in each tensor, and a group with fewer layers than the largest uses that many of them.
    """
    layers = [len(group.layer_names) for group in config.groups]
    total = config.worker_kv_bytes_per_block
    if total < 1:
        raise ConfigError("vLLM has no KV cache to offload: its cache configuration has no blocks")
    return [-(-total * count // max(layers)) for count in layers]


def _fingerprint(config: OffloadingConfig, revision: str) -> str:
    """All besides model, dtype, block sizes and ranks that makes two engines' bytes differ under equal keys."""
    parallel = config.parallel
    fields = {
        "revision": revision,
        "engine": f"vllm {'.'.join(_version('vllm').split('.')[:2])}",
        "tp": parallel.tp_size,
        "pp": parallel.pp_size,
        "pcp": parallel.pcp_size,
        "dcp": parallel.dcp_size,
        "layout": config.kv_cache_layout or "",
        "gpu_blocks": ",".join(str(group.tokens_per_block) for group in config.groups),
        "layers": ",".join(str(len(group.layer_names)) for group in config.groups),
        "platform": _platform(),
    }
    return "; ".join(f"{name}={str(value).replace(';', '_')}" for name, value in fields.items())


def _version(distribution: str) -> str:
    for name in (distribution, f"{distribution}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


def _platform() -> str:
    """Attention kernels order the bytes of a page by what their device likes."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import platform

        return f"cpu {platform.machine()}"
    return str(current_platform.get_device_name())


def _kind(spec: KVCacheSpec) -> str:
    if isinstance(spec, SlidingWindowSpec):
        return sliding_window(int(spec.sliding_window))
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return sliding_window(int(spec.attention_chunk_size))
    if isinstance(spec, FullAttentionSpec):
        return "full"
    raise ConfigError(
        f"TieringConnector cannot offload {type(spec).__name__}: vLLM hands its state over by other means than block"
        ' tables; use TieringSpec under "kv_connector": "OffloadingConnector"'
    )


def _check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    parallel = vllm_config.parallel_config
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    if layers % parallel.pipeline_parallel_size:
        raise ConfigError(
            f"pipeline_parallel_size={parallel.pipeline_parallel_size} does not divide {layers} layers: every rank's part"
            " of a block must have the same size"
        )
    if kv_cache_config.hisparse_host_num_blocks is not None:
        raise ConfigError("TieringConnector does not support HiSparse: its blocks live in host memory already")
