"""flash-attn-4 (Hopper and Blackwell) as a registered operator, so that compiled blocks and checkpointing see it.

Shapes: B sequences, S positions, H query heads, G key/value heads, d head dim, T = B * S.

Its two launchers are private and change between releases (its public functions are autograd functions, which neither
torch.compile nor selective checkpointing sees through), hence the exact version.
"""

from __future__ import annotations

import importlib.metadata
import os
import warnings
from functools import cache

import torch

VERSION = "4.0.0b36"


@cache
def _installed() -> str | None:
    try:
        return importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return None


def why_no_flash_attention_4(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """None where it runs; else the reason, with what it would bring."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return "flash-attn-4 needs a Hopper or Blackwell GPU"
    if dtype != torch.bfloat16 or head_dim > 128 or head_dim % 8:
        return f"flash-attn-4 takes bf16 and head dims up to 128, not {dtype} and {head_dim}"
    if _installed() != VERSION:
        found = f"is {_installed()}" if _installed() else "is not installed"
        return (
            f"flash-attn-4 {found}: pip install 'moe-launcher[fast]' brings {VERSION}, "
            "which takes 0.87 of cuDNN's time for one document a row and 0.68 of flex_attention's for packed ones"
        )
    return None


@cache
def _launchers():
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # compiled kernels are kept on disk
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)  # one for every kernel, and of no consequence
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    return _flash_attn_fwd, _flash_attn_bwd


def _flat(starts, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[B, S, ...] -> [T, ...] where documents are given by their starts in T."""
    return tensors if starts is None else tuple(tensor.flatten(0, 1) for tensor in tensors)


@torch.library.custom_op("moe::flash_attention_4", mutates_args=())
def flash_attention_4(
    q_BSHd: torch.Tensor, k_BSGd: torch.Tensor, v_BSGd: torch.Tensor, starts: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention [B, S, H, d], and the log-sum-exp of the scores that its backward needs.

    starts: int32, where each document begins in T, and T at the end; None: every row is one document.
    """
    q, k, v = _flat(starts, q_BSHd, k_BSGd, v_BSGd)
    out, lse, *_ = _launchers()[0](
        q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True, return_lse=True
    )  # fmt: skip
    return out.view(q_BSHd.shape), lse


@torch.library.custom_op("moe::flash_attention_4_backward", mutates_args=())
def flash_attention_4_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    starts: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of q, k and v, in their shapes, contiguous."""
    gradients = tuple(tensor.new_empty(tensor.shape) for tensor in (q, k, v))  # left to itself it copies their strides
    dq, dk, dv = _flat(starts, *gradients)
    _launchers()[1](
        *_flat(starts, q, k, v, out, grad), lse,
        causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts, dq=dq, dk=dk, dv=dv,
    )  # fmt: skip
    return gradients


@flash_attention_4.register_fake
def _(q_BSHd, k_BSGd, v_BSGd, starts):
    B, S, H, _d = q_BSHd.shape
    lse_shape = (B, H, S) if starts is None else (H, B * S)
    return q_BSHd.new_empty(q_BSHd.shape), q_BSHd.new_empty(lse_shape, dtype=torch.float32)


@flash_attention_4_backward.register_fake
def _(grad, q, k, v, out, lse, starts):
    return tuple(tensor.new_empty(tensor.shape) for tensor in (q, k, v))


def _keep(ctx, inputs, output):
    *tensors, starts = inputs
    ctx.save_for_backward(*tensors, *output, *(() if starts is None else (starts,)))


def _backward(ctx, grad, _grad_lse):
    q, k, v, out, lse, *starts = ctx.saved_tensors
    gradients = flash_attention_4_backward(grad, q, k, v, out, lse, starts[0] if starts else None)
    return *gradients, None


flash_attention_4.register_autograd(_backward, setup_context=_keep)
