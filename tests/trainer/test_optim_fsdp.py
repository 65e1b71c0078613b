"""With FSDP2 the slabs hold the reduced gradients, micro-batch after micro-batch, and the steps are those of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer.config import DataConfig, OffloadConfig, OptimizerConfig, ParallelismConfig, RunConfig, TrainConfig
from trainer.optim.optimizer import build_optimizer
from trainer.optim.slabs import LocalParameter
from trainer.parallel import local

STEPS, MICRO_BATCHES, WIDTH = 3, 2, 10


class Model(nn.Module):
    """Two linear layers; with 3 rows over 2 ranks one shard is shorter, with 1 row one is empty."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, 1, bias=False)])
        self.scale = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x):
        return self.layers[1](self.layers[0](x * self.scale).tanh())


def train(dtype, mode, name):
    """Train over the ranks, or alone; returns the full weights in fp32 and the norms."""
    distributed = dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    with torch.device("meta"):
        model = Model().to(dtype)
    if distributed:
        mesh = init_device_mesh("cpu", (ranks,))  # also where there is a GPU
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            full = torch.randn(p.shape, generator=generator).to(dtype)
            if distributed:
                first = rank * -(-p.shape[0] // ranks)
                full = full[first : first + local(p).shape[0]]
            local(p).copy_(full)
    members = [
        LocalParameter(
            name=n,
            tensor=local(p),
            parameter=p,
            decay=p.ndim > 1,
            matrix=p.ndim > 1,
            shard_group=dist.group.WORLD if distributed else None,
            full_rows=p.shape[0],
        )
        for n, p in model.named_parameters()
    ]
    config = RunConfig(
        parallelism=ParallelismConfig(nodes=1, gpus_per_node=ranks, dp_shard=ranks, ep=1),
        data=DataConfig(global_batch_size=MICRO_BATCHES * ranks),
        optimizer=OptimizerConfig(name=name, clip_norm=0.5),
        offload=OffloadConfig(mode=mode),
        train=TrainConfig(grad_dtype="fp32"),
    )
    optimizer = build_optimizer(config, members, torch.device("cpu"), dist.group.WORLD if distributed else None)
    norms = []
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            rows = torch.randn(4, WIDTH, generator=generator).to(dtype)  # the same on every rank
            model(rows[rank::ranks]).square().sum().backward()
            assert all(p.grad is None for p in model.parameters())
        norms.append(optimizer.grad_norm().item())
        optimizer.clip(torch.tensor(norms[-1]))
        optimizer.step(1e-2)
        optimizer.drain()
        optimizer.zero_grad()
    weights = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return {n: p.detach().float().numpy() for n, p in weights.items()}, norms


@pytest.mark.parametrize(
    "name, mode", [("adamw", "none"), ("adamw", "full"), ("sign_sgd", "optimizer"), ("muon", "none")]
)
def test_two_ranks_equal_one_process(ranks, name, mode):
    expected, expected_norms = train(torch.float32, mode, name)
    assert min(expected_norms) > 0.5
    for weights, norms in ranks(2, train, torch.float32, mode, name):
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        for n, p in weights.items():
            torch.testing.assert_close(p, expected[n], rtol=1e-5, atol=1e-6, msg=lambda m, n=n: f"{n}: {m}")


def test_bf16_parameters_with_fp32_slabs(ranks):
    expected, expected_norms = train(torch.bfloat16, "none", "adamw")
    results = ranks(2, train, torch.bfloat16, "none", "adamw")
    for weights, norms in results:
        assert norms == pytest.approx(expected_norms, rel=0.02)
        assert norms == results[0][1]
        for n, p in weights.items():
            torch.testing.assert_close(p, expected[n], rtol=0.02, atol=0.02)
