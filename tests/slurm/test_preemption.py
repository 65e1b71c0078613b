"""No lost step on a real SLURM: a signal to one rank, a preempting partition and a failed node, one after the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import status
from tests.slurm.conftest import ROOT
from tests.trainer.test_metrics_wandb import history, read_back

pytestmark = pytest.mark.timeout(900)
COURSE = ("step", "loss", "grad_norm", "lr", "supervised_tokens")
STEPS = 400


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def course(run: Path) -> list[dict]:
    return [{name: row.get(name) for name in COURSE} for row in rows(run)]


def steps_of(run: Path, attempt: int) -> list[int]:
    return [row["step"] for row in rows(run) if row["attempt"] == attempt]


def has_run(run: Path, attempt: int, steps: int, wait_for) -> None:
    """Wait until an attempt has done a few steps of its own."""

    def done_so_far() -> int | None:
        now = status.read_json(run / "status.json")
        return now["step"] if now.get("attempt") == attempt and now["state"] == "running" else None

    wait_for(lambda: done_so_far() is not None, 120)
    begun = done_so_far() or 0
    wait_for(lambda: (done_so_far() or 0) >= begun + steps, 120)


def fail_node(run: Path, job_id: str) -> str:
    """Kill all of a job without a word, SLURM's own processes included, and have SLURM notice; returns the node."""
    asked = ["squeue", "--noheader", f"--jobs={job_id}", "--format=%B"]
    node = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    for pattern in (rf"slurmstepd: \[{job_id}\.", str(run)):
        found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=True)
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=test"], check=True)
    return node


def test_a_run_that_is_interrupted_in_every_way_takes_the_course_of_one_that_is_not(
    cluster, command, wait_for, tmp_path
):
    """Steps, losses, run directory and W&B run are those of a run without interruptions."""
    small = [
        "cluster=slurm",
        "cluster.device=cpu",
        "parallelism.nodes=2",
        "parallelism.gpus_per_node=1",
        "data.seq_len=64",
    ]
    small += [f"train.steps={STEPS}", "model.num_hidden_layers=2", "checkpoint.every_steps=10"]
    alone = command("launcher", *small, "logging.wandb=disabled", "launch.wait=true", "launch.json=true")
    assert alone.returncode == 0, alone.stderr
    whole = json.loads(alone.stdout)
    # Another run directory, and a command that stays: where a run goes is no part of what it is.
    waiting = subprocess.Popen(
        [sys.executable, "-m", "launcher", *small, "launch.runs_dir=other", "launch.wait=true"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: list(tmp_path.glob("other/*/*/job.json")), 60)
    (run,) = (path.parent for path in tmp_path.glob("other/*/*/job.json"))
    job_id = status.read_json(run / "job.json")["job_id"]

    has_run(run, 1, 5, wait_for)
    ranks = subprocess.run(["pgrep", "-f", f"launcher.job {run}"], capture_output=True, text=True, check=True)
    os.kill(int(ranks.stdout.split()[-1]), signal.SIGUSR2)
    wait_for(lambda: status.read_json(run / "status.json").get("requeued"), 60)
    now = status.describe(run)
    assert not status.has_ended(now) and now["state"] in ("preempted", "starting"), now
    first = status.read_json(run / "status.json")
    assert "by SIGUSR2 to rank" in first["error"] and "SLURM starts it again (1 of 20)" in first["error"]

    has_run(run, 2, 5, wait_for)
    assert steps_of(run, 2)[0] == first["step"] + 1 == steps_of(run, 1)[-1] + 1
    urgent = ["--partition=urgent", "--nodes=4", "--exclusive", "--time=5", "--wrap=sleep 1", "--output=/dev/null"]
    subprocess.run(["sbatch", *urgent], check=True, stdout=subprocess.DEVNULL)
    has_run(run, 3, 5, wait_for)
    second = steps_of(run, 2)[-1]
    assert steps_of(run, 3)[0] == second + 1 and (run / "checkpoints" / f"step_{second:08d}" / "metadata.json").exists()

    wait_for(lambda: status.read_json(run / "status.json")["step"] > second + 20, 120)
    node = fail_node(run, job_id)
    wait_for(lambda: status.read_json(run / "status.json").get("attempt") == 4, 60)
    # Its daemon has survived, and may have reported for duty already.
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=False, capture_output=True)

    assert command("multirun", "logs", str(run)).returncode == 0
    said, _ = waiting.communicate(timeout=300)
    assert waiting.returncode == 0 and "preempted" in said and "loss" in said, said
    for path in (run, Path(whole["path"])):
        assert status.describe(path)["state"] == "done", status.describe(path)
    assert [row["step"] for row in course(run)] == list(range(1, STEPS + 1)) and steps_of(run, 4)[0] % 10 == 1
    assert course(run) == course(Path(whole["path"]))
    assert not list(run.glob("failure-*")) and status.describe(run)["attempt"] == 4
    assert Path(whole["path"]).name == run.name

    offline = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert len(offline) == 4 and len({path.name for path in offline}) == 1  # four files of one W&B run
    logged = [row["train/step"] for path in offline for row in history(read_back(run, path.parent.name))]
    assert set(logged) == set(range(1, STEPS + 1))
