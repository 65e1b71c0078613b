"""Random weights that depend on the seed and the parameter's name only, never on how the model is split over ranks."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from trainer.models.moe import Experts
from trainer.parallel import local
from trainer.parallel.shard import local_rows


def _generator(device: torch.device, *parts: object) -> torch.Generator:
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, ep_rank: int) -> None:
    """Fill this rank's shards: norms with 1, everything else from N(0, initializer_range), as Hugging Face does.

    A dense matrix is drawn whole and cut; an expert is drawn under its global index.
    """
    std = model.config.initializer_range
    experts = {p: m for m in model.modules() if isinstance(m, Experts) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        shard, (start, stop) = local(parameter), local_rows(parameter)
        if parameter.ndim == 1:
            shard.fill_(1.0)
        elif parameter in experts:
            first = ep_rank * experts[parameter].num_local_experts + start
            for row, expert in enumerate(range(first, first + stop - start)):
                draw = torch.empty(parameter.shape[1:], device=shard.device)
                shard[row] = draw.normal_(0.0, std, generator=_generator(shard.device, seed, name, expert))
        elif stop > start:
            draw = torch.empty(parameter.shape, device=shard.device)
            shard.copy_(draw.normal_(0.0, std, generator=_generator(shard.device, seed, name))[start:stop])
