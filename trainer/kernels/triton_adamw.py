"""AdamW in one pass over memory: clipped gradient in, masters, moments and the model's parameter out.

30 bytes per parameter with fp32 gradients and a bf16 parameter, where a separate scaling, update and copy move 50.
Imported only on a GPU with Triton; the reference is torch's fused AdamW in trainer/optim/adamw.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _adamw(
    master, grad, exp_avg, exp_avg_sq, parameter, scale, numel,
    decay, one_minus_beta1, beta2, step_size, correction2_sqrt, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    g = tl.load(grad + at, inside).to(tl.float32) * tl.load(scale)
    p = tl.load(master + at, inside) * decay
    m = tl.load(exp_avg + at, inside)
    v = tl.load(exp_avg_sq + at, inside)
    m += (g - m) * one_minus_beta1
    v = v * beta2 + (1 - beta2) * g * g
    p -= step_size * m / (tl.sqrt(v) / correction2_sqrt + eps)
    tl.store(master + at, p, inside)
    tl.store(exp_avg + at, m, inside)
    tl.store(exp_avg_sq + at, v, inside)
    tl.store(parameter + at, p.to(parameter.dtype.element_ty), inside)


def adamw(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    parameter: torch.Tensor,
    scale: torch.Tensor,
    *,
    lr: float,
    step: int,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update flat tensors of equal length in place, as torch.optim.AdamW does with gradient `grad * scale`.

    master, exp_avg and exp_avg_sq are fp32; grad and parameter fp32 or bf16; scale is 0-dim fp32. `step` counts from 1.
    """
    numel = master.numel()
    if numel == 0:
        return
    _adamw[(triton.cdiv(numel, BLOCK),)](
        master, grad, exp_avg, exp_avg_sq, parameter, scale, numel,
        1 - lr * weight_decay, 1 - beta1, beta2, lr / (1 - beta1**step), (1 - beta2**step) ** 0.5, eps, BLOCK,
    )  # fmt: skip
