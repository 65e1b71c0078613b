"""torch.compile of every block, one compilation per kind of block."""

from __future__ import annotations

import sys

import torch
from torch import nn


def apply_compile(model: nn.Module, mode: str) -> None:
    """Compile every block's forward in place, without its FSDP hooks: fullgraph makes a graph break an error."""
    if mode == "none":
        return
    for block in model.layers:
        block.forward = torch.compile(block.forward, fullgraph=mode == "fullgraph")


def graph_breaks() -> int:
    """Graph breaks met so far in this process."""
    # Only Dynamo's private module counts them. Importing it takes a second, which a run that compiles nothing saves.
    dynamo = sys.modules.get("torch._dynamo.utils")
    return sum(dynamo.counters["graph_break"].values()) if dynamo else 0
