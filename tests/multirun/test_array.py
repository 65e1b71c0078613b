"""Sweeps: all prepared or none submitted; one failing run hides nothing; the exit code tells."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher import status
from multirun.array import own_overrides


def test_a_sweep_runs_all_and_reports_the_failed_ones(project):
    done = project.launch("--multirun", "train.seed=1,2,3,5")
    assert done.returncode == 1, done.stderr
    states = {json.loads((p / "run.json").read_text())["train"]["seed"]: status.describe(p) for p in project.run_dirs()}
    assert {seed: one["state"] for seed, one in states.items()} == {1: "done", 2: "failed", 3: "failed", 5: "done"}
    header, *rows = done.stdout[done.stdout.index("\n\n") :].strip().splitlines()[:5]
    assert header.split()[:2] == ["train.seed", "state"]
    assert [row.split()[:2] for row in rows] == [["1", "done"], ["2", "failed"], ["3", "failed"], ["5", "done"]]
    for words in (
        "ValueError: boom on purpose",
        "exited with code 3",
        states[2]["log"],
        states[3]["log"],
        "2.000",
        "6.000",
    ):
        assert words in done.stdout, words
    assert "boom on purpose" in Path(states[2]["log"]).read_text()
    assert len({path.parent for path in project.run_dirs()}) == 1
    groups = {json.loads((path / "run.json").read_text())["logging"]["group"] for path in project.run_dirs()}
    assert groups == {project.run_dirs()[0].parent.name}

    again = project.launch("--multirun", "train.seed=1,5")
    assert again.returncode == 0 and again.stdout.count("already done") == 2 and "6.000" in again.stdout


def test_a_sweep_with_bad_runs_is_refused_whole(project):
    done = project.launch("--multirun", "parallelism.ep=2,3", "optimizer=adamw,muon", "offload=full")
    assert done.returncode == 2
    assert not project.runs.exists()
    bad = [line for line in done.stderr.splitlines() if line.startswith("  ")]
    assert {line.split(": ")[0].strip() for line in bad} == {
        "parallelism.ep=2 optimizer=muon",
        "parallelism.ep=3 optimizer=adamw",
        "parallelism.ep=3 optimizer=muon",
    }
    assert "3 of 4 runs" in done.stderr

    as_json = project.launch("launch.json=true", "--multirun", "parallelism.ep=2,3")
    (refused,) = json.loads(as_json.stdout)["refused"]
    assert refused["run"] == "parallelism.ep=3" and refused["problems"]


def test_a_dry_sweep_writes_nothing(project):
    done = project.launch("--multirun", "train.seed=1,2", "launch.dry_run=true", "launch.json=true")
    assert done.returncode == 0 and not project.runs.exists()
    assert len({plan["key"] for plan in json.loads(done.stdout)}) == 2
    text = project.launch("--multirun", "train.seed=1,2", "launch.dry_run=true")
    assert text.stdout.count("exec ") == 2 and not project.runs.exists()


def test_a_frozen_sweep_prints_how_to_start_each_run(project):
    done = project.launch("--multirun", "train.seed=1,2", "launch.submit=false")
    assert done.returncode == 0 and done.stdout.count("torchrun --nproc-per-node 2 -m trainer") == 2
    assert [status.describe(path)["state"] for path in project.run_dirs()] == ["frozen", "frozen"]


def test_a_name_is_the_sweeps_directory_and_the_same_name_goes_on(project, tmp_path):
    first = project.launch("--multirun", "train.seed=1,5", "launch.name=lr scan")
    sweep = project.runs / "lr-scan"
    assert first.returncode == 0 and f"sweep       {sweep}\n" in first.stdout, first.stderr
    assert {path.parent for path in project.run_dirs()} == {sweep}
    assert {json.loads((path / "run.json").read_text())["logging"]["group"] for path in sweep.glob("lr-*")} == {
        sweep.name
    }
    (sweep / status.CANCEL).write_text("{}")  # the former one was stopped
    second = project.launch("--multirun", "train.seed=5,6", "launch.name=lr scan")
    assert second.returncode == 0 and second.stdout.count("already done") == 1, second.stdout
    listed = json.loads(project("multirun", "results", "--json", "lr-scan", cwd=tmp_path).stdout)
    assert [(one["overrides"]["train.seed"], one["state"]) for one in listed] == [
        ("1", "done"), ("5", "done"), ("6", "done"),
    ]  # fmt: skip
    before = sorted(path.name for path in sweep.iterdir())
    assert project.launch("--multirun", "train.seed=7,8", "launch.name=lr scan", "launch.dry_run=true").returncode == 0
    assert sorted(path.name for path in sweep.iterdir()) == before


def test_jobs_that_name_themselves_stay_in_their_sweep(project):
    for name, seed in (("a", 1), ("b", 5)):
        text = f"# @package _global_\ntrain:\n  seed: {seed}\nlaunch:\n  name: {name}\n"
        (project.root / "conf" / "experiment" / f"{name}.yaml").write_text(text)
    done = project.launch("--multirun", "+experiment=a,b")
    assert done.returncode == 0, done.stderr
    (sweep,) = {path.parent for path in project.run_dirs()}
    assert [path.name[:2] for path in project.run_dirs()] == ["a-", "b-"] and (sweep / "sweep.json").is_file()


def test_a_run_that_is_not_waited_for_says_how_to_go_on(project, tmp_path):
    runs = tmp_path / "my runs"
    done = project.launch("launch.wait=false", "train.seed=1", f"launch.runs_dir={runs}")
    assert done.returncode == 0, done.stderr
    (run,) = (path.parent for path in runs.glob("*/*/run.json"))
    job = status.read_json(run / "job.json")
    assert f"job         {job['job_id']}, key {job['key']}\n" in done.stdout and f"run         {run}\n" in done.stdout
    commands = dict(line.split(None, 1) for line in done.stdout.splitlines() if "-m multirun" in line)
    assert set(commands) == {"follow", "logs", "results", "resume", "cancel"}
    for title, words in (("logs", "rank 0 has seed 1"), ("follow", "done"), ("resume", "left alone")):
        _, _, *arguments = shlex.split(commands[title])
        assert words in project(*arguments, cwd=tmp_path).stdout, title
    quiet = project.launch("launch.wait=false", "train.seed=5", "launch.json=true")
    assert set(json.loads(quiet.stdout)) >= {"key", "path", "job_id"}
    assert "-m multirun" not in project.launch("train.seed=6").stdout


def test_slurm_gets_a_whole_sweep_as_one_array_per_shape_or_none_of_it(project, fake_slurm):
    sweep = ["cluster=slurm", "cluster.device=cpu", "--multirun", "train.seed=1,2", "parallelism.gpus_per_node=1,2"]
    sweep += ["parallelism.ep=1"]
    (fake_slurm.path / "refuse").write_text("no partition")
    refused = project.launch(*sweep, "launch.json=true")
    assert refused.returncode == 2 and "no partition" in json.loads(refused.stdout)["refused"][0]["problems"][0]
    (fake_slurm.path / "refuse").unlink()
    fake_slurm.says(*(f"{job}_{i}|PENDING|Priority|2026-12-02T08:00:00" for job in (4711, 4712) for i in (0, 1)))
    queued = project.launch(*sweep)
    assert queued.returncode == 0, queued.stderr
    assert len(fake_slurm.scripts) == 2 and all("#SBATCH --array=0-1\n" in text for text in fake_slurm.scripts)
    job_ids = [line.split()[1] for line in queued.stdout.splitlines() if line.startswith("job ")]
    assert job_ids == ["4711_0", "4712_0", "4711_1", "4712_1"]
    assert "expected start 2026-12-02 08:00:00" in queued.stdout
    sweep_dir = queued.stdout.split()[1]
    for verb in ("status", "logs -f", "results", "retry", "cancel"):
        assert f"python -m multirun {verb} {sweep_dir}" in queued.stdout
    # Whatever the sweep's size, and for two commands: is there a cluster, its limit; what it says of the sweep.
    assert len(fake_slurm.calls("scontrol")) <= 4 and len(fake_slurm.calls("squeue")) <= 2


def test_a_dry_run_shows_the_arrays_that_would_be_submitted(project, fake_slurm):
    done = project.launch("cluster=slurm", "cluster.device=cpu", "--multirun", "train.seed=1,2", "launch.dry_run=true")
    assert done.returncode == 0 and done.stdout.count("#SBATCH --array=0-1\n") == 1
    assert not fake_slurm.scripts and not project.runs.exists()


def test_a_json_sweep_prints_one_list(project):
    done = project.launch("launch.json=true", "--multirun", "train.seed=1,2")
    found = json.loads(done.stdout)
    assert done.returncode == 1 and [one["state"] for one in found] == ["done", "failed"]
    assert found[0]["result"]["loss"]["last"] == 2.0 and found[0]["overrides"] == {"train.seed": "1"}
    assert "boom on purpose" in found[1]["reason"]


@pytest.mark.parametrize(
    ("override", "words"),
    [("launch.wait=false", "one after the other"), ("logging.project=a,b", "the same experiment")],
)
def test_what_a_local_sweep_cannot_do_is_refused(project, override, words):
    swept = [] if "," in override else ["train.seed=1,2"]
    done = project.launch("--multirun", override, *swept)
    assert done.returncode == 2 and words in done.stderr and not project.run_dirs()


def test_ctrl_c_stops_the_run_and_the_sweep(project, tmp_path):
    command = [sys.executable, "-m", "launcher", f"launch.runs_dir={project.runs}", "cluster=local"]
    sweep = subprocess.Popen(
        [*command, "--multirun", "train.seed=4,1"], cwd=project.root, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 20
    while len(list(project.runs.glob("*/*/pid-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    sweep.send_signal(signal.SIGINT)
    out, _ = sweep.communicate(timeout=20)
    assert sweep.returncode == 130
    assert [status.describe(path)["state"] for path in project.run_dirs()].count("cancelled") == 1
    assert "frozen" in out and "cancelled" in out
    for pid in project.runs.glob("*/*/pid-*"):
        assert not status._exists(int(pid.read_text()))


def test_only_what_differs_names_a_run():
    jobs = [["model=tiny", "+experiment=a", "train.steps=5"], ["model=tiny", "+experiment=b", "train.steps=5"]]
    assert own_overrides(jobs) == [{"experiment": "a"}, {"experiment": "b"}]
    assert own_overrides([["a=1", "b=2"]]) == [{}]


def test_edits_after_the_command_has_returned_change_nothing(project):
    done = project.launch("launch.wait=false", "launch.json=true", "train.seed=7", FAKE_SLEEP="1.5")
    assert done.returncode == 0
    run = Path(json.loads(done.stdout)["path"])
    (project.root / "trainer" / "__main__.py").write_text("raise RuntimeError('edited')\n")
    (project.root / "launcher" / "job.py").write_text("raise RuntimeError('edited')\n")
    (project.root / "conf" / "train" / "default.yaml").write_text("seed: 99\n")
    deadline = time.monotonic() + 20
    while status.describe(run)["state"] not in status.FINAL:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert status.describe(run)["state"] == "done"
    assert status.read_json(run / "result.json")["loss"]["last"] == 8.0
