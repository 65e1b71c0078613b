"""Weighted SwiGLU, one program per row. Imported only on a GPU with Triton; the reference is swiglu.py.

Shapes: R rows, I intermediate size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def _forward(gate_up, scores, out, I, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    score = tl.load(scores + row)
    for start in range(0, I, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < I
        gate = tl.load(gate_up + row * 2 * I + at, inside, 0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * I + I + at, inside, 0.0).to(tl.float32)
        hidden = gate * tl.sigmoid(gate) * up * score
        tl.store(out + row * I + at, hidden.to(out.dtype.element_ty), inside)


@triton.jit
def _backward(grad, gate_up, scores, grad_gate_up, grad_scores, I, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    score = tl.load(scores + row)
    grad_score = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, I, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < I
        gate = tl.load(gate_up + row * 2 * I + at, inside, 0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * I + I + at, inside, 0.0).to(tl.float32)
        g = tl.load(grad + row * I + at, inside, 0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        grad_score += g * silu * up
        grad_gate = g * score * up * (sigmoid + silu * (1 - sigmoid))
        tl.store(grad_gate_up + row * 2 * I + at, grad_gate.to(grad_gate_up.dtype.element_ty), inside)
        tl.store(grad_gate_up + row * 2 * I + I + at, (g * score * silu).to(grad_gate_up.dtype.element_ty), inside)
    tl.store(grad_scores + row, tl.sum(grad_score, 0))


def _launch(kernel, rows: int, *arguments) -> None:
    block = min(BLOCK, triton.next_power_of_2(arguments[-1]))
    if rows:
        kernel[(rows,)](*arguments, block, num_warps=max(1, block // 256))


def forward(gate_up_RJ: torch.Tensor, scores_R: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up * score: [R, 2 I] and [R] fp32 -> [R, I]."""
    R, J = gate_up_RJ.shape
    out = gate_up_RJ.new_empty(R, J // 2)
    _launch(_forward, R, gate_up_RJ.contiguous(), scores_R.contiguous(), out, J // 2)
    return out


def backward(
    grad_RI: torch.Tensor, gate_up_RJ: torch.Tensor, scores_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate_up [R, 2 I], in its dtype, and of the scores [R] fp32."""
    R, J = gate_up_RJ.shape
    grad_gate_up = torch.empty_like(gate_up_RJ, memory_format=torch.contiguous_format)
    grad_scores = torch.empty_like(scores_R)
    inputs = (grad_RI.contiguous(), gate_up_RJ.contiguous(), scores_R.contiguous())
    _launch(_backward, R, *inputs, grad_gate_up, grad_scores, J // 2)
    return grad_gate_up, grad_scores
