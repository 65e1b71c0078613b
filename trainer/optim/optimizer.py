"""The optimizer of one rank: gradients go to it as they come, and it owns fp32 masters and moments.

Offloading is only the question of where slabs live, who computes, and when. Every pass goes in spans of bounded size, so
that a step needs little memory besides the slabs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from trainer.config import ConfigError, RunConfig
from trainer.kernels.capability import has_triton
from trainer.memory.offload import move, placement
from trainer.metrics.mark import Mark
from trainer.optim.adamw import AdamW, FusedAdamW
from trainer.optim.muon import Muon, sharded_rows
from trainer.optim.on_host import OnHost
from trainer.optim.sign_sgd import SignSGD
from trainer.optim.slabs import LocalParameter, Slab
from trainer.optim.streamed_moments import StreamedMoments
from trainer.optim.updates import OnDevice
from trainer.parallel import local
from trainer.parallel.all_gather import hold_all_gather

GIB = 2**30
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class SlabOptimizer:
    """Owns the slabs of this rank; from its construction on, gradients go to them and `.grad` stays None.

    Where states are offloaded, an update may end after step() has returned: wait_before_use() makes a model's forward
    pass wait for it, and whoever else reads parameters calls drain() before.
    """

    def __init__(
        self,
        slabs: list[Slab],
        updates: OnDevice,
        clip_norm: float,
        device: torch.device,
        norm_group: ProcessGroup | None,
        offload: str,
    ):
        self._slabs, self._updates, self._offload = slabs, updates, offload
        self._clip_norm, self._device, self._norm_group = clip_norm, device, norm_group
        self._members = {member.name: (slab, member) for slab in slabs for member in slab.members}
        self._steps = 0
        self._begun = False  # the step that is counted last updates parameters already
        self._scale: torch.Tensor | None = None  # of the gradients in the next step
        self._early = offload != "none" and not clip_norm and not any(slab.rule.of_matrices for slab in slabs)
        self.refresh_masters()
        for slab, member in self._members.values():
            member.parameter.register_post_accumulate_grad_hook(self._accumulate_into(slab, member))

    def _accumulate_into(self, slab: Slab, member: LocalParameter) -> Callable[[nn.Parameter], None]:
        """A hook that takes the parameter's gradient over, so that none accumulates in the parameter's dtype."""

        @torch.no_grad()
        def hook(parameter: nn.Parameter) -> None:
            # FSDP2 calls this with the reduced, sharded gradient, on the stream that reduced it.
            self._updates.accumulate(slab, member, local(parameter.grad).reshape(-1))
            parameter.grad = None

        return hook

    def wait_before_use(self, model: nn.Module) -> None:
        """Let every block's forward, and the model's for what is in no block, wait for its own parameters only."""
        if self._offload == "none":
            return
        for module, prefix in [(block, f"layers.{i}.") for i, block in enumerate(model.layers)] + [(model, "")]:
            names = [n for n in self._members if (n.startswith(prefix) if prefix else not n.startswith("layers."))]

            def wait(module: nn.Module, inputs: object, names: list[str] = names) -> None:
                for moment in self._updates.ready(names):
                    hold_all_gather(module, moment)

            module.register_forward_pre_hook(wait, prepend=True)  # before FSDP gathers

    @property
    def updates_early(self) -> bool:
        """Whether parameters change before the gradients of the whole step are known: offloaded, without clipping."""
        return self._early

    def expect_last_gradients(self, lr: float, supervised_tokens: Callable[[], int]) -> None:
        """The next gradients are the last ones of this step, which has `supervised_tokens` (0: it updates nothing)."""
        self._updates.final = True
        if self._early and supervised_tokens():
            self._count()
            self._updates.begin(lr, self._steps)

    def _count(self) -> None:
        if not self._begun:
            self._steps, self._begun = self._steps + 1, True

    def gradients(self) -> dict[str, torch.Tensor]:
        """What has accumulated so far, by parameter name, in the shard's shape."""
        return {n: self._updates.gradient(slab, m).view(m.tensor.shape) for n, (slab, m) in self._members.items()}

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """Norm of the accumulated gradients of the whole model, 0-dim fp32 on the device; one all-reduce."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for norms in self._updates.norms():
            by_device.setdefault(norms.device, []).append(norms)
        for norms in by_device.values():
            total += torch.cat(norms).double().square().sum().to(self._device)
        if self._norm_group is not None:
            dist.all_reduce(total, group=self._norm_group)
        return total.sqrt().float()

    @torch.no_grad()
    def nonfinite_parameters(self) -> list[str]:
        """Names of this rank's parameters whose accumulated gradient is not finite; waits for the device once."""
        gradients = {name: gradient for name, gradient in self.gradients().items() if gradient.numel()}
        # The maximum keeps NaN and needs no temporary, unlike isfinite.
        largest = [torch.linalg.vector_norm(g, ord=torch.inf).float() for g in gradients.values()]
        finite = torch.stack(largest).isfinite().tolist() if largest else []
        return [name for name, ok in zip(gradients, finite, strict=True) if not ok]

    @torch.no_grad()
    def clip(self, norm: torch.Tensor) -> None:
        """Let the next step scale the gradients by min(1, clip_norm / (norm + 1e-6)); does not wait for the device."""
        if self._clip_norm:
            self._scale = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update masters and parameters from the accumulated gradients, which stay until zero_grad()."""
        self._count()
        self._updates.update(lr, self._steps, self._scale)
        self._scale, self._begun = None, False

    def zero_grad(self) -> None:
        """Begin a new sum of gradients, without a clipping of the former one."""
        self._scale = None
        self._updates.forget_gradients()

    @torch.no_grad()
    def drain(self) -> None:
        """Wait until every update has reached masters, moments and parameters."""
        self._updates.drain()

    def take_waits(self) -> list[tuple[Mark, Mark]]:
        """Begin and end of every wait of the compute stream for an update since the last call."""
        waits, self._updates.waits = self._updates.waits, []
        return waits

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take the masters from the parameters, after weights were loaded into these."""
        self.drain()
        for slab in self._slabs:
            slab.read_parameters()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`step`, and `<kind>.<parameter name>` for masters and moments: views of the slabs in the shard's shape."""
        self.drain()
        state = {"step": torch.tensor(self._steps)}
        for slab in self._slabs:
            for member in slab.members:
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
        """GiB of slabs and of what stages them in host memory."""
        tensors = [*(t for slab in self._slabs for t in slab.states().values()), *self._updates.host_tensors()]
        return sum(t.nbytes for t in tensors if t.device.type == "cpu") / GIB

    def describe(self) -> list[str]:
        """Dtype, place and size of every kind of slab, for the start-up log."""
        rules = " + ".join(dict.fromkeys(type(slab.rule).__name__ for slab in self._slabs))
        sizes: dict[tuple[str, torch.dtype, torch.device], int] = {}
        for slab, member in self._members.values():
            kinds = {"parameters": member.tensor, **{k: slab.view(t, member) for k, t in slab.states().items()}}
            for kind, tensor in kinds.items():
                key = (kind, tensor.dtype, tensor.device)
                sizes[key] = sizes.get(key, 0) + tensor.nbytes
        lines = [
            f"  {kind}: {str(dtype).removeprefix('torch.')} on {device}, {size / GIB:.3f} GiB"
            for (kind, dtype, device), size in sizes.items()
        ]
        return [f"optimizer {rules}, offload {self._offload}", *lines, *self._updates.describe()]


def build_optimizer(
    config: RunConfig, parameters: list[LocalParameter], device: torch.device, norm_group: ProcessGroup | None
) -> SlabOptimizer:
    """The optimizer of this rank's parameters, with masters taken from them.

    `norm_group` holds every element of the model exactly once; None: this process does. Every rank of it passes the
    same names in the same order. Raises ConfigError where optimizer and offload do not fit.
    """
    optimizer, mode, device = config.optimizer, config.offload.mode, torch.device(device)
    if optimizer.name == "muon" and mode == "full":
        raise ConfigError("optimizer=muon needs the GPU for its step: offload=full does not; use none or optimizer")
    for p in parameters:
        if p.shard_group is not None:
            count = sharded_rows(p.full_rows, p.shard_group.rank(), p.shard_group.size())[1]
            assert p.tensor.shape[0] == count, f"{p.name}: {p.tensor.shape[0]} local rows, {count} expected"
    fused = mode != "full" and has_triton(device)
    rules = {"adamw": (FusedAdamW if fused else AdamW)(optimizer), "sign_sgd": SignSGD(), "muon": Muon(optimizer)}
    groups: dict[tuple[str, bool], list[LocalParameter]] = {}
    for p in parameters:
        rule = "adamw" if optimizer.name == "muon" and not p.matrix else optimizer.name
        groups.setdefault((rule, p.decay), []).append(p)
    place = placement(mode, device)
    slabs = [
        Slab(members, rules[rule], optimizer.weight_decay if decay else 0.0, place)
        for (rule, decay), members in groups.items()
    ]
    home = {member.name: slab for slab in slabs for member in slab.members}
    # A forward pass begins with what is in no block: FSDP gathers the head together with the embedding.
    in_order = sorted(parameters, key=lambda p: p.name.startswith("layers."))
    members = [(home[p.name], p) for p in in_order]
    grad_dtype = DTYPES[config.train.grad_dtype]
    if mode == "full":
        timeout_s = config.train.stall_timeout_s
        updates = OnHost(members, grad_dtype, device, config.offload.prefetch_gib, config.grad_accumulation, timeout_s)
    elif mode == "optimizer":
        updates = StreamedMoments(members, grad_dtype, device, config.offload.prefetch_gib)
    else:
        updates = OnDevice(members, grad_dtype)
    return SlabOptimizer(slabs, updates, optimizer.clip_norm, device, norm_group, mode)
