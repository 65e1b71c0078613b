"""offload=full: masters, moments and gradients live in host memory, and a thread on the host computes the step.

Gradients leave the device as backward produces them; each parameter's update comes back before it is used next. The
thread adds micro-batches up, computes and sends, span by span in the order of the queue.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch

from trainer.memory import offload
from trainer.memory.lanes import Lane, Moment, Worker, result
from trainer.metrics.mark import Mark
from trainer.optim.slabs import LocalParameter, Slab
from trainer.optim.updates import Members, OnDevice, span_norms

ROOMS = 4  # pinned rooms for spans in each direction
STAGED_SPAN = 2**24  # elements of a room: 64 MiB of fp32, large for the bus and small for the host


@dataclass
class Room:
    """Pinned memory for a span; on a CPU nothing has to be staged, and there is none."""

    tensor: torch.Tensor
    taken: Future | None = None  # the job that reads it last
    left: Moment = None  # when its content was copied to the device


class OnHost(OnDevice):
    def __init__(
        self,
        members: Members,
        grad_dtype: torch.dtype,
        device: torch.device,
        in_flight_gib: float,
        micro_batches: int,
        timeout_s: float,
    ):
        """in_flight_gib bounds the gradients on the device that wait to leave. timeout_s: of any wait, 0 never ends.

        With one micro-batch a step gradients stay in the parameters' dtype, as no sum has to be more exact.
        """
        super().__init__(members, grad_dtype)
        self._device, self._in_flight, self._timeout_s = device, int(in_flight_gib * 2**30), timeout_s
        pinned = device.type == "cuda"
        self._grads: dict[Slab, torch.Tensor] = {}
        for slab, member in members:
            if slab not in self._grads:
                dtype = member.tensor.dtype if micro_batches == 1 else grad_dtype
                self._grads[slab] = offload.host_zeros(slab.numel, dtype, pinned)
        self._span = min(STAGED_SPAN, offload.SPAN)
        dtypes = {member.tensor.dtype for _, member in members} if pinned else ()
        rooms = [Room(offload.host_zeros(self._span, t, True)) for t in dtypes for _ in range(2 * ROOMS)]
        self._incoming = {t: itertools.cycle([r for r in rooms if r.tensor.dtype == t][:ROOMS]) for t in dtypes}
        self._outgoing = {t: itertools.cycle([r for r in rooms if r.tensor.dtype == t][ROOMS:]) for t in dtypes}
        self._rooms = rooms
        self._from_device, self._to_device = Lane(device), Lane(device)
        self._worker = Worker("offload")
        self._on_device: deque[tuple[Moment, torch.Tensor]] = deque()  # gradients that are still leaving
        self._arrivals: dict[str, list[Moment]] = {}  # of this step's gradients, by parameter name
        self._norms: dict[str, torch.Tensor | Future] = {}
        self._queued: dict[str, Future] = {}
        self._updated: set[str] = set()  # in this step
        self._early: tuple[float, int] | None = None  # learning rate and number of a step that updates early
        self._step = 0

    def begin(self, lr: float, step: int) -> None:
        self._early = (lr, step)

    def accumulate(self, slab: Slab, member: LocalParameter, gradient: torch.Tensor) -> None:
        self.ready([member.name])  # the former step is done with this part of the slab
        name, host = member.name, slab.view(self._grads[slab], member)
        first = name not in self._arrivals
        moments = self._arrivals.setdefault(name, [])
        complete = self._from_device.now()
        if first and gradient.dtype == host.dtype:
            moments.append(self._from_device.run(lambda: host.copy_(gradient, non_blocking=True), complete))
        else:
            before = moments[-1] if moments else None
            for span in offload.flat_spans(gradient.numel(), self._span):
                moments.append(self._add(name, host[span], gradient[span], (complete, before), first))
        self._let_go(gradient, moments[-1] if moments else None)
        if self.final:
            self._norms[name] = (
                span_norms(gradient if host.dtype == torch.float32 else gradient.to(host.dtype))  # while it is here
                if first
                else self._submit(name, lambda: span_norms(host))
            )
            if self._early is not None:
                self._queue(slab, member, *self._early, None)

    def _add(
        self, name: str, host: torch.Tensor, gradient: torch.Tensor, after: tuple[Moment, ...], first: bool
    ) -> Moment:
        """Add a span of a gradient to its sum on the host; returns when the gradient has left the device."""
        into = torch.Tensor.copy_ if first else torch.Tensor.add_
        if gradient.device.type == "cpu":

            def add_at_once() -> None:
                for moment in after:
                    self._from_device.wait(moment)
                into(host, gradient)

            self._submit(name, add_at_once)
            return None
        room = next(self._incoming[gradient.dtype])
        if room.taken is not None:
            result(room.taken, self._timeout_s, self._words(name))
        staged = room.tensor[: gradient.numel()]
        here = self._from_device.run(lambda: staged.copy_(gradient, non_blocking=True), *after)

        def add() -> None:
            self._from_device.wait(here)
            into(host, staged)

        room.taken = self._submit(name, add)
        return here

    def _let_go(self, gradient: torch.Tensor, left: Moment) -> None:
        """Keep a gradient until it has left; wait for the oldest where too many have not."""
        self._on_device.append((left, gradient))
        while self._on_device:
            moment = self._on_device[0][0]
            if moment is not None and not moment.query():
                if sum(waiting.nbytes for _, waiting in self._on_device) <= self._in_flight:
                    break
                self._from_device.wait(moment)
            self._on_device.popleft()

    def _words(self, name: str) -> str:
        return f"optimizer step {self._step + 1}, parameter {name}, offload=full"

    def _submit(self, name: str, job) -> Future:
        return self._worker.submit(self._words(name), job)

    def gradient(self, slab: Slab, member: LocalParameter) -> torch.Tensor:
        host = slab.view(self._grads[slab], member)
        for moment in self._arrivals.get(member.name, ()):
            self._from_device.wait(moment)
        self._wait(self._submit(member.name, lambda: None), member.name)
        return host if member.name in self._arrivals else host.zero_()

    def norms(self) -> Iterable[torch.Tensor]:
        for slab, member in self._members:
            norm = self._norms.get(member.name)
            if norm is None:
                norm = span_norms(self.gradient(slab, member))
            yield self._wait(norm, member.name) if isinstance(norm, Future) else norm

    def update(self, lr: float, step: int, scale: torch.Tensor | None) -> None:
        scale = None if scale is None else scale.cpu()
        for slab, member in self._members:
            if member.name not in self._updated:
                self._queue(slab, member, lr, step, scale)
        self._step = step

    def _queue(self, slab: Slab, member: LocalParameter, lr: float, step: int, scale: torch.Tensor | None) -> None:
        unused = self._to_device.now()  # every use of the parameter in this step lies before
        host, moments = slab.view(self._grads[slab], member), self._arrivals.get(member.name)

        def job() -> Moment:
            for moment in moments or ():
                self._from_device.wait(moment)
            if moments is None:
                host.zero_()
            done = None
            for span, matrices in slab.spans(member, self._span):
                live = member.live[span]
                if self._device.type == "cpu":
                    slab.rule.update(slab.part(member, span, matrices, host, scale), lr, step)
                    continue
                room = next(self._outgoing[live.dtype])
                self._to_device.wait(room.left)
                fresh = room.tensor[: live.numel()]
                slab.rule.update(slab.part(member, span, matrices, host, scale, parameter=fresh), lr, step)
                done = room.left = self._to_device.run(partial(live.copy_, fresh, non_blocking=True), unused)
            return done

        self._queued[member.name] = self._submit(member.name, job)
        self._updated.add(member.name)

    def _wait(self, future: Future, name: str):
        return result(future, self._timeout_s, self._words(name))

    def forget_gradients(self) -> None:
        if self._arrivals.keys() - self._updated:  # no update: sums may still be on their way into the slab
            self._wait(self._submit("all", lambda: None), "all")
        self._arrivals, self._norms, self.final = {}, {}, False
        self._updated, self._early = set(), None

    def ready(self, names: Iterable[str]) -> list[Moment]:
        updates = [(name, self._queued.pop(name)) for name in names if name in self._queued]
        if not updates:
            return []
        begin = Mark(self._device)
        moments = [self._wait(future, name) for name, future in updates]
        for moment in moments:
            self._to_device.hold_compute(moment)
        self.waits.append((begin, Mark(self._device)))
        return moments

    def drain(self) -> None:
        for moment in self.ready(list(self._queued)):
            self._to_device.wait(moment)

    def host_tensors(self) -> list[torch.Tensor]:
        return [*self._grads.values(), *(room.tensor for room in self._rooms)]

    def describe(self) -> list[str]:
        lines = []
        for dtype in dict.fromkeys(grads.dtype for grads in self._grads.values()):
            size = sum(grads.nbytes for grads in self._grads.values() if grads.dtype == dtype) / 2**30
            lines.append(f"  gradients: {str(dtype).removeprefix('torch.')} on cpu, {size:.3f} GiB")
        return lines
