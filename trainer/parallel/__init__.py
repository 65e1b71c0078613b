"""Mesh, sharding and the collectives of expert parallelism."""

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, sharing its storage and outside autograd; other tensors detached."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()
