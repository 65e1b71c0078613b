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


def course(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: row.get(name) for name in COURSE} for row in rows]


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

    def has_run(attempt: int, steps: int) -> None:
        """Wait until an attempt has done a few steps of its own."""

        def done() -> bool:
            now = status.read_json(run / "status.json")
            return now.get("attempt") == attempt and now["state"] == "running" and now["step"] >= begun[0] + steps

        def is_running() -> bool:
            now = status.read_json(run / "status.json")
            return now.get("attempt") == attempt and now["state"] == "running"

        wait_for(is_running, 120)
        begun = [status.read_json(run / "status.json")["step"]]
        wait_for(done, 120)

    def steps_of(attempt: int) -> list[int]:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [row["step"] for row in rows if row["attempt"] == attempt]

    has_run(1, 5)
    ranks = subprocess.run(["pgrep", "-f", f"launcher.job {run}"], capture_output=True, text=True, check=True)
    os.kill(int(ranks.stdout.split()[-1]), signal.SIGUSR2)
    wait_for(lambda: status.read_json(run / "status.json").get("requeued"), 60)
    now = status.describe(run)
    assert not status.has_ended(now) and now["state"] in ("preempted", "starting"), now
    first = status.read_json(run / "status.json")
    assert "by SIGUSR2 to rank" in first["error"] and "SLURM starts it again (1 of 20)" in first["error"]

    has_run(2, 5)
    assert steps_of(2)[0] == first["step"] + 1 == steps_of(1)[-1] + 1
    urgent = ["--partition=urgent", "--nodes=4", "--exclusive", "--time=5", "--wrap=sleep 1", "--output=/dev/null"]
    subprocess.run(["sbatch", *urgent], check=True, stdout=subprocess.DEVNULL)
    has_run(3, 5)
    second = steps_of(2)[-1]
    assert steps_of(3)[0] == second + 1 and (run / "checkpoints" / f"step_{second:08d}" / "metadata.json").exists()

    # A node that fails says nothing to anybody, SLURM's own processes included.
    wait_for(lambda: status.read_json(run / "status.json")["step"] > second + 20, 120)
    node = subprocess.run(
        ["squeue", "--noheader", f"--jobs={job_id}", "--format=%B"], capture_output=True, text=True, check=True
    ).stdout.strip()
    for pattern in (rf"slurmstepd: \[{job_id}\.", str(run)):
        found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=True)
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=test"], check=True)
    wait_for(lambda: status.read_json(run / "status.json").get("attempt") == 4, 60)
    # Its daemon has survived, and may have reported for duty already.
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=False, capture_output=True)

    assert command("multirun", "logs", str(run)).returncode == 0
    said, _ = waiting.communicate(timeout=300)
    assert waiting.returncode == 0 and "preempted" in said and f"step {STEPS}/{STEPS}" in said, said
    for path in (run, Path(whole["path"])):
        assert status.describe(path)["state"] == "done", status.describe(path)
    assert [row["step"] for row in course(run)] == list(range(1, STEPS + 1)) and steps_of(4)[0] % 10 == 1
    assert course(run) == course(Path(whole["path"]))
    assert not list(run.glob("failure-*")) and status.describe(run)["attempt"] == 4
    assert Path(whole["path"]).name == run.name

    offline = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert len(offline) == 4 and len({path.name for path in offline}) == 1  # four files of one W&B run
    logged = [row["train/step"] for path in offline for row in history(read_back(run, path.parent.name))]
    assert set(logged) == set(range(1, STEPS + 1))
