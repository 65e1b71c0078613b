"""Softmax cross entropy of one chunk of logits, which become their own gradient in place.

Two reads and one write of the logits, where separate operators make about ten passes over an fp32 copy.
Imported only on a GPU with Triton; the reference is `cross_entropy_` in trainer/kernels/cross_entropy.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _cross_entropy(logits, labels, losses, V, WITH_GRAD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    label = tl.load(labels + row)
    if label < 0:  # not supervised
        tl.store(losses + row, 0.0)
        if WITH_GRAD:
            for start in range(0, V, BLOCK):
                at = start + tl.arange(0, BLOCK)
                tl.store(logits + at, tl.zeros((BLOCK,), logits.dtype.element_ty), at < V)
        return
    target = tl.load(logits + label).to(tl.float32)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):  # per lane: running maximum, and sum relative to it
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, at < V, float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, x)
        # A lane that has seen nothing but padding has -inf twice; its sum stays 0.
        total = tl.where(larger == float("-inf"), 0.0, total * tl.exp(largest - larger) + tl.exp(x - larger))
        largest = larger
    maximum = tl.max(largest, 0)
    log_total = maximum + tl.log(tl.sum(total * tl.exp(largest - maximum), 0))
    tl.store(losses + row, log_total - target)
    if WITH_GRAD:
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logits + at, at < V, float("-inf")).to(tl.float32)
            grad = tl.exp(x - log_total) - tl.where(at == label, 1.0, 0.0)
            tl.store(logits + at, grad.to(logits.dtype.element_ty), at < V)


def cross_entropy_(logits_NV: torch.Tensor, labels_N: torch.Tensor, with_grad: bool) -> torch.Tensor:
    """Losses [N] fp32, 0 where the label is negative; with_grad: logits become d loss / d logits, in their dtype."""
    losses = torch.empty(logits_NV.shape[0], dtype=torch.float32, device=logits_NV.device)
    _cross_entropy[(logits_NV.shape[0],)](
        logits_NV, labels_N, losses, logits_NV.shape[1], with_grad, BLOCK, num_warps=8
    )
    return losses
