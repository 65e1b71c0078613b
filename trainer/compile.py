"""torch.compile of every block, one compilation per kind of block."""

from __future__ import annotations

import torch
from torch import nn
from torch._dynamo.utils import counters  # the only place where Dynamo counts graph breaks


def apply_compile(model: nn.Module, mode: str) -> None:
    """Compile every block's forward in place, without its FSDP hooks: fullgraph makes a graph break an error."""
    if mode == "none":
        return
    for block in model.layers:
        block.forward = torch.compile(block.forward, fullgraph=mode == "fullgraph")


def graph_breaks() -> int:
    """Graph breaks met so far in this process."""
    return sum(counters["graph_break"].values())
