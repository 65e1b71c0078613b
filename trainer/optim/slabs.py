"""The optimizer: fp32 masters and moments in contiguous slabs, and the sums of the gradients.

Gradients leave `.grad` as soon as they are there. The first of a step stays as it is, since it is its own sum: with one
micro-batch a step nothing is copied, cast or cleared. From the second on they are summed in a dtype of their own. Where
the step is computed on the host, they go to a slab there. Every pass goes in spans of bounded size, so that a step
needs little memory besides the slabs. Offloading is only the question of where a slab lives and who computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from trainer.config import ConfigError, RunConfig
from trainer.kernels.accumulate import add
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
            numel += -(-member.tensor.numel() // ALIGNMENT) * ALIGNMENT
        self.master = place.zeros(numel, torch.float32, place.compute)
        self.moments = {kind: place.zeros(numel, torch.float32, place.moments) for kind in rule.moments}
        self.grad_dtype = grad_dtype
        self.host_grad = place.zeros(numel, grad_dtype, place.compute) if place.gradients_travel else None
        self._sums: dict[str, torch.Tensor] = {}  # of this step's gradients, flat, by parameter name

    def _parts(self, member: LocalParameter) -> Iterator[tuple[slice, Matrices | None]]:
        """Bounded ranges of a parameter's elements that are updated at once."""
        shape = member.tensor.shape
        if not self.rule.of_matrices:
            yield from ((span, None) for span in flat_spans(shape.numel()))
        elif len(shape) == 2:  # also without a row here: the others need this rank when they gather
            yield slice(0, shape.numel()), Matrices((1, *shape), member.full_rows, member.shard_group)
        else:
            count, rows, columns = shape  # sharded by whole matrices
            at_once = max(1, SPAN // (rows * columns))
            for first in range(0, count, at_once):
                last = min(first + at_once, count)
                span = slice(first * rows * columns, last * rows * columns)
                yield span, Matrices((last - first, rows, columns), rows)

    def view(self, slab: torch.Tensor, member: LocalParameter) -> torch.Tensor:
        """One parameter's part of a slab, flat."""
        return slab[self._ranges[member.name]]

    def states(self) -> dict[str, torch.Tensor]:
        """The slabs that outlive a step, by kind."""
        return {"master": self.master, **self.moments}

    def accumulate(self, member: LocalParameter, gradient: torch.Tensor) -> None:
        """Take over a flat gradient, or add it to those of this step."""
        total = self._sums.get(member.name)
        if self.host_grad is not None:
            into = torch.Tensor.copy_ if total is None else torch.Tensor.add_
            total = self.view(self.host_grad, member)
            move(total, gradient, into)
        elif total is None:
            # fp32 holds every gradient exactly, so the cast can wait for a second one.
            total = gradient if self.grad_dtype == torch.float32 else gradient.to(self.grad_dtype)
        else:
            total = add(total, gradient, self.grad_dtype)
        self._sums[member.name] = total

    def gradient(self, member: LocalParameter) -> torch.Tensor:
        """The sum of a parameter's gradients in this step, flat; zero where none came."""
        if member.name not in self._sums:
            home = member.tensor.new_empty(member.tensor.numel())
            home = home if self.host_grad is None else self.view(self.host_grad, member)
            self._sums[member.name] = home.zero_()
        return self._sums[member.name]

    def forget_gradients(self) -> None:
        self._sums = {}

    def step(self, lr: float, step: int, scale: torch.Tensor | None) -> None:
        """Update the masters from the gradients times `scale` (None: 1) and write them to the parameters."""
        for member in self.members:
            views = {kind: self.view(slab, member) for kind, slab in self.states().items()}
            master, gradient = views.pop("master"), self.gradient(member)
            if isinstance(self.rule, FusedAdamW):
                parameter = local(member.parameter).view(-1)
                self.rule.update_parameter(master, gradient, *views.values(), parameter, scale, self._decay, lr, step)
                continue
            for span, matrices in self._parts(member):
                homes = {kind: moment[span] for kind, moment in views.items()}
                self._update(master[span], gradient[span], homes, matrices, lr, step, scale)
        if not isinstance(self.rule, FusedAdamW):
            self.write_parameters()

    def _update(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        homes: dict[str, torch.Tensor],
        matrices: Matrices | None,
        lr: float,
        step: int,
        scale: torch.Tensor | None,
    ) -> None:
        moments = homes
        if self._place.staged:
            moments = {kind: home.to(self._place.compute, copy=True) for kind, home in homes.items()}
        grad = gradient.float()
        if scale is not None:  # at most one copy of the span
            grad = torch.mul(grad, scale.to(grad.device), out=None if grad is gradient else grad)
        self.rule.update(Part(master, grad, moments, self._decay, matrices), lr, step)
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

    def squared_norm(self) -> torch.Tensor | None:
        """Sum of squares of the gradients, 0-dim fp64; None without a parameter."""
        # A GPU sums fp32 in a tree; a CPU sums one after the other, which over millions of elements needs fp64.
        dtype = torch.float64 if self._place.compute.type == "cpu" else torch.float32
        norms = [
            torch.linalg.vector_norm(gradient[span], dtype=dtype)
            for gradient in map(self.gradient, self.members)
            for span in flat_spans(gradient.numel())
        ]
        return torch.stack(norms).double().square().sum() if norms else None


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
        """What has accumulated so far, by parameter name, in the shard's shape."""
        return {m.name: slab.gradient(m).view(m.tensor.shape) for slab, m in self._members()}

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """Norm of the accumulated gradients of the whole model, 0-dim fp32 on the device; one all-reduce."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for squared in (slab.squared_norm() for slab in self._slabs):
            if squared is not None:
                total += squared.to(self._device)
        if self._norm_group is not None:
            dist.all_reduce(total, group=self._norm_group)
        return total.sqrt().float()

    @torch.no_grad()
    def nonfinite_parameters(self) -> list[str]:
        """Names of this rank's parameters whose accumulated gradient is not finite; waits for the device once."""
        names, largest = [], []
        for slab, member in self._members():
            if member.tensor.numel():
                names.append(member.name)
                # The maximum keeps NaN and needs no temporary, unlike isfinite.
                largest.append(torch.linalg.vector_norm(slab.gradient(member), ord=torch.inf).float())
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
        tensors = [t for slab in self._slabs for t in (*slab.states().values(), slab.host_grad) if t is not None]
        return sum(t.nbytes for t in tensors if t.device.type == "cpu") / GIB

    def describe(self) -> list[str]:
        """Dtype, place and size of every kind of slab, for the start-up log."""
        rules = " + ".join(dict.fromkeys(type(slab.rule).__name__ for slab in self._slabs))
        sizes: dict[tuple[str, torch.dtype, torch.device], int] = {}
        for slab, member in self._members():
            kinds = {"parameters": member.tensor, **{k: slab.view(t, member) for k, t in slab.states().items()}}
            if slab.host_grad is not None:
                kinds["gradients"] = slab.view(slab.host_grad, member)
            for kind, tensor in kinds.items():
                key = (kind, tensor.dtype, tensor.device)
                sizes[key] = sizes.get(key, 0) + tensor.nbytes
        lines = [
            f"  {kind}: {_name(dtype)} on {device}, {size / GIB:.3f} GiB"
            for (kind, dtype, device), size in sizes.items()
        ]
        if not any(kind == "gradients" for kind, _, _ in sizes):
            dtypes = dict.fromkeys(_name(slab.grad_dtype) for slab in self._slabs)
            lines.append(f"  gradients: as they come, from a step's second micro-batch on in {', '.join(dtypes)}")
        return [f"optimizer {rules}, offload {self._offload}", *lines]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def accumulate_into(slab: Slab, member: LocalParameter) -> Callable[[nn.Parameter], None]:
    """A hook that hands the parameter's gradient to the slab, so that none accumulates in the parameter's dtype."""

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
