"""Block keys: a chained content hash of the tokens, the same in every process and on every machine."""

from __future__ import annotations

import hashlib
import operator
import sys
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from tiering.errors import ShapeError
from tiering.types import BlockKey, KVLayout, encode_fields

if TYPE_CHECKING:
    import torch

TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor"

TOKEN_ID_MAX: Final = (1 << 32) - 1
DIGEST_BYTES: Final = 32
_GROUP_BYTES: Final = 4
_TOKEN_BYTES: Final = 4
_U32_CODE: Final = "I" if array("I").itemsize == _TOKEN_BYTES else "L"


def block_keys(
    token_ids: TokenIds,
    layout: KVLayout,
    salt: bytes = b"",
    lora: bytes = b"",
    group: int = 0,
    *,
    parent: BlockKey | None = None,
) -> list[BlockKey]:
    """One key a *full* block of ``layout.groups[group].tokens_per_block`` tokens; a partial tail has none.

    ``token_ids``: a sequence of ints, or a 1-D numpy or torch array of any integer type (a tensor on a device is
    copied to the CPU); each fits 32 unsigned bits. A key is the 32-byte digest of the block and of all before it,
    and the group's index in 4 bytes, big-endian:

    - ``seed = sha256(encode_fields("kvtiering block key", layout.key_seed(group), salt, lora))``
    - ``digest[i] = sha256(digest[i - 1] + the block's tokens as little-endian uint32)``, with ``digest[-1] = seed``

    ``parent``: the key of the block that ends just before ``token_ids[0]``; the chain goes on from it, so that a
    growing conversation hashes its new tokens alone. Salt and LoRA are then already in the chain and not read again.

    Raises ``ShapeError`` that names the argument, and for a bad token its position and value.
    """
    if not 0 <= group < len(layout.groups):
        raise ShapeError(f"group is {group}; the layout has groups 0 to {len(layout.groups) - 1}")
    for name, value in (("salt", salt), ("lora", lora)):
        if not isinstance(value, bytes):
            raise ShapeError(f"{name} is {value!r}; pass bytes")
    suffix = group.to_bytes(_GROUP_BYTES, "big")
    if parent is None:
        digest = hashlib.sha256(encode_fields("kvtiering block key", layout.key_seed(group), salt, lora)).digest()
    elif len(parent) == DIGEST_BYTES + _GROUP_BYTES and parent.endswith(suffix):
        digest = parent[:DIGEST_BYTES]
    else:
        raise ShapeError(f"parent {parent.hex()!r} is not a key that block_keys made for group {group}")

    tokens = _little_endian_u32(token_ids).tobytes()
    block_bytes = layout.groups[group].tokens_per_block * _TOKEN_BYTES
    keys = []
    for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
        digest = hashlib.sha256(digest + tokens[start : start + block_bytes]).digest()
        keys.append(digest + suffix)
    return keys


def _little_endian_u32(token_ids: TokenIds) -> npt.NDArray[np.uint32] | array[int]:
    torch = sys.modules.get("torch")  # Not loaded: then this is no tensor, and torch need not be imported to tell.
    if torch is not None and isinstance(token_ids, torch.Tensor):
        if token_ids.is_floating_point() or token_ids.is_complex():
            raise ShapeError(f"token_ids is a tensor of {token_ids.dtype}; pass an integer type")
        token_ids = token_ids.detach().cpu().numpy()
    if isinstance(token_ids, np.ndarray):
        return _from_array(token_ids)
    if isinstance(token_ids, (str, bytes, bytearray, memoryview)) or not isinstance(token_ids, Sequence):
        raise ShapeError(f"token_ids is a {type(token_ids).__name__}; pass a list of ints or a 1-D integer array")
    return _from_sequence(token_ids)


def _from_array(ids: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.uint32]:
    if ids.ndim != 1:
        raise ShapeError(f"token_ids has the shape {ids.shape}; pass one dimension")
    if ids.dtype.kind not in "iu":
        raise ShapeError(f"token_ids is an array of {ids.dtype}; pass an integer type")
    if ids.size and (ids.min() < 0 or ids.max() > TOKEN_ID_MAX):
        position = int(np.argmax((ids < 0) | (ids > TOKEN_ID_MAX)))
        raise _bad_token(position, int(ids[position]))
    return np.ascontiguousarray(ids, dtype="<u4")


def _from_sequence(ids: Sequence[int]) -> array[int]:
    packed = None
    # array() takes True for 1, and then a mask passed by mistake would give keys that look right.
    if bool not in set(map(type, ids)):
        with suppress(TypeError, ValueError, OverflowError):
            packed = array(_U32_CODE, ids)
    if packed is None:
        packed = array(_U32_CODE, [_checked(position, token) for position, token in enumerate(ids)])
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def _checked(position: int, token: object) -> int:
    with suppress(TypeError):
        value = operator.index(token)  # type: ignore[arg-type]  # that is the question
        if not isinstance(token, bool) and 0 <= value <= TOKEN_ID_MAX:
            return value
    raise _bad_token(position, token)


def _bad_token(position: int, token: object) -> ShapeError:
    return ShapeError(f"token_ids[{position}] is {token!r}; a token id is a whole number from 0 to {TOKEN_ID_MAX}")
