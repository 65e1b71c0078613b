"""From frozen run directories to jobs, through submitit.

submitit's executors write the script, call sbatch and read the job id. The job's command is our own (launcher.batch and
launcher.job, not submitit's unpickling main), so a script can be run again by hand and depends on nothing but the run
directory. Runs that ask SLURM for the same go there as one array.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import index, job_script, slurm, status
from launcher.environment import scrubbed
from launcher.watch import interrupts, waiting
from launcher.watch import wait as wait_for_directories
from trainer.config import ConfigError

if TYPE_CHECKING:
    from launcher.run import Run


def script(run: Run) -> str:
    """The exact job script: sbatch's for slurm, bash's for local. Raises ConfigError for values that would break it."""
    return array_script([run]) if run.config.cluster.name == "slurm" else job_script.local_script(run)


def array_script(runs: Sequence[Run]) -> str:
    """sbatch's script for runs of one shape: of a single one, or of an array with one job a run."""
    return _slurm_executor(runs)._make_submission_file_text(job_script.job_command(runs[0]), uid="")


def arrays(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs in the groups that go to SLURM together: equal scripts but for the run directories, cut at MaxArraySize."""
    by_shape: dict[str, list[Run]] = {}
    for run in runs:
        executor = _slurm_executor([run], shape_only=True)
        shape = executor._make_submission_file_text(job_script.job_command(run), uid="")
        by_shape.setdefault(shape, []).append(run)
    most = 1 if all(len(group) == 1 for group in by_shape.values()) else max(1, slurm.max_array_size())
    return [group[first : first + most] for group in by_shape.values() for first in range(0, len(group), most)]


def submit(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Hand over every run at once: start it on this machine, or queue it; returns its ids (also in its job.json).

    Raises ConfigError before anything is submitted where a run cannot be.
    """
    on_slurm = [run for run in runs if run.config.cluster.name == "slurm"]
    _refuse(runs)
    texts = {run.path: script(run) for run in runs if run not in on_slurm}
    groups = [(group, array_script(group)) for group in arrays(on_slurm)]
    jobs: list[dict[str, Any]] = []
    with interrupts() as seen:
        try:
            for run in runs:
                if run.path in texts:
                    jobs += _hand_over([run], texts[run.path])
            for group, text in groups:
                jobs += _hand_over(group, text)
        except BaseException:
            _take_back(jobs)
            raise
    if seen:
        _take_back(jobs)
        raise KeyboardInterrupt
    by_path = {job["path"]: job for job in jobs}
    return [by_path[str(run.path.resolve())] for run in runs]


def _refuse(runs: Sequence[Run]) -> None:
    queue = slurm.Queue(every_s=60.0)
    known = [status.read_json(run.path / "job.json") for run in runs]
    if earlier := [job["job_id"] for job in known if job.get("cluster") == "slurm"]:
        queue.prefetch(earlier)
    for run, job in zip(runs, known, strict=True):
        if run.config.cluster.name == "slurm" and not shutil.which("sbatch"):
            raise ConfigError(
                "cluster=slurm, but sbatch is not on PATH: submit from a login node, or use cluster=local"
            )
        if run.config.cluster.name == "local" and run.config.parallelism.nodes > 1:
            raise ConfigError(f"cluster=local is one node, parallelism.nodes={run.config.parallelism.nodes}")
        if status.is_alive(run.path, job, queue):
            raise ConfigError(f"{run.path} is running already: python -m multirun status {shlex.quote(str(run.path))}")


def _take_back(jobs: Sequence[dict[str, Any]]) -> None:
    """All or none: end what was submitted before something went wrong."""
    status.cancel([Path(job["path"]) for job in jobs])


def wait(runs: Sequence[Run]) -> int:
    """Follow submitted runs to their ends and show them; the exit code is 0 only where all are done."""
    out = sys.stderr if any(run.config.launch.json for run in runs) else sys.stdout
    return wait_for_directories([run.path for run in runs], out)


def announce(name: str, jobs: Sequence[dict[str, Any]]) -> list[str]:
    """Lines that say where jobs are in SLURM's queue, if they are, and how to go on; `name`: of the run or the sweep."""
    known = slurm.ask([jobs[0]["job_id"]]) if jobs[0]["cluster"] == "slurm" else None
    now = known[jobs[0]["job_id"]] if known else None
    lines = []
    if now is not None and now.is_waiting:
        words = {"state": "queued", "waits": now.reason or "not looked at yet"}
        lines.append(f"queue       {waiting(words | ({'expected_start': now.start} if now.start else {}))}")
    commands = {"follow": "status", "logs": "logs -f", "results": "results", "resume": "retry", "cancel": "cancel"}
    return lines + [f"{title:<12}python -m multirun {verb} {shlex.quote(name)}" for title, verb in commands.items()]


def _hand_over(runs: Sequence[Run], text: str) -> list[dict[str, Any]]:
    """Start a run here, or queue runs with one sbatch; on failure their directories are as before."""
    cluster = runs[0].config.cluster.name
    before = {run.path: _read_bytes(run.path / "status.json") for run in runs}
    for run in runs:
        (run.path / "logs").mkdir(exist_ok=True)
        status.archive_failures(run.path)
        (run.path / status.CANCEL).unlink(missing_ok=True)
        waiting = {"state": "starting" if cluster == "local" else "queued", "step": 0, "steps": run.config.train.steps}
        status.write_json(run.path / "status.json", waiting)
    _write_script(runs, text)
    try:
        if cluster == "slurm":
            job_ids, log = _queue(runs)
        else:
            job_ids, log = [_local_executor(runs[0].path.resolve())._submit_command("").job_id], None
    except BaseException:
        for path, content in before.items():
            (path / "status.json").unlink() if content is None else (path / "status.json").write_bytes(content)
        raise
    jobs = []
    for run, job_id in zip(runs, job_ids, strict=True):
        job = {"key": run.key, "path": str(run.path.resolve()), "job_id": job_id, "cluster": cluster}
        job |= {"host": socket.gethostname(), "submitted": time.time()}
        job |= {"log": log.replace("%j", job_id).replace("%A_%a", job_id)} if log else {}
        status.write_json(run.path / "job.json", job)
        jobs.append(job)
    index.remember(run.path for run in runs)
    return jobs


def _read_bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _write_script(runs: Sequence[Run], text: str) -> None:
    """submission.sh in every run directory; an array's names all of its runs, so it is one file with many names."""
    first = runs[0].path / "submission.sh"
    for run in runs:
        path = run.path / "submission.sh"
        path.unlink(missing_ok=True)
        try:
            if path == first:
                raise OSError("the first one is written")
            os.link(first, path)
        except OSError:  # or another disk
            path.write_text(text)


def _queue(runs: Sequence[Run]) -> tuple[list[str], str]:
    """sbatch's job ids, and its log with SLURM's placeholders; raises ConfigError with what sbatch said."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    executor = _slurm_executor(runs)
    executor.folder.mkdir(exist_ok=True)
    log = Path(executor.parameters["additional_parameters"]["output"])
    log.parent.mkdir(exist_ok=True)  # it has to be there when SLURM opens the log
    try:
        with _scrubbed_environment():
            job_id = executor._submit_command(job_script.job_command(runs[0])).job_id
    except (FailedJobError, FailedSubmissionError) as error:
        said = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise ConfigError(f"sbatch did not take {runs[0].path / 'submission.sh'}: {said}") from error
    finally:
        shutil.rmtree(executor.folder, ignore_errors=True)  # submitit's copies of the script
    return ([job_id] if len(runs) == 1 else [f"{job_id}_{index}" for index in range(len(runs))]), str(log)


def _slurm_executor(runs: Sequence[Run], shape_only: bool = False) -> Any:
    """submitit's SlurmExecutor with the parameters of runs; private names of submitit are used in this file only.

    `shape_only`: without what names the runs, so that equal texts mean one array.
    """
    from submitit.slurm.slurm import SlurmExecutor

    class Executor(SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            return 2  # the text can be written where srun is not

    run = runs[0]
    cluster, layout, path = run.config.cluster, run.config.parallelism, run.path.resolve()
    single = len(runs) == 1
    log = path / "logs" / "slurm_%j.log" if single else path.parent / "logs" / "slurm_%A_%a.log"
    extra = {"chdir": str(run.snapshot.resolve()), "requeue": True, "reservation": cluster.reservation}
    extra |= {"mem": cluster.mem, "mem-per-cpu": cluster.mem_per_cpu}
    for argument in cluster.sbatch_args:
        option, _, value = argument.removeprefix("--").partition("=")
        extra[option] = value if "=" in argument else True
    if not shape_only:
        extra["output"] = str(log)
    if not single:
        at_a_time = f"%{cluster.array_parallelism}" if cluster.array_parallelism else ""
        extra["array"] = f"0-{len(runs) - 1}{at_a_time}"
    gpus = layout.gpus_per_node if cluster.device == "cuda" and not cluster.gres else None
    executor = Executor(path / ".submitit" if not shape_only else "shape")
    executor.update_parameters(
        job_name="shape" if shape_only else path.name if single else path.parent.name,
        time=cluster.time_limit_min,
        signal_delay_s=min(cluster.signal_before_s, 30 * cluster.time_limit_min),
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
        mail_type=cluster.mail_type or None,
        mail_user=cluster.mail_user or None,
        wckey=None,  # submitit's default is refused by sites that check it
        stderr_to_stdout=True,
        setup=[*([] if shape_only else job_script.run_dir_lines([r.path for r in runs])), *job_script.setup_lines(run)],
        use_srun=False,  # launcher.batch starts it
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
