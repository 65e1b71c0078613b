"""The peak against which utilisation is reported: from the table, measured, or given. Never a guess."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import torch

from trainer.config import ConfigError
from trainer.flops import peak_flops


def resolve_peak(setting: str, device_name: str, device: torch.device) -> tuple[float | None, str]:
    """Peak FLOP/s of one device for benchmark.peak_flops, and where it comes from (or why there is none)."""
    if setting == "auto":
        peak = peak_flops(device_name)
        if peak is None:
            return None, f"no peak is known for {device_name!r}: set benchmark.peak_flops=<FLOP/s> or measured"
        return peak, f"table of dense bf16 peaks, {device_name}"
    if setting == "measured":
        if device.type != "cuda":
            return None, f"benchmark.peak_flops=measured needs a GPU, this is {device_name!r}: give a number"
        size = 8192
        return measured_flops(device, size), f"measured: median of bf16 matrix products of {size} on {device_name}"
    try:
        peak = float(setting)
    except ValueError:
        peak = math.nan
    if not 0 < peak < math.inf:
        raise ConfigError(f"benchmark.peak_flops={setting!r}: give auto, measured, or a positive number of FLOP/s")
    return peak, f"benchmark.peak_flops={setting}"


def measured_flops(device: torch.device, size: int, repeats: int = 30) -> float:
    """FLOP/s of a square bf16 product, the median after warm-up; a few hundred milliseconds at size 8192."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    for _ in range(10):
        torch.mm(a, b, out=out)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        torch.mm(a, b, out=out)
        mark.record()
    torch.cuda.synchronize(device)
    median_ms = statistics.median(start.elapsed_time(end) for start, end in pairwise(marks))
    return 2 * size**3 / (median_ms * 1e-3)
