"""`multirun retry`: what failed goes on in its own directory with its own code; what is done stays as it is, unless asked."""

from __future__ import annotations

import json
from pathlib import Path

from launcher import status


def by_seed(project) -> dict[int, Path]:
    return {json.loads((path / "run.json").read_text())["train"]["seed"]: path for path in project.run_dirs()}


def test_only_what_failed_runs_again_with_the_frozen_code(project, tmp_path):
    project.launch("--multirun", "train.seed=1,2,3")
    runs = by_seed(project)
    (project.root / "trainer" / "__main__.py").write_text("raise RuntimeError('edited since')\n")
    (runs[2] / "mended").touch()
    done = project("multirun", "retry", str(runs[1].parent), cwd=tmp_path)
    assert done.returncode == 1, done.stderr  # seed 3 fails again
    assert f"{runs[1].name}: done, left alone: --done runs it again" in done.stdout
    found = {seed: status.describe(path) for seed, path in runs.items()}
    assert {seed: (now["state"], now["attempt"]) for seed, now in found.items()} == {
        1: ("done", 1),
        2: ("done", 2),
        3: ("failed", 2),
    }
    assert "exited with code 3" in done.stdout and (runs[2] / "logs" / "attempt_1" / "failure-1.json").exists()


def test_a_finished_run_is_repeated_in_a_directory_of_its_own_when_asked(project, tmp_path):
    project.launch("--multirun", "train.seed=1,5")
    runs = by_seed(project)
    again = project("multirun", "retry", "--done", str(runs[1].parent), cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    copies = {run: run.with_name(f"{run.name}-r1") for run in runs.values()}
    assert [status.describe(copy)["state"] for copy in copies.values()] == ["done", "done"]
    for copy in copies.values():
        assert json.loads((copy / "run.json").read_text())["logging"]["run_name"] == copy.name
    listed = json.loads(project("multirun", "results", "--json", str(runs[1].parent), cwd=tmp_path).stdout)
    assert [one["overrides"]["train.seed"] for one in listed] == ["1", "5", "1", "5"]
    assert [one["path"] for one in listed] == [
        str(path) for path in (runs[1], runs[5], copies[runs[1]], copies[runs[5]])
    ]
    third = project("multirun", "retry", "--done", str(runs[1]), cwd=tmp_path)
    assert third.returncode == 0 and runs[1].with_name(f"{runs[1].name}-r2").is_dir()


def test_runs_that_were_moved_with_their_code_go_on(project, tmp_path):
    project.launch("train.seed=2")
    moved = project.runs.rename(tmp_path / "moved")
    (run,) = (path.parent for path in moved.glob("*/*/run.json"))
    (run / "mended").touch()
    done = project("multirun", "retry", str(run), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert status.describe(run)["state"] == "done" and str(moved / "code") in (run / "submission.sh").read_text()


def test_failed_runs_go_to_slurm_as_one_array_and_queued_ones_are_left_alone(project, fake_slurm, tmp_path):
    sweep = ["cluster=slurm", "cluster.device=cpu", "--multirun", "train.seed=1,2,3,5"]
    fake_slurm.says(*(f"4711_{index}|PENDING|Priority|N/A" for index in range(4)))
    project.launch(*sweep)
    runs = by_seed(project)
    status.write_json(runs[1] / "status.json", {"state": "failed", "error": "rank 1"})
    fake_slurm.says("4711_1|NODE_FAIL|None|N/A", "4711_2|RUNNING|None|N/A", "4711_3|PENDING|BeginTime|N/A")
    done = project("multirun", "retry", str(runs[1].parent), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{runs[3].name}: starting, left alone" in done.stdout and f"{runs[5].name}: queued, left" in done.stdout
    assert "#SBATCH --array=0-1\n" in fake_slurm.scripts[1] and len(fake_slurm.scripts) == 2
    ids = {seed: status.read_json(run / "job.json")["job_id"] for seed, run in runs.items()}
    assert ids == {1: "4712_0", 2: "4712_1", 3: "4711_2", 5: "4711_3"}


def test_a_cancelled_sweep_can_be_retried(project, fake_slurm, tmp_path):
    fake_slurm.says("4711_0|PENDING|Priority|N/A", "4711_1|PENDING|Priority|N/A")
    project.launch("cluster=slurm", "cluster.device=cpu", "--multirun", "train.seed=1,2")
    sweep = project.run_dirs()[0].parent
    cancelled = project("multirun", "cancel", str(sweep), cwd=tmp_path)
    assert cancelled.stdout.count("scancel 4711_0 4711_1 sent") == 2 and len(fake_slurm.calls("scancel")) == 1
    fake_slurm.says("4711_0|CANCELLED|None|N/A", "4711_1|CANCELLED|None|N/A")
    project("multirun", "retry", str(sweep), cwd=tmp_path)
    fake_slurm.says("4712_0|PENDING|Priority|N/A", "4712_1|PENDING|Priority|N/A")
    shown = project("multirun", "status", "--json", str(sweep), cwd=tmp_path)
    assert [one["state"] for one in json.loads(shown.stdout)] == ["queued", "queued"]
    assert not (sweep / status.CANCEL).exists()


def test_a_run_whose_code_is_gone_or_changed_is_refused(project, tmp_path):
    project.launch("train.seed=2")
    (run,) = project.run_dirs()
    snapshot = Path(status.read_json(run / "source.json")["snapshot"])
    changed = snapshot / "trainer" / "__main__.py"
    changed.chmod(0o644)
    changed.write_text("raise RuntimeError('edited')\n")
    done = project("multirun", "retry", str(run), cwd=tmp_path)
    assert done.returncode == 2 and "was changed after it was frozen" in done.stderr
    snapshot.rename(tmp_path / "moved")
    done = project("multirun", "retry", str(run), cwd=tmp_path)
    assert done.returncode == 2 and "its code is not there" in done.stderr
    assert status.describe(run)["attempt"] == 1
