"""From frozen run directories to jobs, through submitit.

submitit's executors write the script, call sbatch and read the job id. The task command is our own (launcher.job, not
submitit's unpickling main), so a script can be run again by hand and depends on nothing but the run directory.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import status
from launcher.environment import scrubbed
from launcher.watch import interrupts
from launcher.watch import wait as wait_for_directories
from trainer.config import ClusterConfig, ConfigError

if TYPE_CHECKING:
    from launcher.run import Run


def script(run: Run) -> str:
    """The exact job script: sbatch's for slurm, bash's for local. Raises ConfigError for values that would break it."""
    _refuse_newlines(run.config.cluster)
    if run.config.cluster.name == "slurm":
        return _slurm_executor(run)._make_submission_file_text(_task_command(run), uid="")
    lines = ["#!/bin/bash", f"cd {shlex.quote(str(run.snapshot.resolve()))} || exit 1", *_setup(run)]
    command = [sys.executable, "-u", "-m", "launcher.local", str(run.path.resolve())]
    return "\n".join([*lines, f"exec {shlex.join(command)}", ""])


def submit(runs: list[Run]) -> list[dict[str, Any]]:
    """Hand over every run at once: start it on this machine, or queue it; returns its ids (also in its job.json).

    Raises ConfigError before anything is submitted where a run cannot be.
    """
    texts = [script(run) for run in runs]
    for run in runs:
        if run.config.cluster.name == "slurm" and not shutil.which("sbatch"):
            raise ConfigError(
                "cluster=slurm, but sbatch is not on PATH: submit from a login node, or use cluster=local"
            )
        if run.config.cluster.name == "local" and run.config.parallelism.nodes > 1:
            raise ConfigError(f"cluster=local is one node, parallelism.nodes={run.config.parallelism.nodes}")
        if status.is_alive(run.path, status.read_json(run.path / "job.json")):
            raise ConfigError(f"{run.path} is running already: python -m multirun status {run.path}")
    jobs: list[dict[str, Any]] = []
    with interrupts() as seen:
        try:
            for run, text in zip(runs, texts, strict=True):
                jobs.append(_submit_one(run, text))
        except ConfigError:
            _take_back(jobs)
            raise
    if seen:
        _take_back(jobs)
        raise KeyboardInterrupt
    return jobs


def _take_back(jobs: list[dict[str, Any]]) -> None:
    """All or none: end what was submitted before something went wrong."""
    for job in jobs:
        status.cancel(Path(job["path"]))


def wait(runs: list[Run]) -> int:
    """Follow submitted runs to their ends and show them; the exit code is 0 only where all are done."""
    out = sys.stderr if any(run.config.launch.json for run in runs) else sys.stdout
    return wait_for_directories([run.path for run in runs], out)


def _submit_one(run: Run, text: str) -> dict[str, Any]:
    path, cluster = run.path.resolve(), run.config.cluster.name
    (path / "submission.sh").write_text(text)
    (path / "logs").mkdir(exist_ok=True)
    waiting = {"state": "starting" if cluster == "local" else "queued", "step": 0, "steps": run.config.train.steps}
    status.write_json(path / "status.json", waiting)
    try:
        job_id = _queue(run) if cluster == "slurm" else _local_executor(path)._submit_command("").job_id
    except BaseException:
        (path / "status.json").unlink()
        raise
    job = {
        "key": run.key,
        "path": str(path),
        "job_id": job_id,
        "cluster": cluster,
        "host": socket.gethostname(),
        "submitted": time.time(),
    }
    status.write_json(path / "job.json", job)
    return job


def _queue(run: Run) -> str:
    """sbatch's job id; raises ConfigError with what sbatch said."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    executor = _slurm_executor(run)
    executor.folder.mkdir(exist_ok=True)
    status.begin_attempt(run.path)  # the log directory has to be there when SLURM opens the logs
    try:
        with _scrubbed_environment():
            return executor._submit_command(_task_command(run)).job_id
    except (FailedJobError, FailedSubmissionError) as error:
        said = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise ConfigError(f"sbatch did not take {run.path / 'submission.sh'}: {said}") from error


def _refuse_newlines(cluster: ClusterConfig) -> None:
    """A line end inside a value would end its #SBATCH directive, and the rest of the value would be run."""
    texts = {f"cluster.{name}": value for name, value in vars(cluster).items() if isinstance(value, str)}
    texts |= {f"cluster.env.{name}": value for name, value in cluster.env.items()}
    texts |= {f"cluster.env, name {name!r}": name for name in cluster.env}
    for name in ("setup", "srun_args"):
        texts |= {f"cluster.{name}[{i}]": value for i, value in enumerate(getattr(cluster, name))}
    bad = [f"{name}={value!r}" for name, value in texts.items() if "\n" in value or "\r" in value]
    if bad:
        raise ConfigError(f"line ends are not allowed in a job script: {', '.join(bad)}")


def _setup(run: Run) -> list[str]:
    """Shell lines before the ranks start: the snapshot's code, the user's variables and lines."""
    snapshot = shlex.quote(str(run.snapshot.resolve()))
    exports = [f"export {name}={shlex.quote(value)}" for name, value in run.config.cluster.env.items()]
    return [f"export PYTHONPATH={snapshot}${{PYTHONPATH:+:$PYTHONPATH}}", *exports, *run.config.cluster.setup]


def _task_command(run: Run) -> str:
    return shlex.join([sys.executable, "-u", "-m", "launcher.job", str(run.path.resolve())])


def _slurm_executor(run: Run) -> Any:
    """submitit's SlurmExecutor with the parameters of a run; private names of submitit are used in this file only."""
    from submitit.slurm.slurm import SlurmExecutor

    class Executor(SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            return 2  # the text can be written where srun is not

    cluster, layout, path = run.config.cluster, run.config.parallelism, run.path.resolve()
    log = path / "logs" / f"attempt_{status.attempts(path) + 1}"
    extra = {"chdir": str(run.snapshot.resolve()), "reservation": cluster.reservation, "mem": cluster.mem}
    srun = [f"--output={log}/rank_%t.log", "--kill-on-bad-exit=1"]
    if cluster.cpus_per_task:
        srun.append(f"--cpus-per-task={cluster.cpus_per_task}")  # since SLURM 22.05 srun does not inherit it
    gpus = layout.gpus_per_node if cluster.device == "cuda" and not cluster.gres else None
    executor = Executor(path / ".submitit")
    executor.update_parameters(
        job_name=path.name,
        time=cluster.time_limit_min,
        nodes=layout.nodes,
        ntasks_per_node=layout.gpus_per_node,
        gpus_per_node=gpus,
        gres=cluster.gres or None,
        cpus_per_task=cluster.cpus_per_task or None,
        partition=cluster.partition or None,
        account=cluster.account or None,
        qos=cluster.qos or None,
        constraint=cluster.constraint or None,
        exclusive=True if cluster.exclusive else None,
        wckey=None,  # submitit's default is refused by sites that check it
        stderr_to_stdout=True,
        setup=_setup(run),
        srun_args=[*srun, *cluster.srun_args],
        additional_parameters={name: value for name, value in extra.items() if value},
    )
    return executor


def _local_executor(path: Path) -> Any:
    """submitit's LocalExecutor around launcher.local, which stops all ranks when one has failed."""
    from submitit.local.local import LocalExecutor, LocalJob

    class Executor(LocalExecutor):
        def _submit_command(self, command: str) -> LocalJob:
            with open(path / "logs" / "launcher.log", "ab") as log:
                process = subprocess.Popen(
                    ["/bin/bash", str(path / "submission.sh")],
                    env=scrubbed(os.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # it outlives this command and its terminal
                )
            return LocalJob(folder=self.folder, job_id=str(process.pid), process=process)

    return Executor(path / ".submitit")


@contextmanager
def _scrubbed_environment() -> Iterator[None]:
    """sbatch hands its own environment on to the job, and submitit gives it this process's."""
    before = dict(os.environ)
    clean = scrubbed(before)
    try:
        for name in set(before) - set(clean):
            del os.environ[name]
        yield
    finally:
        os.environ.update(before)
