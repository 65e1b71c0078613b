"""Makes FSDP2's all-gather wait for what the compute stream waits for.

FSDP2 reads the shards on a stream of its own, which waits for the compute stream only once per step: its public
`set_post_optim_event` is one moment for the whole model, and an update that ends block by block needs one for each.
This file is the only one that knows the private names.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def hold_all_gather(module: nn.Module, moment: Any) -> None:
    """Let the gathering of this module's parameters start after `moment` (a torch.cuda.Event; None: at once)."""
    if moment is None or not isinstance(module, FSDPModule):
        return
    state = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    for group in groups:
        if group is not None:
            group._wait_all_gather_streams_on_event(moment)
