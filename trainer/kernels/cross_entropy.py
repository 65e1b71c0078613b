"""Language-model head and loss in one, without ever holding the logits of all tokens.

Shapes: N tokens, D model dim, V vocabulary. Logits of one chunk of tokens exist at a time; the gradients of hidden
states and head are computed in the forward pass, where those logits are, and scaled by the upstream gradient later.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from trainer.kernels.accumulate import add, multiply
from trainer.kernels.capability import has_triton

IGNORE = -100  # a label that is not supervised
CHUNK_TOKENS = 16384  # 5 GB of bf16 logits at V = 151936; two chunks also need the head's gradient twice, in fp32


def cross_entropy_(logits_NV: torch.Tensor, labels_N: torch.Tensor, with_grad: bool) -> torch.Tensor:
    """Losses [N] fp32, 0 where the label is negative; with_grad: logits become d loss / d logits, in their dtype."""
    supervised = labels_N >= 0
    target = labels_N.clamp_min(0)[:, None]
    values = logits_NV.float()
    log_total = values.logsumexp(-1)
    losses = (log_total - values.gather(1, target)[:, 0]) * supervised
    if with_grad:
        # softmax - one-hot, and nothing where the label is ignored.
        grad = (values - log_total[:, None]).exp_()
        grad.scatter_add_(1, target, grad.new_full(target.shape, -1.0))
        logits_NV.copy_(grad.mul_(supervised[:, None]))
    return losses


def _kernel(logits_NV: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]:
    if not has_triton(logits_NV.device):
        return cross_entropy_
    from trainer.kernels import triton_cross_entropy

    return triton_cross_entropy.cross_entropy_


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, chunk):
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        loss = hidden_ND.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_weight = None
        for hidden, labels, into in zip(
            hidden_ND.split(chunk), labels_N.split(chunk), (grad_hidden if needs_hidden else hidden_ND).split(chunk),
            strict=True,
        ):  # fmt: skip
            logits = hidden @ weight_VD.T
            loss += _kernel(logits)(logits, labels, needs_hidden or needs_weight).sum()
            if needs_hidden:
                torch.mm(logits, weight_VD, out=into)
            if needs_weight:
                part = logits.T @ hidden
                # Summed over chunks in fp32: a bf16 sum loses small contributions.
                grad_weight = part if grad_weight is None else add(grad_weight, part, torch.float32)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = multiply(grad_hidden, grad_loss, grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = multiply(grad_weight, grad_loss, ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None


def linear_cross_entropy(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor, chunk: int = CHUNK_TOKENS
) -> torch.Tensor:
    """Sum of the cross entropies of the supervised tokens, fp32 scalar; labels of -100 count nothing."""
    return _LinearCrossEntropy.apply(hidden_ND, weight_VD, labels_N, chunk)


def linear_cross_entropy_reference(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor
) -> torch.Tensor:
    """The same with all logits at once."""
    return F.cross_entropy((hidden_ND @ weight_VD.T).float(), labels_N, ignore_index=IGNORE, reduction="sum")
