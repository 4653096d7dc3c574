from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tiering.errors import ShapeError
from tiering.memory.buffers import as_rows

N, BLOCK_BYTES = 3, 8
PATTERN = bytes(range(N * BLOCK_BYTES))
FLAT = np.frombuffer(PATTERN, np.uint8)


def _tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(PATTERN), dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize(
    "source",
    [
        PATTERN,
        bytearray(PATTERN),
        memoryview(PATTERN),
        memoryview(PATTERN).cast("B", (N, BLOCK_BYTES)),
        memoryview(PATTERN).cast("I").cast("B").cast("I", (N, 2)),
        array("B", PATTERN),
        FLAT,
        FLAT.reshape(N, BLOCK_BYTES),
        FLAT.reshape(N, 2, 4),
        FLAT.view("<u2").reshape(N, 4),
        FLAT.view(">f8").reshape(N, 1),
        FLAT.view("<i8"),
        _tensor(torch.uint8, N, BLOCK_BYTES),
        _tensor(torch.uint8, N * BLOCK_BYTES),
        _tensor(torch.bfloat16, N, 2, 2),
        _tensor(torch.float64, N, 1),
        _tensor(torch.float32, N, 2).requires_grad_(),
    ],
    ids=lambda source: type(source).__name__,
)
def test_every_contiguous_buffer_of_blocks_is_taken_as_it_is(source: Any) -> None:
    rows = as_rows(source, N, BLOCK_BYTES, writable=False, name="source")
    assert rows.shape == (N, BLOCK_BYTES)
    assert rows.dtype == np.uint8
    assert rows.tobytes() == PATTERN


def test_nothing_is_copied() -> None:
    grid = FLAT.reshape(N, BLOCK_BYTES).copy()
    assert np.shares_memory(as_rows(grid, N, BLOCK_BYTES, writable=True, name="out"), grid)
    tensor = _tensor(torch.float32, N, 2)
    assert as_rows(tensor, N, BLOCK_BYTES, writable=True, name="out").ctypes.data == tensor.data_ptr()
    raw = bytearray(PATTERN)
    as_rows(memoryview(raw), N, BLOCK_BYTES, writable=True, name="out")[1, 2] = 255
    assert raw[BLOCK_BYTES + 2] == 255
    assert np.shares_memory(as_rows(raw, N, BLOCK_BYTES, writable=True, name="out"), np.frombuffer(raw, np.uint8))


def test_a_destination_may_have_more_rows() -> None:
    out = np.zeros((5, BLOCK_BYTES), np.uint8)
    rows = as_rows(out, N, BLOCK_BYTES, writable=True, name="out")
    rows[:] = 1
    assert rows.shape == (N, BLOCK_BYTES)
    assert out.sum() == N * BLOCK_BYTES
    assert as_rows(bytearray(5 * BLOCK_BYTES), N, BLOCK_BYTES, writable=True, name="out").shape == (N, BLOCK_BYTES)
    with pytest.raises(ShapeError, match=r"source: expected 3 rows of 8 bytes.*got uint8 \(5, 8\)"):
        as_rows(out, N, BLOCK_BYTES, writable=False, name="source")


@pytest.mark.parametrize(
    "empty", [b"", np.empty((0, BLOCK_BYTES), np.uint8), torch.empty((0, 4)), bytearray(), np.empty((0,), np.float32)]
)
def test_no_blocks_need_no_bytes(empty: Any) -> None:
    writable = not isinstance(empty, bytes)
    assert as_rows(empty, 0, BLOCK_BYTES, writable=writable, name="source").shape == (0, BLOCK_BYTES)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: PATTERN[:-1], r"got bytes of 'B' \(23,\), 23 bytes"),
        (lambda: PATTERN + b"x", r"got bytes of 'B' \(25,\), 25 bytes"),
        (lambda: FLAT[:16].reshape(2, 8), r"got uint8 \(2, 8\)"),
        (lambda: FLAT.reshape(8, 3), r"got uint8 \(8, 3\)"),
        (lambda: np.zeros((N, BLOCK_BYTES), np.float32), r"got float32 \(3, 8\), 96 bytes"),
        (lambda: np.zeros((N, BLOCK_BYTES), object), r"got object \(3, 8\), which is not contiguous or not plain data"),
        (lambda: np.zeros((N, 16), np.uint8)[:, ::2], r"got uint8 \(3, 8\), which is not contiguous"),
        (lambda: np.zeros((6, BLOCK_BYTES), np.uint8)[::2], r"got uint8 \(3, 8\), which is not contiguous"),
        (lambda: np.zeros((BLOCK_BYTES, N), np.uint8).T, r"got uint8 \(3, 8\), which is not contiguous"),
        (lambda: np.zeros((), np.uint8), r"got uint8 \(\)"),
        (lambda: memoryview(bytes(48))[::2], r"got memoryview of 'B' \(24,\), which is not contiguous"),
        (lambda: torch.zeros((N, BLOCK_BYTES)), r"got torch.float32 \(3, 8\), 96 bytes"),
        (lambda: torch.zeros((BLOCK_BYTES, N), dtype=torch.uint8).T, r"got torch.uint8 \(3, 8\), which is not contig"),
        (lambda: torch.zeros((1, 8), dtype=torch.uint8).expand(3, 8), r"got torch.uint8 \(3, 8\), which is not contig"),
        (lambda: torch.zeros((N, 1), dtype=torch.complex64).conj(), r"got torch.complex64 \(3, 1\), which is not"),
        (lambda: torch.zeros((N, 8)).to_sparse(), r"got torch.float32 \(3, 8\), which is not"),
        (lambda: torch.zeros((N, 8), device="meta"), r"got a tensor on meta: .*transfer engine"),
        (lambda: [[0] * 8] * 3, "got a list, which is no tensor, array or buffer"),
        (lambda: None, "got a NoneType"),
    ],
)
def test_anything_else_is_refused_with_what_came(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ShapeError, match="kv_source: expected.*" + said):
        as_rows(make(), N, BLOCK_BYTES, writable=False, name="kv_source")


@pytest.mark.parametrize("source", [PATTERN, memoryview(PATTERN), FLAT, FLAT.reshape(N, BLOCK_BYTES)])
def test_a_destination_must_be_writable(source: Any) -> None:
    with pytest.raises(ShapeError, match=r"out: expected a writable buffer; got .*read-only"):
        as_rows(source, N, BLOCK_BYTES, writable=True, name="out")


@pytest.mark.parametrize("count", [1, 2])
def test_a_destination_that_is_too_short_is_refused(count: int) -> None:
    with pytest.raises(ShapeError, match="out: expected 3 rows"):
        as_rows(bytearray(count * BLOCK_BYTES), N, BLOCK_BYTES, writable=True, name="out")
