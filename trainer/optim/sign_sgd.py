"""SignSGD: no momentum, no state besides the masters."""

from __future__ import annotations

from trainer.optim.rule import Part


class SignSGD:
    """p -= lr * (sign(grad) + weight_decay * p)."""

    moments = ()
    of_matrices = False

    def update(self, part: Part, lr: float, step: int) -> None:
        part.master.mul_(1 - lr * part.weight_decay).add_(part.scaled_grad().sign(), alpha=-lr)
        part.parameter.copy_(part.master)
