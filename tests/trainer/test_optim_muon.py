"""Muon on slabs is torch.optim.Muon on whole matrices, for stacks of experts and for rows spread over ranks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainer.config import OffloadConfig, OptimizerConfig, RunConfig
from trainer.memory import offload
from trainer.optim import muon
from trainer.optim.optimizer import build_optimizer
from trainer.optim.slabs import LocalParameter

LR, DECAY, MOMENTUM, STEPS = 0.02, 0.1, 0.9, 4
# Rows over 4 ranks: even; uneven with a short last rank; one row for the first of three; fewer rows than ranks.
SHAPES = {"layers.0.wide": (8, 40), "layers.0.tall": (37, 12), "layers.0.few": (9, 16), "layers.0.empty": (2, 24)}
EXPERTS = (5, 12, 20)


def full_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {**SHAPES, "layers.0.experts": EXPERTS, "embed": (30, 8), "layers.0.norm": (6,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def shard(name, tensor, rank, ranks):
    """This rank's rows (for experts: whole experts), split as FSDP does."""
    first, count = muon.sharded_rows(tensor.shape[0], rank, ranks)
    return tensor[first : first + count].clone()


def run_muon(mode="none"):
    """STEPS steps on this rank's rows, or on everything without a process group; returns the local weights."""
    group = dist.group.WORLD if dist.is_initialized() else None
    rank, ranks = (group.rank(), group.size()) if group else (0, 1)
    named = {name: nn.Parameter(shard(name, t, rank, ranks)) for name, t in full_tensors(0).items()}
    config = RunConfig(
        optimizer=OptimizerConfig(name="muon", weight_decay=DECAY, momentum=MOMENTUM, clip_norm=1.0),
        offload=OffloadConfig(mode=mode),
    )
    members = [
        LocalParameter(
            name=name,
            tensor=p.detach(),
            parameter=p,
            decay=p.ndim > 1,
            matrix=p.ndim > 1 and name.startswith("layers."),
            shard_group=group,
            full_rows=full_tensors(0)[name].shape[0],
        )
        for name, p in named.items()
    ]
    optimizer = build_optimizer(config, members, torch.device("cpu"), group)
    for step in range(1, STEPS + 1):
        for name, gradient in full_tensors(step).items():
            (named[name] * shard(name, gradient, rank, ranks)).sum().backward()
        optimizer.clip(optimizer.grad_norm())
        optimizer.step(LR)
        optimizer.zero_grad()
    return {name: p.detach().numpy() for name, p in named.items()}


def run_torch():
    """The same with torch.optim.Muon for every single matrix, and torch.optim.AdamW for the rest."""
    weights = full_tensors(0)
    matrices = {name: nn.Parameter(weights[name].clone()) for name in SHAPES}
    experts = [nn.Parameter(expert.clone()) for expert in weights["layers.0.experts"]]
    embed, norm = nn.Parameter(weights["embed"].clone()), nn.Parameter(weights["layers.0.norm"].clone())
    optimizers = [
        torch.optim.Muon(
            [*matrices.values(), *experts],
            lr=LR,
            weight_decay=DECAY,
            momentum=MOMENTUM,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW([embed], lr=LR, weight_decay=DECAY, betas=(0.9, 0.95)),
        torch.optim.AdamW([norm], lr=LR, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    for step in range(1, STEPS + 1):
        gradients = full_tensors(step)
        for name, p in matrices.items():
            p.grad = gradients[name]
        for p, gradient in zip(experts, gradients["layers.0.experts"], strict=True):
            p.grad = gradient
        embed.grad, norm.grad = gradients["embed"], gradients["layers.0.norm"]
        nn.utils.clip_grad_norm_([*matrices.values(), *experts, embed, norm], 1.0)
        for optimizer in optimizers:
            optimizer.step()
    named = {**matrices, "layers.0.experts": torch.stack(experts), "embed": embed, "layers.0.norm": norm}
    return {name: p.detach().numpy() for name, p in named.items()}


@pytest.mark.parametrize("mode", ["none", "optimizer"])
def test_equals_torch_muon_on_every_matrix(mode):
    ours, theirs, start = run_muon(mode), run_torch(), full_tensors(0)
    for name, expected in theirs.items():
        moved = abs(expected - start[name].numpy()).max()
        # Newton-Schulz runs in bf16 on both sides: its rounding is about 1 % of an update.
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=0.02 * moved, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_sharded_equals_unsharded(ranks, world_size):
    whole, parts = run_muon(), ranks(world_size, run_muon)
    assert world_size == 2 or parts[3]["layers.0.few"].shape[0] == 0 and parts[2]["layers.0.empty"].shape[0] == 0
    for name, expected in whole.items():
        joined = np.concatenate([part[name] for part in parts])
        torch.testing.assert_close(joined, expected, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_stacks_are_cut_at_whole_matrices_and_stay_the_same(monkeypatch):
    whole = run_muon()
    monkeypatch.setattr(offload, "SPAN", 2 * EXPERTS[1] * EXPERTS[2] + 1)
    pieces = run_muon()
    for name in whole:
        torch.testing.assert_close(pieces[name], whole[name], rtol=1e-6, atol=1e-7)


def test_singular_values_end_near_one():
    x = (
        torch.randn(3, 30, 50, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    )
    values = torch.linalg.svdvals(muon.orthogonalize(x.bfloat16()).float())
    assert values.min() > 0.5 and values.max() < 1.5
    assert (muon.orthogonalize(torch.zeros(2, 3, 4, dtype=torch.bfloat16)) == 0).all()


def test_rows_are_split_as_torch_chunk_does():
    for rows in range(1, 20):
        for size in range(1, 9):
            chunks = [len(chunk) for chunk in torch.arange(rows).chunk(size)]
            chunks += [0] * (size - len(chunks))
            assert [muon.sharded_rows(rows, rank, size)[1] for rank in range(size)] == chunks
