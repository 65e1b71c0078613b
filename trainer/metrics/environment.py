"""What the run ran on: versions, driver, devices, and memory in use."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import torch

from trainer.metrics.files import known

PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "tiktoken", "wandb", "submitit", "hydra-core")


def environment(hosts: list[str] | None = None) -> dict[str, Any]:
    """What environment.json holds; what cannot be found out is absent. `hosts`: of all ranks, in their order."""
    cuda = torch.cuda.is_available()
    return known(
        {
            "host": socket.gethostname(),
            "hosts": hosts,
            "os": platform.platform(),
            "cpu_count": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "rocm": torch.version.hip,
            "cudnn": torch.backends.cudnn.version() if cuda else None,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
            "driver": driver_version(),
            "gpus": [_gpu(index) for index in range(torch.cuda.device_count())] if cuda else [],
            "topology": _topology() if cuda else None,
            "packages": {name: version for name in PACKAGES if (version := _version(name))},
        }
    )


def device_name(device: torch.device) -> str:
    """The GPU's name as its driver prints it, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Version of the NVIDIA kernel driver, None without one."""
    if not path.exists():
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text())
    return found.group(1) if found else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 2),
        "compute_capability": f"{properties.major}.{properties.minor}",
    }


def _topology() -> list[str] | None:
    """The node's links between GPUs and network cards, as nvidia-smi draws them."""
    if not shutil.which("nvidia-smi"):
        return None
    try:
        shown = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:  # a sick driver must not hold up the start
        return None
    plain = re.sub(r"\x1b\[\d*m", "", shown.stdout)  # it underlines its header
    return plain.splitlines() if shown.returncode == 0 else None


def peak_memory_gib(device: torch.device) -> dict[str, float]:
    """Most memory in use on the device since the last reset, `allocated` and `reserved`; empty on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "allocated": torch.cuda.max_memory_allocated(device) / 2**30,
        "reserved": torch.cuda.max_memory_reserved(device) / 2**30,
    }


def host_memory_gib() -> float:
    """Most host memory that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
