"""Sums of a step's gradients, and the update of every parameter from them, on the device that trains."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trainer.kernels.accumulate import add
from trainer.memory import offload
from trainer.memory.lanes import Moment
from trainer.metrics.mark import Mark
from trainer.optim.slabs import LocalParameter, Slab

Members = list[tuple[Slab, LocalParameter]]  # in the order in which a forward pass needs them


class OnDevice:
    """offload=none. The first gradient of a step stays as it is, since it is its own sum: with one micro-batch a step
    nothing is copied, cast or cleared. From the second on they are summed in a dtype of their own.

    Subclasses update later than update(), or earlier: between begin() and update(), as soon as a gradient is final.
    `final` says that no other gradient of a parameter follows in this step.
    """

    def __init__(self, members: Members, grad_dtype: torch.dtype):
        self._members, self._grad_dtype = members, grad_dtype
        self._sums: dict[str, torch.Tensor] = {}  # of this step's gradients, flat, by parameter name
        self.final = False
        self.waits: list[tuple[Mark, Mark]] = []  # of the compute stream for updates, since someone took them

    def accumulate(self, slab: Slab, member: LocalParameter, gradient: torch.Tensor) -> None:
        """Take over a flat gradient, or add it to those of this step."""
        total = self._sums.get(member.name)
        if total is None:
            # fp32 holds every gradient exactly, so the cast can wait for a second one.
            total = gradient if self._grad_dtype == torch.float32 else gradient.to(self._grad_dtype)
        else:
            total = add(total, gradient, self._grad_dtype)
        self._sums[member.name] = total

    def gradient(self, slab: Slab, member: LocalParameter) -> torch.Tensor:
        """The sum of a parameter's gradients in this step, flat; zero where none came."""
        if member.name not in self._sums:
            self._sums[member.name] = member.tensor.new_zeros(member.tensor.numel())
        return self._sums[member.name]

    def norms(self) -> Iterable[torch.Tensor]:
        """Norms of the spans of every parameter's gradient."""
        return (span_norms(self.gradient(slab, member)) for slab, member in self._members)

    def begin(self, lr: float, step: int) -> None:
        """From here on a parameter may be updated as soon as its gradient is final."""

    def update(self, lr: float, step: int, scale: torch.Tensor | None) -> None:
        """Update every parameter that was not yet, from its gradient times `scale`."""
        for slab, member in self._members:
            gradient = self.gradient(slab, member)
            for span, matrices in slab.spans(member, offload.SPAN):
                slab.rule.update(slab.part(member, span, matrices, gradient, scale), lr, step)

    def forget_gradients(self) -> None:
        """Begin a new step."""
        self._sums, self.final = {}, False

    def ready(self, names: Iterable[str]) -> list[Moment]:
        """Let the current stream go on only when these parameters are updated; returns when they are."""
        return []

    def drain(self) -> None:
        """Wait until every update is done and slabs in host memory hold it."""

    def host_tensors(self) -> list[torch.Tensor]:
        """What is held in host memory besides the slabs."""
        return []

    def describe(self) -> list[str]:
        """For the start-up log."""
        dtype = str(self._grad_dtype).removeprefix("torch.")
        return [f"  gradients: as they come, from a step's second micro-batch on in {dtype}"]


def span_norms(gradient: torch.Tensor) -> torch.Tensor:
    """The norm of each span, [n]."""
    # A GPU sums fp32 in a tree; a CPU sums one after the other, which over millions of elements needs fp64.
    dtype = torch.float64 if gradient.device.type == "cpu" else torch.float32
    norms = [
        torch.linalg.vector_norm(gradient[span], dtype=dtype)
        for span in offload.flat_spans(gradient.numel(), offload.SPAN)
    ]
    return torch.stack(norms) if norms else torch.zeros(0, dtype=dtype, device=gradient.device)
