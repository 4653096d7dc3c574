"""What the blocks of a transformers model depend on: the shape of its KV, its configuration and its weights."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tiering.errors import ConfigError
from tiering.types import KVLayout, encode_fields

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

SAMPLE_BYTES = 64
"""Bytes that ``weights_sample`` reads of each parameter."""

_VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures")
"""Fields of a configuration that say nothing about the weights or that the layout names already."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of one token: ``layers`` x ``kv_heads`` keys of ``key_dim`` and values of ``value_dim`` elements.

    A block is one contiguous row: the keys as ``(layers, kv_heads, tokens, key_dim)``, then the values likewise.
    """

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def views(self, block: memoryview, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a block of ``tokens`` tokens, as aliases of its bytes."""
        flat = torch.frombuffer(block, dtype=self.dtype)
        border = self.layers * self.kv_heads * tokens * self.key_dim
        heads = (self.layers, self.kv_heads, tokens)
        return flat[:border].view(*heads, self.key_dim), flat[border:].view(*heads, self.value_dim)


def require_transformers() -> Any:
    """The transformers package. Raises ``ConfigError`` that names the extra if it cannot be imported."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"TieredPrefixCache needs transformers, which cannot be imported ({error}); "
            "pip install 'kvtiering[transformers]'"
        ) from error
    return transformers


def cache_argument(function: Any) -> str:
    """The name under which a function of transformers takes the KV cache: ``cache`` since 5.2x, before ``past_key_values``."""
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"


def empty_cache(model: PreTrainedModel) -> DynamicCache:
    """The cache that ``generate`` would make for the model."""
    cache: DynamicCache = require_transformers().DynamicCache(config=model.config.get_text_config(decoder=True))
    return cache


def check_model(model: Any) -> None:
    """Raises ``ConfigError`` with the remedy for a model whose KV cannot be cut into blocks that mean the same anywhere."""
    transformers = require_transformers()
    name = type(model).__name__
    if not isinstance(model, transformers.PreTrainedModel) or not model.can_generate():
        raise ConfigError(
            f"{name} is no transformers model that generates; pass one such as AutoModelForCausalLM gives "
            "(of a PeftModel its get_base_model(), of a compiled model the model itself)"
        )
    config = model.config
    if config.is_encoder_decoder:
        raise ConfigError(f"{name} is an encoder-decoder model; only decoder-only models have a prefix to reuse")
    layers: list[Any] = empty_cache(model).layers
    odd = sorted({type(layer).__name__ for layer in layers if type(layer) is not transformers.cache_utils.DynamicLayer})
    if odd:
        raise ConfigError(
            f"{name} has cache layers other than full attention ({', '.join(odd)}): what they keep depends on where the "
            "prompt ends; use a model whose layers all attend to the whole prompt"
        )
    growing = sorted({"dynamic", "longrope"} & set(_rope_types(config.get_text_config(decoder=True))))
    if growing:
        raise ConfigError(
            f"{name} has {growing[0]!r} RoPE, whose keys depend on the length of the whole prompt and not on what came "
            "before; use the model with another rope_type (default, linear, yarn, llama3)"
        )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1 or "meta" in devices:
        raise ConfigError(
            f"{name} lies on {', '.join(devices)}; load it whole on one device (no device_map, or one entry)"
        )
    check_eval(model)


def check_eval(model: PreTrainedModel) -> None:
    if model.training:
        raise ConfigError("the model is in training mode, where dropout changes the KV; call model.eval() first")


def _rope_types(config: Any) -> Iterator[str]:
    """The RoPE variants of all layers; the parameters are one mapping, or one for each layer type."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for entry in [parameters, *parameters.values()]:
        if isinstance(entry, Mapping):
            yield str(entry.get("rope_type", entry.get("type", "default")))


def kv_shape(model: PreTrainedModel) -> KVShape:
    """Measured by computing one token: architectures spell heads and dimensions in too many ways to read them off.

    Raises ``ConfigError`` if the layers differ, or the model does not use the cache that it is given.
    """
    cache = empty_cache(model)
    ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    arguments: dict[str, Any] = {cache_argument(type(model).forward): cache}
    with torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, **arguments)
    layers: list[Any] = cache.layers
    if not layers or any(not layer.is_initialized for layer in layers):
        raise ConfigError(f"{type(model).__name__} does not fill the DynamicCache it is given; it cannot be used here")
    shapes = {(*layer.keys.shape, *layer.values.shape, layer.keys.dtype, layer.values.dtype) for layer in layers}
    if len(shapes) > 1:
        raise ConfigError(
            f"{type(model).__name__} has layers of different KV shapes; only models with equal layers can be used"
        )
    keys, values = layers[0].keys, layers[0].values
    return KVShape(len(layers), keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device)


def layout_of(model: PreTrainedModel, shape: KVShape, tokens_per_block: int, revision: str | None) -> KVLayout:
    """The identity of the model's blocks. The arrangement of a block is part of it: other engines have others."""
    arrangement = f"transformers {shape.layers}x{shape.kv_heads}x({shape.key_dim}+{shape.value_dim})"
    return KVLayout.uniform(
        model=model.config._name_or_path or type(model).__name__,
        revision=f"{fingerprint(model) if revision is None else revision}; {arrangement}",
        dtype=str(shape.dtype).removeprefix("torch."),
        tokens_per_block=tokens_per_block,
        block_bytes=tokens_per_block * shape.bytes_per_token,
    )


# -- weights ----------------------------------------------------------------------------------------------------------


def fingerprint(model: PreTrainedModel) -> str:
    """64 hexadecimal digits over the configuration and, of every parameter and buffer, name, type, shape and content.

    Of a tensor's content: the sum of its 8-byte words, so that no single change anywhere goes unseen, and a few dozen
    bytes spread over it, which tell a change of order. It reads all weights once, at the speed of memory.
    """
    fields = {name: value for name, value in model.config.to_dict().items() if name not in _VOLATILE}
    digest = hashlib.sha256(encode_fields(type(model).__name__, json.dumps(fields, sort_keys=True, default=str)))
    with _readable(model):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            digest.update(encode_fields(name, str(tensor.dtype), list(tensor.shape), _word_sum(_bytes_of(tensor))))
        digest.update(weights_sample(model))
    return digest.hexdigest()


def weights_sample(model: PreTrainedModel) -> bytes:
    """A digest of a few bytes of each parameter: milliseconds, and any training changes it."""
    with _readable(model):
        parts = [_spread(_bytes_of(parameter)) for parameter in model.parameters() if parameter.numel()]
        return hashlib.sha256(torch.cat(parts).cpu().numpy().tobytes()).digest()


@contextlib.contextmanager
def _readable(model: PreTrainedModel) -> Iterator[None]:
    """Turns what a tensor without plain bytes raises into an error that names the way out."""
    try:
        yield
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise ConfigError(
            f"the weights of {type(model).__name__} cannot be read as bytes ({error}); "
            "pass revision=, a text that names these weights and no others"
        ) from error


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes, flat; an alias unless the tensor is not contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _word_sum(flat: torch.Tensor) -> int:
    words = flat[: flat.numel() // 8 * 8]
    if words.storage_offset() % 8:
        words = words.clone()
    total = int(words.view(torch.int64).sum())
    return total + int(flat[words.numel() :].sum())


def _spread(flat: torch.Tensor) -> torch.Tensor:
    # An odd step meets every byte of the elements, also those that training changes most.
    return flat[:: flat.numel() // SAMPLE_BYTES | 1][:SAMPLE_BYTES]
