"""Sums and multiples across dtypes. torch's own mixed-dtype kernels reach a quarter of an H200's bandwidth.

Imported only on a GPU with Triton; the reference is in trainer/kernels/accumulate.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def _add(out, a, b, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    total = tl.load(a + at, inside).to(tl.float32) + tl.load(b + at, inside).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), inside)


@triton.jit
def _multiply(out, a, factor, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    product = tl.load(a + at, inside).to(tl.float32) * tl.load(factor)
    tl.store(out + at, product.to(out.dtype.element_ty), inside)


def add(total: torch.Tensor, addend: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """total + addend in `dtype`: in place where total has it already, else in a new tensor."""
    out = total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
    if total.numel():
        _add[(triton.cdiv(total.numel(), BLOCK),)](out, total, addend, total.numel(), BLOCK)
    return out


def multiply(tensor: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """tensor * factor in a new tensor of `dtype`; `factor` is 0-dim fp32."""
    out = torch.empty_like(tensor, dtype=dtype)
    if tensor.numel():
        _multiply[(triton.cdiv(tensor.numel(), BLOCK),)](out, tensor, factor, tensor.numel(), BLOCK)
    return out
