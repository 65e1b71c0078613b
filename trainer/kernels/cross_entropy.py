"""Language-model head and loss in one, without ever holding the logits of all tokens.

Shapes: N tokens, D model dim, V vocabulary. Logits of one chunk of tokens exist at a time; the gradients of hidden
states and head are computed in the forward pass, where those logits are, and scaled by the upstream gradient later.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORE = -100  # a label that is not supervised
CHUNK_TOKENS = 4096  # 1.2 GB of bf16 logits at V = 151936


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, chunk):
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        loss = hidden_ND.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden_ND) if needs_hidden else None
        # Summed over chunks in fp32: a bf16 sum loses small contributions.
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        for start in range(0, hidden_ND.shape[0], chunk):
            rows = slice(start, start + chunk)
            hidden, labels = hidden_ND[rows], labels_N[rows]
            supervised = labels != IGNORE
            target = labels.clamp_min(0)[:, None]
            logits = (hidden @ weight_VD.T).float()
            log_total = logits.logsumexp(-1)
            loss += ((log_total - logits.gather(1, target)[:, 0]) * supervised).sum()
            if not (needs_hidden or needs_weight):
                continue
            # d loss / d logits = softmax - one-hot, and nothing where the label is ignored.
            grad = logits.sub_(log_total[:, None]).exp_()
            grad.scatter_add_(1, target, grad.new_full(target.shape, -1.0))
            grad = grad.mul_(supervised[:, None]).to(hidden.dtype)
            if needs_hidden:
                torch.mm(grad, weight_VD, out=grad_hidden[rows])
            if needs_weight:
                grad_weight += grad.T @ hidden
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad_loss).to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad_loss).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None


def linear_cross_entropy(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor, chunk: int = CHUNK_TOKENS
) -> torch.Tensor:
    """Sum of the cross entropies of the supervised tokens, fp32 scalar; labels of -100 count nothing.

    Its backward may run once: the head's gradient is scaled in place.
    """
    return _LinearCrossEntropy.apply(hidden_ND, weight_VD, labels_N, chunk)


def linear_cross_entropy_reference(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor
) -> torch.Tensor:
    """The same with all logits at once."""
    return F.cross_entropy((hidden_ND @ weight_VD.T).float(), labels_N, ignore_index=IGNORE, reduction="sum")
