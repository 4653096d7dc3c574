"""Runs a transformers model over paged GPU blocks."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from tiering.connectors.reference.groups import CacheGroup, chunk_tokens, layout_of
from tiering.connectors.reference.pages import PagedMemory
from tiering.connectors.reference.request import Request
from tiering.connectors.reference.runner import Sample, Work, chunks
from tiering.connectors.requests import ScheduledRequest
from tiering.errors import ConfigError
from tiering.types import KVLayout, sliding_window

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

_ATTENTION = {"full_attention": "full", "sliding_attention": "sliding_window"}


class ModelRunner:
    """A decoder-only ``model`` whose layers attend fully, or within a sliding window; each kind is a group.

    Its requests run one after another within a step: clear, and as fast as one of them allows. ``ranks`` splits the KV
    heads over as many memories, as tensor parallelism would; the model computes on one device all the same. A page is
    ``(keys|values, kv_heads of the rank, tokens_per_block, head_dim)``. Not thread-safe; the model must be in ``eval()``.

    ``name`` and ``revision`` must tell this model's weights from all others: they are the identity of its blocks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        revision: str = "",
        num_gpu_blocks: int,
        tokens_per_block: int,
        blocks_per_slot: int = 1,
        ranks: int = 1,
    ) -> None:
        """Raises ``ConfigError`` for a model with another attention, or KV heads that do not divide into ``ranks``."""
        self._model = model
        config = model.config.get_text_config(decoder=True)
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self._head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        if kv_heads % ranks:
            raise ConfigError(f"{name} has {kv_heads} KV heads, which do not divide into ranks={ranks}")
        self._rank_heads = kv_heads // ranks
        token_bytes = 2 * self._rank_heads * self._head_dim * model.dtype.itemsize
        groups = [
            CacheGroup(kind, tokens_per_block, layers, token_bytes)
            for kind, layers in _layer_kinds(name, config).items()
        ]
        self.memory = PagedMemory(groups, num_gpu_blocks=num_gpu_blocks, ranks=ranks, device=model.device)
        self.layout: KVLayout = layout_of(
            groups,
            model=name,
            revision=revision,
            dtype=str(model.dtype).removeprefix("torch."),
            ranks=ranks,
            blocks_per_slot=blocks_per_slot,
        )
        self._chunk_tokens = chunk_tokens(groups)
        self._cache_argument = _cache_argument(model)

    @torch.inference_mode()
    def forward(self, work: Work) -> dict[str, Sample]:
        samples = {}
        for request, scheduled in work:
            logits = self._compute(request, scheduled)
            if scheduled.computed_tokens + scheduled.scheduled_tokens == request.num_tokens:
                samples[request.request_id] = Sample(int(logits.argmax()), logits.cpu())
        return samples

    def _compute(self, request: Request, scheduled: ScheduledRequest) -> torch.Tensor:
        """The scheduled tokens of one request, chunk by chunk; the last one's logits, ``(vocabulary,)``."""
        begin, end = scheduled.computed_tokens, scheduled.computed_tokens + scheduled.scheduled_tokens
        cache = self._gather(scheduled, begin)
        arguments: dict[str, Any] = {self._cache_argument: cache}
        for first, last in chunks(begin, end, self._chunk_tokens):
            ids = torch.tensor([request.token_ids[first:last]], device=self._model.device)
            output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **arguments)
        self._scatter(scheduled, cache, begin, end)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def _in_pages(self, rows: torch.Tensor, group: CacheGroup) -> torch.Tensor:
        """``(blocks, layers, keys|values, heads, tokens, head_dim)``: an alias of blocks ``(blocks, block_bytes)``, uint8."""
        shape = (len(group.layers), 2, self._rank_heads, group.tokens_per_block, self._head_dim)
        pages: torch.Tensor = torch.unflatten(rows.view(self._model.dtype), 1, shape)
        return pages

    def _gather(self, scheduled: ScheduledRequest, tokens: int) -> DynamicCache:
        """A cache of the first ``tokens`` tokens. Positions without a block are zeros, and masked by the model's window."""
        from transformers import DynamicCache

        # Made without the configuration, each layer keeps all positions and the model masks those out of its window.
        cache = DynamicCache()
        if not tokens:
            return cache
        by_layer: dict[int, torch.Tensor] = {}
        for number, group in enumerate(self.memory.groups):
            table = torch.tensor(scheduled.block_ids[number][: group.blocks_of(tokens)], device=self._model.device)
            rows = [self.memory.blocks(rank, number).index_select(0, table) for rank in range(self.memory.ranks)]
            parts = [self._in_pages(part, group) for part in rows]
            # (blocks, layers, 2, heads, tokens, dim) -> (layers, 2, 1, heads, blocks * tokens, dim)
            joined = torch.cat(parts, dim=3).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, None, :, :tokens]
            by_layer |= dict(zip(group.layers, joined, strict=True))
        for layer in sorted(by_layer):
            cache.update(by_layer[layer][0], by_layer[layer][1], layer)
        return cache

    def _scatter(self, scheduled: ScheduledRequest, cache: DynamicCache, begin: int, end: int) -> None:
        """Write the tokens ``begin`` to ``end`` of the cache into their pages."""
        layers: Any = cache.layers  # attention layers all; the declared type covers other kinds
        positions = torch.arange(begin, end)
        for number, group in enumerate(self.memory.groups):
            blocks = torch.tensor(scheduled.block_ids[number])[positions // group.tokens_per_block]
            places = (blocks.to(self._model.device), (positions % group.tokens_per_block).to(self._model.device))
            pairs = [(layers[layer].keys[0], layers[layer].values[0]) for layer in group.layers]
            # (layers, 2, heads, tokens, dim)
            new = torch.stack([torch.stack([part[:, begin:end] for part in pair]) for pair in pairs])
            for rank in range(self.memory.ranks):
                own = new[:, :, rank * self._rank_heads : (rank + 1) * self._rank_heads]
                pages = self._in_pages(self.memory.blocks(rank, number), group)
                pages[places[0], :, :, :, places[1]] = own.permute(3, 0, 1, 2, 4)


def _layer_kinds(name: str, config: Any) -> dict[str, tuple[int, ...]]:
    """Kind of group -> its layers, in the order of their first layers."""
    window: Any = getattr(config, "sliding_window", None)
    same = "sliding_attention" if window else "full_attention"
    types = getattr(config, "layer_types", None) or [same] * config.num_hidden_layers
    kinds: dict[str, tuple[int, ...]] = {}
    for layer, type_ in enumerate(types):
        if type_ not in _ATTENTION:
            raise ConfigError(f"{name}: layer {layer} is {type_!r}; only {', '.join(_ATTENTION)} can be paged here")
        kind = sliding_window(window) if type_ == "sliding_attention" else "full"
        kinds[kind] = (*kinds.get(kind, ()), layer)
    return kinds


def _cache_argument(model: PreTrainedModel) -> str:
    # transformers 5.2x renamed the argument; the old name still works there, with a warning.
    parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    return "cache" if "cache" in parameters else "past_key_values"
