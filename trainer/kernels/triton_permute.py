"""Rows to their experts and back, each row moved once. Imported only on a GPU with Triton; the reference is permute.py.

Shapes: N tokens, K experts per token, R = N * K rows, D row width. One program moves a token's rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def _gather(x, inverse, out, D, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < D
    row = tl.load(x + token * D + at, inside)
    for k in range(K):
        tl.store(out + tl.load(inverse + token * K + k) * D + at, row, inside)


@triton.jit
def _combine(y, inverse, out, D, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < D
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        total += tl.load(y + tl.load(inverse + token * K + k) * D + at, inside).to(tl.float32)
    tl.store(out + token * D + at, total.to(out.dtype.element_ty), inside)


def _launch(kernel, source: torch.Tensor, inverse_R: torch.Tensor, out: torch.Tensor, k: int) -> torch.Tensor:
    tokens, width = inverse_R.numel() // k, source.shape[1]
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(width))
        kernel[(tokens, triton.cdiv(width, block))](source.contiguous(), inverse_R, out, width, k, block)
    return out


def gather(x_ND: torch.Tensor, inverse_R: torch.Tensor, k: int) -> torch.Tensor:
    """Copy each token's row to the k rows `inverse` names: [N, D] -> [R, D]."""
    return _launch(_gather, x_ND, inverse_R, x_ND.new_empty(inverse_R.numel(), x_ND.shape[1]), k)


def combine(y_RD: torch.Tensor, inverse_R: torch.Tensor, k: int) -> torch.Tensor:
    """Sum in fp32 the k rows of each token: [R, D] -> [N, D], in y's dtype."""
    return _launch(_combine, y_RD, inverse_R, y_RD.new_empty(inverse_R.numel() // k, y_RD.shape[1]), k)
