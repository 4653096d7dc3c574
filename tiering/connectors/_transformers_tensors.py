"""Blocks and the tensors of a DynamicCache: each byte is copied once, between its slot and the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tiering.connectors._transformers_blocks import Copy
from tiering.connectors._transformers_model import KVShape
from tiering.errors import ShapeError

if TYPE_CHECKING:
    from transformers import DynamicCache


class PrefixTensors:
    """Keys and values of the leading ``columns`` columns of a padded batch, on the model's device, filled block by block.

    All layers lie in one tensor, so that a block is one strided copy. Padding is zero: it is masked, but must be finite.
    """

    def __init__(self, shape: KVShape, tokens_per_block: int, pads: Sequence[int], columns: int, copies: int) -> None:
        self._shape = shape
        self._tokens = tokens_per_block
        self._pads = pads
        self._columns = columns
        self._copies = copies
        size = (shape.layers, len(pads) * copies, shape.kv_heads, columns)
        options: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
        self._keys = torch.empty((*size, shape.key_dim), **options)
        self._values = torch.empty((*size, shape.value_dim), **options)
        for row, pad in enumerate(pads):
            self._of(self._keys, row, 0, pad).zero_()
            self._of(self._values, row, 0, pad).zero_()

    def taker(self, row: int) -> Copy:
        """Copies block ``position`` of prompt ``row`` into all its rows, as far as the columns go."""

        def take(position: int, block: memoryview) -> None:
            start = self._pads[row] + position * self._tokens
            stop = min(start + self._tokens, self._columns)
            for tensor, whole in zip((self._keys, self._values), self._shape.views(block, self._tokens), strict=True):
                self._of(tensor, row, start, stop).copy_(whole[:, None, :, : stop - start])

        return take

    def fill(self, past: DynamicCache, columns: int) -> int:
        """Make the leading ``columns`` columns the content of an empty cache; returns their number."""
        if columns:
            layers: Any = past.layers
            for layer, keys, values in zip(layers, self._keys, self._values, strict=True):
                # Not `update`, which would copy all of it once more.
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys[:, :, :columns], values[:, :, :columns]
        return columns

    def _of(self, tensor: torch.Tensor, row: int, start: int, stop: int) -> torch.Tensor:
        """The rows of a prompt, from column to column: (layers, copies, kv_heads, columns, dim)."""
        return tensor[:, row * self._copies : (row + 1) * self._copies, :, start:stop]


def block_of(past: DynamicCache, shape: KVShape, tokens_per_block: int, row: int, first: int) -> Copy:
    """Copies block ``position``, counted from column ``first`` of row ``row`` of the cache, into a slot."""
    layers: Any = past.layers

    def fill(position: int, block: memoryview) -> None:
        start = first + position * tokens_per_block
        span = slice(start, start + tokens_per_block)
        keys, values = shape.views(block, tokens_per_block)
        with torch.no_grad():
            _stack([layer.keys[row, :, span] for layer in layers], keys)
            _stack([layer.values[row, :, span] for layer in layers], values)

    return fill


def _stack(parts: list[torch.Tensor], out: torch.Tensor) -> None:
    if parts[0].device == out.device:
        torch.stack(parts, out=out)
    else:  # gathered where they are: one transfer instead of one a layer
        out.copy_(torch.stack(parts))


def check_cache(past: DynamicCache, shape: KVShape, *, rows: int) -> None:
    """Raises ``ShapeError`` unless ``past`` holds ``rows`` rows of the shape, or nothing."""
    layers: Any = past.layers
    if past.get_seq_length() == 0:
        return
    for index, layer in enumerate(layers):
        got = (*layer.keys.shape[:2], layer.keys.shape[3], layer.values.shape[3], layer.keys.dtype, layer.keys.device)
        need = (rows, shape.kv_heads, shape.key_dim, shape.value_dim, shape.dtype, shape.device)
        if len(layers) != shape.layers or got[0] < rows or got[1:] != need[1:]:
            raise ShapeError(
                f"past: expected {shape.layers} layers of (rows, kv_heads, key_dim, value_dim, dtype, device) {need}; "
                f"got {len(layers)}, of which layer {index} has {got}"
            )
