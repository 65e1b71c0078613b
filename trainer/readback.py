"""A number that a device will know, on its way to the host."""

from __future__ import annotations

import torch


class Readback:
    """Copies a tensor to the host behind what the device was given so far; nobody waits until wait() is called."""

    def __init__(self, tensor: torch.Tensor):
        self._arrived = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.current_stream().record_event()
        else:
            self._host = tensor.clone()

    def wait(self) -> torch.Tensor:
        """The tensor on the host; waits for the copy only, not for what was queued after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
