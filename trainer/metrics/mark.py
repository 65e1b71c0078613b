"""Points on a device's timeline."""

from __future__ import annotations

import time

import torch


class Mark:
    """Now; on a GPU the moment when it has done what is queued so far, which nobody waits for until it is read."""

    def __init__(self, device: torch.device):
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()
        self._host_s = time.perf_counter()

    def passed(self) -> bool:
        return self._event is None or self._event.query()

    def since(self, earlier: Mark) -> float:
        """Seconds from another mark of this device to this one, which is waited for."""
        if self._event is None:
            return self._host_s - earlier._host_s
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1000
