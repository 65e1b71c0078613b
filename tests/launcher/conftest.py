"""How the launcher's tests compose: in this process, through the same rewriting that the command line takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from launcher import overrides
from launcher.machine import Machine
from launcher.resolve import resolve
from launcher.schema import to_config
from trainer.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"


@pytest.fixture
def machine(tmp_path) -> Machine:
    """A machine without SLURM, GPUs and a W&B key."""
    return Machine(cwd=tmp_path, sbatch=False, gpus=0, memory_gib=24.0, wandb_key=False)


@cache
def compose_config(*arguments: str) -> RunConfig:
    """What the command line composes, before it is resolved; flags are not supported."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("config", overrides.rewrite(list(arguments), CONF))
    return to_config(OmegaConf.to_container(composed, resolve=True))


@pytest.fixture(scope="session")
def compose() -> Callable[..., RunConfig]:
    return compose_config


@pytest.fixture
def resolved(machine) -> Callable[..., RunConfig]:
    """`resolved("model=qwen3_4b", ...)`: what run.json would hold."""
    return lambda *arguments: resolve(compose_config(*arguments), machine)


@pytest.fixture
def command(tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """`command("model=tiny", ...)`: the real `python -m launcher`, in an empty directory, without SLURM on PATH."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("HYDRA_", "WANDB_"))}
        clean |= {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **environment}
        arguments = [sys.executable, "-m", "launcher", *arguments]
        return subprocess.run(
            arguments, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=120, check=False
        )

    return run
