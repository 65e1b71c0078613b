"""FSDP2 over two meshes: one unit per block, its dense parameters on one mesh and its experts on another.

A separate FSDP unit for the experts would put its hooks inside the block and break the compiled graph. A mesh per
parameter inside one unit needs `ShardPlacementResult`, which torch has from 2.13 on and keeps in a private module;
this file is the only one that knows. Where the experts' mesh has one rank there is nothing to shard, and they are
left out of FSDP in every version, which also saves its copies.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from trainer.config import ConfigError
from trainer.models.moe import Experts
from trainer.parallel.mesh import Mesh

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
except ImportError:  # torch before 2.13
    ShardPlacementResult = None


def shard(model: nn.Module, mesh: Mesh, grad_dtype: torch.dtype) -> str:
    """Apply FSDP2 to every block and the root, in place; returns in words what was chosen.

    Gradients are summed over ranks (the loss is already divided by the global token count), in grad_dtype.
    Raises ConfigError where this torch cannot place the experts.
    """
    if mesh.world_size == 1:
        return "one rank: no FSDP"
    experts = {p for module in model.modules() if isinstance(module, Experts) for p in module.parameters()}
    arguments = {"mesh": mesh.dense, "mp_policy": MixedPrecisionPolicy(reduce_dtype=grad_dtype)}
    if not experts or mesh.ep == 1:
        chosen = f"FSDP2 over {mesh.dense.size()} ranks"
    elif mesh.experts.size() == 1:
        arguments["ignored_params"] = experts
        chosen = f"FSDP2 over {mesh.dense.size()} ranks, experts whole on their expert-parallel rank"
    elif ShardPlacementResult is None:
        raise ConfigError(
            f"parallelism.ep={mesh.ep} on {mesh.world_size} ranks shards experts over a second mesh, which torch "
            f"{torch.__version__} cannot do: use torch >= 2.13 or parallelism.ep={mesh.world_size}"
        )
    else:
        info = (
            HSDPMeshInfo(mesh.experts, shard_mesh_dim=1, replicate_mesh_dim=0)
            if mesh.experts.ndim == 2
            else FSDPMeshInfo(mesh.experts, shard_mesh_dim=0)
        )
        arguments["shard_placement_fn"] = lambda p: ShardPlacementResult(Shard(0), info) if p in experts else None
        chosen = f"FSDP2 over {mesh.dense.size()} ranks, experts over {mesh.experts.size()}, a mesh per parameter"
    for block in model.layers:
        fully_shard(block, **arguments)
    fully_shard(model, **arguments)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    return chosen


def local_rows(parameter: torch.Tensor) -> tuple[int, int]:
    """Start and end of this rank's rows (dim 0) in the parameter as FSDP sees it, split as torch.chunk does."""
    rows = parameter.shape[0]
    if not isinstance(parameter, DTensor):
        return 0, rows
    axis = next(i for i, placement in enumerate(parameter.placements) if placement.is_shard())
    per_rank = -(-rows // parameter.device_mesh.size(axis))
    start = min(rows, parameter.device_mesh.get_local_rank(axis) * per_rank)
    return start, min(rows, start + per_rank)


def row_group(parameter: torch.Tensor) -> torch.distributed.ProcessGroup | None:
    """The group over which the parameter's rows are split; None where this rank holds them all."""
    if not isinstance(parameter, DTensor):
        return None
    axis = next(i for i, placement in enumerate(parameter.placements) if placement.is_shard())
    return parameter.device_mesh.get_group(axis)
