"""What resolve and check may know about the machine that submits, looked up once."""

from __future__ import annotations

import netrc
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

_SLURM_CONF = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/etc/slurm-llnl/slurm.conf")


@dataclass(frozen=True, kw_only=True)
class Machine:
    cwd: Path  # relative paths on the command line start here
    sbatch: bool  # SLURM takes jobs here
    gpus: int  # that this process may use
    memory_gib: float  # host memory, or what this container may use of it
    wandb_key: bool  # W&B would accept us


def look() -> Machine:
    """The machine this process runs on."""
    return Machine(
        cwd=Path.cwd(),
        sbatch=takes_slurm_jobs(),
        gpus=count_gpus(),
        memory_gib=host_memory_gib(),
        wandb_key=has_wandb_key(),
    )


def takes_slurm_jobs() -> bool:
    """Whether sbatch is on PATH and belongs to a cluster: SLURM's client packages alone submit nothing."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        return False
    if "SLURM_CONF" in os.environ or any(Path(path).exists() for path in _SLURM_CONF):
        return True
    scontrol = Path(sbatch).with_name("scontrol")
    if not scontrol.exists():
        return True
    try:  # a cluster without files on its clients is found through DNS
        asked = subprocess.run([scontrol, "ping"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return True
    return "configuration source" not in asked.stderr


def count_gpus(dev: Path = Path("/dev"), proc: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """NVIDIA GPUs this process may use. Files are counted where there are any: asking the driver can take a second."""
    devices = sum(path.name.removeprefix("nvidia").isdigit() for path in dev.glob("nvidia*"))
    driver = sum(1 for _ in proc.iterdir()) if proc.is_dir() else 0
    # A container sees the driver's whole list but has only its own device files; some have just one of the two.
    present = min(devices, driver) or max(devices, driver) or _listed_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, sum(1 for name in visible.split(",") if name.strip() and not name.strip().startswith("-")))


def _listed_gpus() -> int:
    """GPUs that nvidia-smi lists, where it is installed (WSL has neither kind of file)."""
    if not shutil.which("nvidia-smi"):
        return 0
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def host_memory_gib() -> float:
    """Memory of this machine or of the control group that we are in, in GiB."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(name).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return total / 2**30


def has_wandb_key() -> bool:
    """Whether WANDB_API_KEY is set or netrc has an entry for W&B's host."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return path.is_file() and netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
