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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.config import looks_secret
from trainer.metrics.files import known

PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "tiktoken", "wandb", "submitit", "hydra-core")

NODE = ("gpus", "topology", "driver", "cuda", "cudnn", "nccl", "torch", "python", "os", "cpu_count")
SAME_EVERYWHERE = ("torch", "cuda", "cudnn", "nccl", "driver", "python", "gpus")
SLURM = ("JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID", "JOB_NODELIST", "JOB_PARTITION", "JOB_ACCOUNT", "JOB_QOS")
SLURM += ("RESTART_COUNT", "CLUSTER_NAME", "CPUS_PER_TASK", "NTASKS", "NNODES")
PREFIXES = ("NCCL_", "TORCH", "PYTORCH_", "CUDA_", "CUBLAS_", "OMP_", "MKL_", "KMP_", "HF_", "WANDB_", "UCX_", "FI_")
PREFIXES += ("GLOO_", "TRITON_", "MASTER_", "MOE_LAUNCHER_", "NVIDIA_", "TOKENIZERS_")
NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "HTTP_PROXY", "HTTPS_PROXY")
NAMES += ("http_proxy", "https_proxy", "NO_PROXY", "no_proxy")
SECRET_VALUE = "<set>"


def environment() -> dict[str, Any]:
    """What this process runs on; what cannot be found out is absent. Values that look secret are left out."""
    cuda = torch.cuda.is_available()
    return known(
        {
            "host": host_name(),
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
            "topology": _topology() if cuda and os.environ.get("LOCAL_RANK", "0") == "0" else None,
            "packages": {name: version for name in PACKAGES if (version := _version(name))},
            "slurm": slurm_ids(os.environ) or None,
            "variables": relevant_variables(os.environ),
        }
    )


def cluster_environment(every_rank: list[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """environment.json of a run, from every rank's environment in their order, and in words in what its nodes differ.

    It is rank 0's, with the hosts of all ranks, and every node's GPUs, topology and versions.
    """
    nodes: dict[str, dict[str, Any]] = {}
    for rank in every_rank:
        nodes.setdefault(rank["host"], {key: rank[key] for key in NODE if key in rank})
    whole = every_rank[0] | {"hosts": [rank["host"] for rank in every_rank], "nodes": nodes}
    differences = []
    for key in SAME_EVERYWHERE:
        values: dict[str, list[str]] = {}
        for host, node in nodes.items():
            values.setdefault(_short(node.get(key)), []).append(host)
        if len(values) > 1:
            shown = "; ".join(f"{value} on {', '.join(hosts[:4])}" for value, hosts in values.items())
            differences.append(f"warning: nodes differ in {key}: {shown}")
    return whole, differences


def _short(value: Any) -> str:
    """A value for a line of the log; GPUs by their names."""
    return ", ".join(sorted({gpu["name"] for gpu in value})) if isinstance(value, list) else str(value)


def host_name() -> str:
    return socket.gethostname()


def slurm_ids(variables: Mapping[str, str]) -> dict[str, str]:
    """Which job this is, by SLURM's own names in lower case."""
    return {name.lower(): variables[f"SLURM_{name}"] for name in SLURM if variables.get(f"SLURM_{name}")}


def relevant_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that change how a run behaves; secrets are only said to be set."""
    return {
        name: SECRET_VALUE if looks_secret(name) else re.sub(r"//[^/@\s]+@", "//***@", value)
        for name, value in sorted(variables.items())
        if name.startswith(PREFIXES) or name in NAMES
    }


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
