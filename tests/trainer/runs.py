"""Small runs that the laws of the trainer compare: one model, uneven packed batches, five steps on any layout."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer.build import build
from trainer.compile import graph_breaks
from trainer.config import DataConfig, ModelConfig, OptimizerConfig, ParallelismConfig, RunConfig, from_dict, to_dict
from trainer.data import Batch
from trainer.models.moe import Router
from trainer.parallel import local
from trainer.parallel.mesh import build_mesh
from trainer.step import forward_backward, refuse_nonfinite

SEQ = 24
MODEL = ModelConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=48,
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, vocab_size=64, router_aux_loss_coef=0.01,
    initializer_range=0.2,
)  # fmt: skip


def make_config(world, ep, dp_replicate=1, model=MODEL, dtype="fp32", **modes):
    """A run on `world` ranks, written as run.json would hold it."""
    run = RunConfig(
        model=model,
        parallelism=ParallelismConfig(
            nodes=1, gpus_per_node=world, dp_replicate=dp_replicate, dp_shard=world // dp_replicate, ep=ep
        ),
        # The usual eps would make a full update of a gradient that is nothing but rounding.
        optimizer=OptimizerConfig(lr=1e-2, clip_norm=0.5, eps=1e-5),
        data=DataConfig(seq_len=SEQ, global_batch_size=4),
    )
    data = to_dict(run)
    for key, value in {"offload": "none", "ac": "none", "compile": "none", **modes}.items():
        data[key]["mode"] = value
    data["train"]["param_dtype"] = dtype
    return to_dict(from_dict(data))


def make_batch(step, index):
    """Micro-batch `index` of a step: packed documents, padding, and very uneven numbers of supervised tokens."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    input_ids = torch.randint(0, 64, (1, SEQ), generator=generator)
    labels = torch.randint(0, 64, (1, SEQ), generator=generator)
    labels[0, [1, 5, 23, 0][index % 4] :] = -100  # 1, 5, 23 and 0 supervised tokens
    document_ids = torch.tensor([[0] * 9 + [1] * 11 + [-1] * 4])
    position_ids = torch.cat((torch.arange(9), torch.arange(11), torch.zeros(4, dtype=torch.long)))[None]
    return Batch(input_ids=input_ids, labels=labels, position_ids=position_ids, document_ids=document_ids)


def whole(name, parameter, tensor, mesh):
    """The full tensor behind this rank's part: rows of FSDP, then experts of the expert-parallel ranks."""
    if isinstance(parameter, DTensor):
        tensor = DTensor.from_local(
            tensor, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        ).full_tensor()
    if ".experts." in name and mesh.ep > 1:
        parts = [torch.empty_like(tensor) for _ in range(mesh.ep)]
        dist.all_gather(parts, tensor.contiguous(), group=mesh.ep_group)
        tensor = torch.cat(parts)
    return tensor.clone()


def routing_of(model, batch):
    """Expert ids and the smallest gap between the last chosen and the first refused probability."""
    seen = []
    hooks = [m.register_forward_hook(lambda *c: seen.append(c[-1])) for m in model.modules() if isinstance(m, Router)]
    with torch.no_grad():
        model(batch.input_ids, batch.position_ids, batch.document_ids)
    for hook in hooks:
        hook.remove()
    ids = torch.stack([ids for _, ids, _ in seen])
    ordered = torch.stack([probabilities.sort(descending=True).values for _, _, probabilities in seen])
    return ids, (ordered[..., ids.shape[-1] - 1] - ordered[..., ids.shape[-1] :].amax(-1)).min().item()


def five_steps(config_dict, micro_batches=4):
    """Train 5 steps of 4 micro-batches; returns losses, norms, first gradients, last weights, counts and routing."""
    config = from_dict(config_dict)
    mesh = build_mesh(config.parallelism, torch.device("cpu"))
    model, optimizer, chosen = build(config, mesh)
    losses, norms, first = [], [], {}
    per_rank = micro_batches // mesh.world_size
    for step in range(5):
        batches = [make_batch(step, m * mesh.world_size + mesh.rank) for m in range(per_rank)]
        totals = forward_backward(model, batches, config, mesh).wait()
        norm = optimizer.grad_norm()
        refuse_nonfinite(step + 1, totals, norm.item(), optimizer, mesh)
        if step == 0:
            accumulated = optimizer.gradients()
            for name, parameter in model.named_parameters():
                first[name] = whole(name, parameter, accumulated[name], mesh)
            counts = totals.tokens_per_expert
        optimizer.clip(norm)
        optimizer.step(config.optimizer.lr)
        optimizer.zero_grad()
        losses.append(totals.loss)
        norms.append(norm.item())
    weights = {name: whole(name, p, local(p), mesh) for name, p in model.named_parameters()}
    # The hooks that look at the routing cannot be traced.
    ids, margin = routing_of(model, make_batch(99, 2)) if config.compile.mode == "none" else (None, None)
    breaks = graph_breaks()
    return {
        "losses": losses, "norms": norms, "gradients": first, "weights": weights, "counts": counts, "ids": ids,
        "margin": margin, "chosen": chosen, "graph_breaks": breaks,
    }  # fmt: skip
