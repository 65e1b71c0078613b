"""The device mesh: dp_replicate x (efsdp x ep), ep innermost so that it stays inside a node.

Dense parameters are sharded over dp_shard = efsdp x ep; experts are split over ep and sharded over efsdp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.config import ConfigError, ParallelismConfig


@dataclass(frozen=True)
class Mesh:
    """This rank's place in the world and the groups that it talks to."""

    device: torch.device
    rank: int
    world_size: int
    ep: int
    ep_rank: int
    dense: DeviceMesh  # [dp_shard], or [dp_replicate, dp_shard]
    experts: DeviceMesh  # [efsdp], or [dp_replicate, efsdp]
    ep_group: dist.ProcessGroup
    shard_group: dist.ProcessGroup  # efsdp x ep: every element of the model is here exactly once

    def all_reduce(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce over all ranks, in place."""
        dist.all_reduce(values, op=op)
        return values

    def agree(self, flag: bool) -> bool:
        """True on every rank if `flag` is true on any of them."""
        return bool(self.all_reduce(torch.tensor(int(flag), device=self.device), dist.ReduceOp.MAX))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in the order of ranks."""
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


def build_mesh(config: ParallelismConfig, device: torch.device) -> Mesh:
    """Build the mesh in an initialised process group; raises ConfigError if its size is not the configuration's."""
    world_size = dist.get_world_size()
    if world_size != config.world_size:
        raise ConfigError(
            f"this job has {world_size} ranks, but parallelism.nodes={config.nodes} x parallelism.gpus_per_node="
            f"{config.gpus_per_node} asks for {config.world_size}: start that many, or prepare another run"
        )
    shape = (config.dp_replicate, config.efsdp, config.ep)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "efsdp", "ep"))
    dp_shard = mesh["efsdp", "ep"]._flatten("dp_shard")  # no public way to join two axes
    replicated = config.dp_replicate > 1
    if replicated:
        # A mesh of an axis and a flattened one has to be built anew: slicing does not know flattened axes in torch 2.11.
        dense = init_device_mesh(
            device.type, (config.dp_replicate, config.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
        )
    return Mesh(
        device=device,
        rank=dist.get_rank(),
        world_size=world_size,
        ep=config.ep,
        ep_rank=mesh["ep"].get_local_rank(),
        dense=dense if replicated else dp_shard,
        experts=mesh["dp_replicate", "efsdp"] if replicated else mesh["efsdp"],
        ep_group=mesh["ep"].get_group(),
        shard_group=dp_shard.get_group(),
    )
