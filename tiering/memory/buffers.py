"""One shape for whatever a caller hands over: an array of blocks that aliases the caller's memory."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from tiering.errors import ShapeError


def as_rows(source: object, n: int, block_bytes: int, *, writable: bool, name: str) -> npt.NDArray[np.uint8]:
    """``source`` as ``uint8 (n, block_bytes)``, without a copy; the caller's buffer stays the caller's.

    Takes a CPU tensor, a numpy array, or any object with the buffer protocol, contiguous, of any plain dtype: n rows
    of ``block_bytes`` bytes each, or one dimension of n * ``block_bytes`` single bytes. With ``writable`` (a
    destination) it may have more rows than n, and the first n are returned; a source has exactly n.

    Raises ``ShapeError`` that names the argument (``name``), what was expected and what came.
    """
    expected = f"{name}: expected {n} rows of {block_bytes} bytes, contiguous (such as uint8 ({n}, {block_bytes}))"
    shape, dtype, flat = _flatten(source, name, expected)
    got = f"got {dtype} {shape}"
    if flat is None:
        raise ShapeError(f"{expected}; {got}, which is not contiguous or not plain data")
    if len(shape) == 1 and flat.nbytes == shape[0]:
        rows, spare = divmod(flat.nbytes, block_bytes)
    else:
        rows = shape[0] if shape else 0
        spare = flat.nbytes - rows * block_bytes
    if spare or rows < n or (rows > n and not writable):
        raise ShapeError(f"{expected}; {got}, {flat.nbytes} bytes in all")
    if writable and not flat.flags.writeable:
        raise ShapeError(f"{name}: expected a writable buffer; {got}, which is read-only")
    return flat[: n * block_bytes].reshape(n, block_bytes)


def _flatten(source: object, name: str, expected: str) -> tuple[tuple[int, ...], str, npt.NDArray[np.uint8] | None]:
    """Shape and dtype for the message, and all bytes as a flat alias (None if there is no such thing)."""
    torch = sys.modules.get("torch")  # Not loaded: then this is no tensor, and torch need not be imported to tell.
    if torch is not None and isinstance(source, torch.Tensor):
        if source.device.type != "cpu":
            raise ShapeError(
                f"{name}: expected CPU memory; got a tensor on {source.device}: "
                "GPU blocks are moved by the connector's transfer engine, or copy the tensor to the CPU first"
            )
        shape, dtype = tuple(source.shape), str(source.dtype)
        if (
            source.layout is not torch.strided
            or source.is_quantized
            or not source.is_contiguous()
            or source.is_conj()
            or source.is_neg()
        ):
            return shape, dtype, None
        return shape, dtype, source.detach().view(-1).view(torch.uint8).numpy()
    if isinstance(source, np.ndarray):
        array = np.asarray(source)
        plain = array.flags.c_contiguous and not array.dtype.hasobject
        return array.shape, str(array.dtype), array.reshape(-1).view(np.uint8) if plain else None
    try:
        view = memoryview(source)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        raise ShapeError(f"{expected}; got a {type(source).__name__}, which is no tensor, array or buffer") from None
    dtype = f"{type(source).__name__} of {view.format!r}"
    return tuple(view.shape or ()), dtype, np.frombuffer(view, np.uint8) if view.c_contiguous else None
