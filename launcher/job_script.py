"""The shell text around a run, on SLURM and on this machine. Pure."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.resolve import is_file_name
from trainer.config import ConfigError, RunConfig

if TYPE_CHECKING:
    from launcher.run import Run

RUN_DIR = '"$run_dir"'  # the shell's word for the run directory: in an array each job has its own


def setup_lines(run: Run) -> list[str]:
    """Before the ranks start: the snapshot's code, the user's variables and lines. Raises ConfigError for line ends."""
    _refuse_newlines(run.config)
    snapshot = shlex.quote(str(run.snapshot.resolve()))
    exports = [f"export {name}={shlex.quote(value)}" for name, value in run.config.cluster.env.items()]
    return [f"export PYTHONPATH={snapshot}${{PYTHONPATH:+:$PYTHONPATH}}", *exports, *run.config.cluster.setup]


def local_script(run: Run) -> str:
    """What bash runs on this machine."""
    lines = ["#!/bin/bash", f"cd {shlex.quote(str(run.snapshot.resolve()))} || exit 1", *setup_lines(run)]
    command = [sys.executable, "-u", "-m", "launcher.local", str(run.path.resolve())]
    return "\n".join([*lines, f"exec {shlex.join(command)}", ""])


def run_dir_lines(paths: list[Path]) -> list[str]:
    """Sets run_dir: to the only path, or to the one that this job of an array is for."""
    words = [shlex.quote(str(path.resolve())) for path in paths]
    if len(words) == 1:
        return [f"run_dir={words[0]}"]
    return ["run_dirs=(", *(f"  {word}" for word in words), ")", "run_dir=${run_dirs[$SLURM_ARRAY_TASK_ID]}"]


def job_command(run: Run) -> str:
    """What a SLURM job does on its first node: launcher.batch, which starts srun and sees the ranks to their end."""
    supervisor = shlex.join([sys.executable, "-u", "-m", "launcher.batch"])
    return f"exec {supervisor} {RUN_DIR} {srun_command(run)}"


def srun_command(run: Run) -> str:
    """One task per rank; when one has failed, SLURM ends all. launcher.batch adds --output=<log of the attempt>."""
    cluster = run.config.cluster
    words = ["srun", "--unbuffered", "--export=ALL", "--kill-on-bad-exit=1"]
    if cluster.cpus_per_task:
        words.append(f"--cpus-per-task={cluster.cpus_per_task}")  # since SLURM 22.05 srun does not inherit it
    task = [cluster.python or (sys.executable if cluster.container == "none" else "python"), "-u", "-m", "launcher.job"]
    snapshot = str(run.snapshot.resolve())
    mounts = container_mounts(run.config)
    if cluster.container == "pyxis":
        pairs = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts)
        words += [f"--container-image={cluster.container_image}", f"--container-mounts={pairs}"]
        words.append(f"--container-workdir={snapshot}")  # `python -m` finds the snapshot's code there
    if cluster.container == "apptainer":
        gpus = ["--nv"] if cluster.device == "cuda" else []
        inside = ["apptainer", "exec", *gpus, "--bind", ",".join(mounts), "--pwd", snapshot, cluster.container_image]
        task = [*inside, *task]
    return f"{shlex.join([*words, *cluster.srun_args, *task])} {RUN_DIR}"


def container_mounts(config: RunConfig) -> list[str]:
    """What a container has to see: run directories and code, the files that the run reads, and what the user names."""
    files = [str(Path(config.data.path).parent)] if is_file_name(config.data.path) else []
    weights = [config.model.weights] if config.model.weights else []
    return list(dict.fromkeys([config.launch.runs_dir, *files, *weights, *config.cluster.container_mounts]))


def _refuse_newlines(config: RunConfig) -> None:
    """A line end inside a value would end its #SBATCH directive, and the rest of the value would be run."""
    cluster = config.cluster
    texts = {f"cluster.{name}": value for name, value in vars(cluster).items() if isinstance(value, str)}
    texts |= {f"cluster.env.{name}": value for name, value in cluster.env.items()}
    texts |= {f"cluster.env, name {name!r}": name for name in cluster.env}
    for name, values in vars(cluster).items():
        if isinstance(values, list):
            texts |= {f"cluster.{name}[{i}]": value for i, value in enumerate(values)}
    bad = [f"{name}={value!r}" for name, value in texts.items() if "\n" in value or "\r" in value]
    if bad:
        raise ConfigError(f"line ends are not allowed in a job script: {', '.join(bad)}")
