"""AdamW by torch's fused kernel."""

from __future__ import annotations

import torch
from torch.optim.adamw import adamw

from trainer.config import OptimizerConfig
from trainer.optim.rule import Part


class AdamW:
    """torch.optim.AdamW(fused=True) on a slab; the function behind that class, since the slab owns the state."""

    moments = ("exp_avg", "exp_avg_sq")
    of_matrices = False

    def __init__(self, config: OptimizerConfig):
        self._constants = {"beta1": config.beta1, "beta2": config.beta2, "eps": config.eps}

    def update(self, part: Part, lr: float, step: int) -> None:
        # The kernel counts up first. Filled on the device: copying a number there would wait for all queued work.
        count = torch.full((), step - 1, dtype=torch.float32, device=part.master.device)
        adamw(
            [part.master],
            [part.scaled_grad()],
            [part.moments["exp_avg"]],
            [part.moments["exp_avg_sq"]],
            [],
            [count],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=lr,
            weight_decay=part.weight_decay,
            **self._constants,
        )
        part.parameter.copy_(part.master)


class FusedAdamW(AdamW):
    """The same on a GPU with Triton: one pass that also clips and writes the model's parameter."""

    def __init__(self, config: OptimizerConfig):
        super().__init__(config)
        from trainer.kernels import triton_adamw

        self._kernel = triton_adamw.adamw

    def update(self, part: Part, lr: float, step: int) -> None:
        scale = torch.ones((), device=part.master.device) if part.scale is None else part.scale
        self._kernel(
            part.master,
            part.grad,
            part.moments["exp_avg"],
            part.moments["exp_avg_sq"],
            part.parameter,
            scale,
            lr=lr,
            step=step,
            weight_decay=part.weight_decay,
            **self._constants,
        )
