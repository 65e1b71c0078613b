"""Where optimizer states live, in host memory or on the device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch

SPAN = 2**26  # elements that are worked on at once: 256 MiB of fp32


@dataclass(frozen=True)
class Placement:
    """Where slabs live: masters where the step is computed, moments perhaps elsewhere."""

    compute: torch.device
    moments: torch.device
    pinned: bool  # what lives on the host

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            return host_zeros(numel, dtype, self.pinned)
        return torch.zeros(numel, dtype=dtype, device=device)


def placement(mode: str, device: torch.device) -> Placement:
    """offload.mode as a placement."""
    host = torch.device("cpu")
    compute = host if mode == "full" else device
    return Placement(compute, host if mode == "optimizer" else compute, pinned=device.type == "cuda")


def host_zeros(numel: int, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
    """A zeroed tensor [numel] in host memory; pinned, a GPU copies to and from it at full speed.

    torch's own pinned allocator rounds up to a power of two (46 GiB of moments would take 64), so the pages of an
    ordinary tensor are registered instead, for as long as the tensor lives. Raises CudaError if they cannot be.
    """
    tensor = torch.zeros(numel, dtype=dtype)
    if pinned and numel:
        cudart = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        # At exit the driver may be gone already, and the process gives everything back anyway.
        weakref.finalize(tensor, cudart.cudaHostUnregister, tensor.data_ptr()).atexit = False
    return tensor


def flat_spans(numel: int, at_most: int) -> Iterator[slice]:
    """Ranges of at most `at_most` elements."""
    return (slice(start, min(start + at_most, numel)) for start in range(0, numel, at_most))


def move(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy flat tensors across devices and dtypes, with temporaries of bounded size."""
    for span in flat_spans(target.numel(), SPAN):
        target[span].copy_(source[span].to(target.device))
