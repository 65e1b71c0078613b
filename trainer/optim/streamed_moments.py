"""offload=optimizer: moments live in pinned host memory and pass through a few buffers on the device.

A span's moments come in on one stream, the update runs on another, and they leave on a third, so that both directions of
the bus and the compute stream work at the same time. The compute stream waits only where a parameter is used next.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from trainer.config import ConfigError
from trainer.memory import offload
from trainer.memory.lanes import Lane, Moment
from trainer.metrics.mark import Mark
from trainer.optim.slabs import LocalParameter, Slab
from trainer.optim.updates import Members, OnDevice

BUFFERS = 4  # two that fill while two empty
FP32 = 4  # bytes


@dataclass
class Buffer:
    """Room on the device for the moments of a span."""

    tensor: torch.Tensor
    empty: Moment = None  # when its former content has left


@dataclass(frozen=True)
class Update:
    """A queued update. What it reads stays alive until the compute stream has waited for it."""

    done: Moment
    reads: tuple[torch.Tensor | None, ...]


class StreamedMoments(OnDevice):
    def __init__(self, members: Members, grad_dtype: torch.dtype, device: torch.device, prefetch_gib: float):
        """prefetch_gib bounds the buffers. Raises ConfigError if a matrix that is updated at once does not fit."""
        super().__init__(members, grad_dtype)
        kinds = max((len(slab.moments) for slab, _ in members), default=0)
        bound = int(prefetch_gib * 2**30) // (BUFFERS * FP32)
        self._span = min(offload.SPAN, max(1, bound // max(kinds, 1)))
        needed = [
            len(slab.moments) * (span.stop - span.start)
            for slab, member in members
            for span, _ in slab.spans(member, self._span)
        ]
        numel = max(needed, default=0)
        if numel > max(bound, kinds):
            raise ConfigError(
                f"offload.prefetch_gib={prefetch_gib:g} does not hold {BUFFERS} times the moments of the largest matrix: "
                f"at least {numel * BUFFERS * FP32 / 2**30:.3f} is needed"
            )
        buffers = [Buffer(torch.empty(numel, dtype=torch.float32, device=device)) for _ in range(BUFFERS)]
        self._buffers, self._next_buffer = buffers, itertools.cycle(buffers)
        self._device = device
        self._arriving, self._updating, self._leaving = Lane(device), Lane(device), Lane(device)
        self._queued: dict[str, Update] = {}
        self._updated: set[str] = set()  # in this step
        self._early: tuple[float, int] | None = None  # learning rate and number of a step that updates early

    def begin(self, lr: float, step: int) -> None:
        self._early = (lr, step)

    def accumulate(self, slab: Slab, member: LocalParameter, gradient: torch.Tensor) -> None:
        super().accumulate(slab, member, gradient)
        if self._early is not None and self.final:
            self._queue(slab, member, *self._early, None)

    def update(self, lr: float, step: int, scale: torch.Tensor | None) -> None:
        for slab, member in self._members:
            if member.name not in self._updated:
                self._queue(slab, member, lr, step, scale)

    def _queue(self, slab: Slab, member: LocalParameter, lr: float, step: int, scale: torch.Tensor | None) -> None:
        gradient, done = self.gradient(slab, member), self._updating.now()
        complete = done  # the gradient, the scale, and every use of the parameter in this step
        homes = {kind: slab.view(whole, member) for kind, whole in slab.moments.items()}
        for span, matrices in slab.spans(member, self._span):
            buffer = next(self._next_buffer)
            numel = span.stop - span.start
            rooms = buffer.tensor[: len(homes) * numel].view(len(homes), numel) if homes else ()
            moments = dict(zip(homes, rooms, strict=True))

            def fetch(moments=moments, span=span):
                for kind, room in moments.items():
                    room.copy_(homes[kind][span], non_blocking=True)

            def compute(moments=moments, span=span, matrices=matrices):
                slab.rule.update(slab.part(member, span, matrices, gradient, scale, moments), lr, step)

            def put_back(moments=moments, span=span):
                for kind, room in moments.items():
                    homes[kind][span].copy_(room, non_blocking=True)

            here = self._arriving.run(fetch, buffer.empty) if homes else None
            done = self._updating.run(compute, here, complete)
            buffer.empty = self._leaving.run(put_back, done) if homes else done
        self._queued[member.name] = Update(done, (gradient, scale))
        self._updated.add(member.name)

    def forget_gradients(self) -> None:
        super().forget_gradients()
        self._updated, self._early = set(), None

    def ready(self, names: Iterable[str]) -> list[Moment]:
        updates = [self._queued.pop(name) for name in names if name in self._queued]
        if not updates:
            return []
        begin = Mark(self._device)
        for update in updates:
            self._updating.hold_compute(update.done)
        self.waits.append((begin, Mark(self._device)))
        return [update.done for update in updates]

    def drain(self) -> None:
        self.ready(list(self._queued))
        for buffer in self._buffers:
            self._leaving.wait(buffer.empty)

    def describe(self) -> list[str]:
        size = self._buffers[0].tensor.nbytes / 2**30
        return [*super().describe(), f"  moments pass through {BUFFERS} buffers of {size:.3f} GiB on {self._device}"]
