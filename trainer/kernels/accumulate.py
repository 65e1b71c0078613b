"""Sums and multiples across dtypes, in one pass over memory."""

from __future__ import annotations

import torch

from trainer.kernels.capability import has_triton


def add(total: torch.Tensor, addend: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """total + addend in `dtype`: in place where total has it already, else new. Both contiguous, of one shape."""
    if not has_triton(total.device):
        return total.to(dtype).add_(addend)
    from trainer.kernels import triton_accumulate

    return triton_accumulate.add(total, addend, dtype)


def multiply(tensor: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """tensor * factor, rounded once to `dtype`, in a new tensor. `tensor` is contiguous, `factor` 0-dim fp32."""
    if not has_triton(tensor.device):
        return (tensor.float() * factor).to(dtype)
    from trainer.kernels import triton_accumulate

    return triton_accumulate.multiply(tensor, factor, dtype)
