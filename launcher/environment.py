"""Which environment variables a run inherits from the shell that starts it, and which ones would lead it astray."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # what a shell can export

# A shell inside an allocation, under torchrun or under mpirun describes another job: its ranks, its addresses, its CPUs.
_STALE_PREFIXES = (
    "SLURM_",
    "SBATCH_",
    "SRUN_",
    "SALLOC_",
    "PMI_",
    "PMIX_",
    "PMI2_",
    "OMPI_",
    "TORCHELASTIC_",
    "SUBMITIT_",
)
_STALE_NAMES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_KEPT = ("SLURM_CONF",)  # says where the cluster is, not which job this is


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that describe another job."""
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not (name in _STALE_NAMES or name.startswith(_STALE_PREFIXES))
    }


def threads_per_rank(ranks: int) -> int:
    """CPU threads for each of `ranks` processes of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)
