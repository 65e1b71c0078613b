"""The optimizer: fp32 masters, moments and accumulated gradients in contiguous slabs.

Gradients leave `.grad` as soon as they are there and accumulate in the slab, in a dtype of their own. Every pass over
a slab goes in spans of bounded size, so that a step needs little memory besides the slabs, however large they are.
Offloading is only the question of where a slab lives and who computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from trainer.config import ConfigError, RunConfig
from trainer.kernels.capability import has_triton
from trainer.memory.offload import SPAN, Placement, flat_spans, move, placement
from trainer.optim.adamw import AdamW, FusedAdamW
from trainer.optim.muon import Muon, sharded_rows
from trainer.optim.rule import Matrices, Part, Rule
from trainer.optim.sign_sgd import SignSGD
from trainer.parallel import local

ALIGNMENT = 64  # elements; parameters start at whole cache lines
GIB = 2**30


@dataclass(frozen=True)
class LocalParameter:
    """This rank's part of a trained parameter."""

    name: str
    tensor: torch.Tensor  # the local shard, contiguous, sharing the parameter's storage; may have 0 elements
    parameter: nn.Parameter  # carries the hook; its .grad may be a DTensor
    decay: bool  # takes weight decay
    matrix: bool  # a matrix of a block, or a stack [experts, out, in]: Muon's
    shard_group: ProcessGroup | None  # over which dim 0 of the full tensor is sharded; None: whole here
    full_rows: int  # dim 0 of the full tensor


class Slab:
    """The parameters that share a rule and a decay, one after the other in each of a few flat tensors."""

    def __init__(
        self, members: list[LocalParameter], rule: Rule, decay: float, grad_dtype: torch.dtype, place: Placement
    ):
        self.members, self.rule, self._decay, self._place = members, rule, decay, place
        self._ranges: dict[str, slice] = {}
        numel = 0
        for member in members:
            self._ranges[member.name] = slice(numel, numel + member.tensor.numel())
            numel += -(-member.tensor.numel() // ALIGNMENT) * ALIGNMENT  # the gaps stay zero under every rule
        self.master = place.zeros(numel, torch.float32, place.compute)
        self.grad = place.zeros(numel, grad_dtype, place.compute)
        self.moments = {kind: place.zeros(numel, torch.float32, place.moments) for kind in rule.moments}
        self._parts = list(self._matrix_parts() if rule.of_matrices else ((s, None) for s in flat_spans(numel)))
        self._unwritten: set[str] = set()  # gradients that still hold the former step's

    def _matrix_parts(self) -> Iterator[tuple[slice, Matrices]]:
        for member in self.members:
            start, shape = self._ranges[member.name].start, member.tensor.shape
            if len(shape) == 2:  # also without a row here: the others need this rank when they gather
                matrices = Matrices((1, *shape), member.full_rows, member.shard_group)
                yield self._ranges[member.name], matrices
                continue
            count, rows, columns = shape  # sharded by whole matrices
            at_once = max(1, SPAN // (rows * columns))
            for first in range(0, count, at_once):
                last = min(first + at_once, count)
                span = slice(start + first * rows * columns, start + last * rows * columns)
                yield span, Matrices((last - first, rows, columns), rows)

    def view(self, slab: torch.Tensor, member: LocalParameter) -> torch.Tensor:
        """One parameter's part of a slab, flat."""
        return slab[self._ranges[member.name]]

    def states(self) -> dict[str, torch.Tensor]:
        """The slabs that outlive a step, by kind."""
        return {"master": self.master, **self.moments}

    def accumulate(self, member: LocalParameter, gradient: torch.Tensor) -> None:
        """Add a flat gradient; the first of a step replaces what is there, which saves clearing and reading it."""
        into = torch.Tensor.copy_ if member.name in self._unwritten else torch.Tensor.add_
        self._unwritten.discard(member.name)
        move(self.view(self.grad, member), gradient, into)

    def forget_gradients(self) -> None:
        self._unwritten = set(self._ranges)

    def settle(self) -> None:
        """A parameter without a gradient in this step has a gradient of zero."""
        for member in self.members:
            if member.name in self._unwritten:
                self.view(self.grad, member).zero_()
        self._unwritten = set()

    def step(self, lr: float, step: int, scale: torch.Tensor | None) -> None:
        """Update the masters from the gradients times `scale` (None: 1) and write them to the parameters."""
        if isinstance(self.rule, FusedAdamW):
            for member in self.members:
                views = [self.view(slab, member) for slab in (self.master, self.grad, *self.moments.values())]
                self.rule.update_parameter(*views, local(member.parameter).view(-1), scale, self._decay, lr, step)
            return
        for span, matrices in self._parts:
            self._update(span, matrices, lr, step, scale)
        self.write_parameters()

    def _update(self, span: slice, matrices: Matrices | None, lr: float, step: int, scale: torch.Tensor | None) -> None:
        homes = {kind: moment[span] for kind, moment in self.moments.items()}
        moments = homes
        if self._place.staged:
            moments = {kind: home.to(self._place.compute, copy=True) for kind, home in homes.items()}
        grad = self.grad[span].float()
        if scale is not None:  # at most one copy of the span
            own = grad.data_ptr() != self.grad[span].data_ptr()
            grad = torch.mul(grad, scale.to(grad.device), out=grad if own else None)
        self.rule.update(Part(self.master[span], grad, moments, self._decay, matrices), lr, step)
        if self._place.staged:
            for kind, home in homes.items():
                home.copy_(moments[kind])

    def write_parameters(self) -> None:
        for member in self.members:
            # Not member.tensor: FSDP2 may pad a shard anew, and then the parameter has another storage.
            move(local(member.parameter).view(-1), self.view(self.master, member))

    def read_parameters(self) -> None:
        for member in self.members:
            move(self.view(self.master, member), local(member.parameter).view(-1))

    def squared_norm(self) -> torch.Tensor:
        """Sum of squares of the gradients, fp64."""
        # A GPU sums fp32 in a tree; a CPU sums one after the other, which over millions of elements needs fp64.
        dtype = torch.float64 if self.grad.device.type == "cpu" else torch.float32
        norms = [torch.linalg.vector_norm(self.grad[span], dtype=dtype) for span in flat_spans(self.grad.numel())]
        norms = norms or [self.grad.new_zeros((), dtype=dtype)]
        return torch.stack(norms).double().square().sum()


class SlabOptimizer:
    """Owns the slabs of this rank; from its construction on, gradients go to them and `.grad` stays None."""

    def __init__(
        self, slabs: list[Slab], clip_norm: float, device: torch.device, norm_group: ProcessGroup | None, offload: str
    ):
        self._slabs, self._clip_norm, self._device, self._norm_group = slabs, clip_norm, device, norm_group
        self._offload = offload
        self._steps = 0
        self._scale: torch.Tensor | None = None  # of the gradients in the next step
        self.refresh_masters()
        for slab, member in self._members():
            member.parameter.register_post_accumulate_grad_hook(accumulate_into(slab, member))

    def _members(self) -> Iterator[tuple[Slab, LocalParameter]]:
        return ((slab, member) for slab in self._slabs for member in slab.members)

    def gradients(self) -> dict[str, torch.Tensor]:
        """What has accumulated so far, by parameter name: views of the slabs in the shard's shape."""
        self._settle()
        return {m.name: slab.view(slab.grad, m).view(m.tensor.shape) for slab, m in self._members()}

    def _settle(self) -> None:
        for slab in self._slabs:
            slab.settle()

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """Norm of the accumulated gradients of the whole model, 0-dim fp32 on the device; one all-reduce."""
        self._settle()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for slab in self._slabs:
            total += slab.squared_norm().to(self._device)
        if self._norm_group is not None:
            dist.all_reduce(total, group=self._norm_group)
        return total.sqrt().float()

    @torch.no_grad()
    def nonfinite_parameters(self) -> list[str]:
        """Names of this rank's parameters whose accumulated gradient is not finite; waits for the device once."""
        self._settle()
        names, largest = [], []
        for slab, member in self._members():
            if member.tensor.numel():
                names.append(member.name)
                # The maximum keeps NaN and needs no temporary, unlike isfinite.
                largest.append(torch.linalg.vector_norm(slab.view(slab.grad, member), ord=torch.inf).float())
        finite = torch.stack(largest).isfinite().tolist() if largest else []
        return [name for name, ok in zip(names, finite, strict=True) if not ok]

    @torch.no_grad()
    def clip(self, norm: torch.Tensor) -> None:
        """Let the next step scale the gradients by min(1, clip_norm / (norm + 1e-6)); does not wait for the device."""
        if self._clip_norm:
            self._scale = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update masters and parameters from the accumulated gradients, which stay until zero_grad()."""
        self._settle()
        self._steps += 1
        for slab in self._slabs:
            slab.step(lr, self._steps, self._scale)
        self._scale = None

    def zero_grad(self) -> None:
        """Begin a new sum of gradients, without a clipping of the former one."""
        self._scale = None
        for slab in self._slabs:
            slab.forget_gradients()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take the masters from the parameters, after weights were loaded into these."""
        for slab in self._slabs:
            slab.read_parameters()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`step`, and `<kind>.<parameter name>` for masters and moments: views of the slabs in the shard's shape."""
        state = {"step": torch.tensor(self._steps)}
        for slab, member in self._members():
            for kind, whole in slab.states().items():
                state[f"{kind}.{member.name}"] = slab.view(whole, member).view(member.tensor.shape)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over masters, moments and the step count, and write the masters to the parameters.

        Raises ValueError, before anything is changed, if an entry is missing, unknown, or of another shape.
        """
        own = self.state_dict()
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or unknown:
            raise ValueError(f"optimizer state does not fit this run: missing {missing}, unknown {unknown}")
        wrong = [
            f"{key} {list(state[key].shape)}, here {list(own[key].shape)}"
            for key in own
            if state[key].shape != own[key].shape
        ]
        if wrong:
            raise ValueError(f"optimizer state has other shapes (another layout or model?): {wrong}")
        self._steps = int(state["step"])
        for key, target in own.items():
            if key != "step":
                move(target.view(-1), state[key].reshape(-1))
        for slab in self._slabs:
            slab.write_parameters()

    @property
    def host_memory_gib(self) -> float:
        """GiB of slabs in host memory."""
        tensors = [t for slab in self._slabs for t in (*slab.states().values(), slab.grad)]
        return sum(t.nbytes for t in tensors if t.device.type == "cpu") / GIB

    def describe(self) -> list[str]:
        """Dtype, place and size of every kind of slab, for the start-up log."""
        rules = " + ".join(dict.fromkeys(type(slab.rule).__name__ for slab in self._slabs))
        sizes: dict[tuple[str, str, str], int] = {}
        for slab, member in self._members():
            key = ("parameters", str(member.tensor.dtype), str(member.tensor.device))
            sizes[key] = sizes.get(key, 0) + member.tensor.nbytes
        for slab in self._slabs:
            for kind, tensor in {**slab.states(), "gradients": slab.grad}.items():
                key = (kind, str(tensor.dtype), str(tensor.device))
                sizes[key] = sizes.get(key, 0) + tensor.nbytes
        return [f"optimizer {rules}, offload {self._offload}"] + [
            f"  {kind}: {dtype.removeprefix('torch.')} on {device}, {size / GIB:.3f} GiB"
            for (kind, dtype, device), size in sizes.items()
        ]


def accumulate_into(slab: Slab, member: LocalParameter) -> Callable[[nn.Parameter], None]:
    """A hook that moves the parameter's gradient into the slab, so that none accumulates in the parameter's dtype."""

    @torch.no_grad()
    def hook(parameter: nn.Parameter) -> None:
        # FSDP2 calls this with the reduced, sharded gradient, on the stream that reduced it.
        slab.accumulate(member, local(parameter.grad).reshape(-1))
        parameter.grad = None

    return hook


def build_optimizer(
    config: RunConfig, parameters: list[LocalParameter], device: torch.device, norm_group: ProcessGroup | None
) -> SlabOptimizer:
    """The optimizer of this rank's parameters, with masters taken from them.

    `norm_group` holds every element of the model exactly once; None: this process does. Every rank of it passes the
    same names in the same order. Raises ConfigError where optimizer and offload do not fit.
    """
    optimizer, mode = config.optimizer, config.offload.mode
    if optimizer.name == "muon" and mode == "full":
        raise ConfigError("optimizer=muon needs the GPU for its step: offload=full does not; use none or optimizer")
    for p in parameters:
        if p.shard_group is not None:
            count = sharded_rows(p.full_rows, p.shard_group.rank(), p.shard_group.size())[1]
            assert p.tensor.shape[0] == count, f"{p.name}: {p.tensor.shape[0]} local rows, {count} expected"
    fused = mode == "none" and has_triton(torch.device(device))
    rules = {"adamw": (FusedAdamW if fused else AdamW)(optimizer), "sign_sgd": SignSGD(), "muon": Muon(optimizer)}
    groups: dict[tuple[str, bool], list[LocalParameter]] = {}
    for p in parameters:
        rule = "adamw" if optimizer.name == "muon" and not p.matrix else optimizer.name
        groups.setdefault((rule, p.decay), []).append(p)
    grad_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.train.grad_dtype]
    place = placement(mode, torch.device(device))
    slabs = [
        Slab(members, rules[rule], optimizer.weight_decay if decay else 0.0, grad_dtype, place)
        for (rule, decay), members in groups.items()
    ]
    return SlabOptimizer(slabs, optimizer.clip_norm, torch.device(device), norm_group, mode)
