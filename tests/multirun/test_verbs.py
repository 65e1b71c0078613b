"""`python -m multirun`: what is said of a run agrees with its files and its processes, from any directory."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest

from launcher import index, status
from multirun import runs
from multirun.__main__ import main
from trainer.config import ConfigError, ModelConfig, OffloadConfig, RunConfig, TrainConfig, to_dict


@pytest.fixture
def frozen(tmp_path):
    """`frozen(name, config)`: a run directory that only has its run.json."""

    def make(name: str, config: RunConfig | None = None) -> Path:
        path = tmp_path / "runs" / "sweep" / name
        path.mkdir(parents=True)
        (path / "run.json").write_text(json.dumps(to_dict(config or RunConfig())))
        return path

    return make


def test_runs_are_found_by_path_sweep_name_and_key(frozen, tmp_path, monkeypatch):
    first, second = frozen("tiny-0123456789"), frozen("tiny-aaaaaaaaaa-r1")
    monkeypatch.chdir(tmp_path)
    for name in (str(first), "runs/sweep/tiny-0123456789", "0123456789", "tiny-0123456789", "sweep/tiny-0123456789"):
        assert runs.find(name, Path("runs")).runs == (first,)
    assert runs.find("aaaaaaaaaa-r1", Path("runs")).runs == (second,)
    for name in ("sweep", "runs/sweep", str(first.parent)):
        assert runs.find(name, Path("runs")).runs == (first, second)
    for name in ("nothing", "runs", "3456789"):
        with pytest.raises(ConfigError, match=name):
            runs.find(name, Path("runs"))


def test_a_key_or_a_sweep_is_found_from_any_directory(project, tmp_path):
    project.launch("--multirun", "train.seed=1,5")
    (tmp_path / "elsewhere").mkdir()
    key, sweep = project.run_dirs()[0].name.rpartition("-")[2], project.run_dirs()[0].parent
    for name, count in ((key, 1), (project.run_dirs()[0].name, 1), (sweep.name, 2)):
        shown = project("multirun", "status", name, cwd=tmp_path / "elsewhere")
        assert shown.returncode == 0 and shown.stdout.count("done") == count, shown.stderr
    unknown = project("multirun", "status", "no-such-key", cwd=tmp_path / "elsewhere")
    assert unknown.returncode == 2 and "or of a run that was started by you" in unknown.stderr
    home = project("multirun", "status", key, cwd=tmp_path / "elsewhere", XDG_STATE_HOME="/proc/none")
    assert home.returncode == 2


def test_a_damaged_file_is_named_and_a_copied_directory_is_shown(frozen, tmp_path, monkeypatch, capsys):
    run, copy = frozen("tiny-0123456789"), frozen("tiny-")
    monkeypatch.chdir(tmp_path)
    assert main(["status", str(copy)]) == 0
    (run / "status.json").write_text("{")
    assert main(["status", str(run)]) == 2
    assert f"{run}/status.json: is not JSON" in capsys.readouterr().err


def test_a_frozen_run_is_found_from_any_directory(project, tmp_path):
    project.launch("train.seed=1", "launch.submit=false")
    project.launch("--multirun", "train.seed=2,3", "launch.submit=false")
    (tmp_path / "elsewhere").mkdir()
    for run in project.run_dirs():
        shown = project("multirun", "status", run.name.rpartition("-")[2], cwd=tmp_path / "elsewhere")
        assert shown.returncode == 0 and "frozen" in shown.stdout, shown.stderr


def test_the_index_takes_any_path_and_skips_what_is_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    old, new = tmp_path / "old" / "tiny-0123456789", tmp_path / os.fsdecode(b"\xff") / "tiny-0123456789"
    for path in (old, new):
        path.mkdir(parents=True)
        index.remember([path])
    assert index.look_up("0123456789") == new
    new.rmdir()
    assert index.look_up("0123456789") == old and index.look_up("456789") is None
    with open(index.index_file(), "ab") as file:
        file.write(b"\xfe\0broken-0123456789\n")
    assert index.look_up("0123456789") == old


def test_a_moved_run_names_its_log_where_it_is_now(project, tmp_path):
    project.launch("train.seed=2")
    moved = project.run_dirs()[0].rename(tmp_path / "moved")
    shown = project("multirun", "status", str(moved))
    assert f"log: {moved / 'logs/attempt_1/rank_1.log'}\n" in shown.stdout


def test_a_run_of_somebody_else_is_one_line(frozen, monkeypatch, capsys):
    path = frozen("tiny-0123456789")

    def denied(self, target):
        raise PermissionError(errno.EACCES, "Permission denied", str(target))

    monkeypatch.setattr(Path, "rename", denied)
    assert main(["cancel", str(path.parent)]) == 2
    assert capsys.readouterr().err == f"refused: {path.parent / status.CANCEL}: Permission denied\n"


def test_a_moved_sweep_keeps_its_own_columns(frozen, tmp_path):
    path = frozen("tiny-0123456789")
    entry = {"key": "0123456789", "path": str(path), "overrides": {"offload": "full"}}
    (path.parent / runs.SWEEP).write_text(json.dumps({"runs": [entry]}))
    moved = path.parent.rename(tmp_path / "elsewhere")
    found = runs.find(str(moved), tmp_path)
    assert found.runs == (moved / path.name,) and found.choices == ({"offload": "full"},)


def test_columns_are_what_differs(frozen):
    configs = [
        RunConfig(
            model=ModelConfig(name="a", hidden_size=1), offload=OffloadConfig(mode="none"), train=TrainConfig(seed=1)
        ),
        RunConfig(
            model=ModelConfig(name="a", hidden_size=1), offload=OffloadConfig(mode="full"), train=TrainConfig(seed=1)
        ),
        RunConfig(
            model=ModelConfig(name="b", hidden_size=2), offload=OffloadConfig(mode="full"), train=TrainConfig(seed=1)
        ),
        RunConfig(
            model=ModelConfig(name="b", hidden_size=3), offload=OffloadConfig(mode="full"), train=TrainConfig(seed=1)
        ),
    ]
    paths = tuple(frozen(f"tiny-{i}", config) for i, config in enumerate(configs))
    assert runs.differences(paths[:3]) == (
        {"model": "a", "offload": "none"},
        {"model": "a", "offload": "full"},
        {"model": "b", "offload": "full"},
    )
    assert runs.differences(paths)[2] == {"model": "b", "model.hidden_size": "2", "offload": "full"}


def test_the_verbs_on_a_real_sweep(project, tmp_path):
    project.launch("--multirun", "train.seed=1,2")
    sweep = project.run_dirs()[0].parent
    by_seed = {json.loads((path / "run.json").read_text())["train"]["seed"]: path for path in project.run_dirs()}

    shown = project("multirun", "status", str(sweep), cwd=tmp_path).stdout
    assert "done" in shown and "failed" in shown and "boom on purpose" in shown
    listed = json.loads(project("multirun", "status", "--json", str(sweep), cwd=tmp_path).stdout)
    assert sorted(one["state"] for one in listed) == ["done", "failed"]
    key = by_seed[1].name.rpartition("-")[2]
    alone = json.loads(project("multirun", "results", key, "--json", cwd=tmp_path).stdout)
    assert alone["key"] == key and alone["state"] == "done" and alone["result"]["loss"]["last"] == 2.0

    table = project("multirun", "results", str(sweep), cwd=tmp_path).stdout
    assert "train.seed" in table and "2.000" in table and str(by_seed[2] / "logs/attempt_1/rank_1.log") in table
    logs = project("multirun", "logs", str(by_seed[2]), "--rank", "1", cwd=tmp_path).stdout
    assert logs.startswith("rank 1 has seed 2") and "Traceback" in logs and "boom on purpose" in logs
    every = project("multirun", "logs", str(by_seed[1])).stdout
    assert "rank_0.log <==" in every and "rank 0 has seed 1" in every and "rank 1 has seed 1" in every
    followed = project("multirun", "logs", "-f", str(by_seed[1])).stdout.splitlines()
    assert sorted(followed) == ["[0] rank 0 has seed 1", "[1] rank 1 has seed 1"]


def test_cancel_and_a_run_whose_processes_are_gone(project):
    done = project.launch("launch.wait=false", "launch.json=true", "train.seed=4")
    job = json.loads(done.stdout)
    run = Path(job["path"])
    deadline = time.monotonic() + 20
    while len(list(run.glob("pid-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert json.loads(project("multirun", "status", "--json", str(run)).stdout)["state"] == "starting"
    os.kill(int(job["job_id"]), signal.SIGKILL)
    while any(status._exists(int(path.read_text())) for path in run.glob("pid-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    lost = project("multirun", "status", str(run))
    assert "lost" in lost.stdout and "processes are gone" in lost.stdout

    project.launch("launch.wait=false", "launch.again=failed", "train.seed=4")
    assert "stopping" in project("multirun", "cancel", str(run)).stdout
    while status.describe(run)["state"] not in status.FINAL:
        assert time.monotonic() < deadline + 20
        time.sleep(0.05)
    assert status.describe(run)["state"] == "cancelled"
    assert "nothing to cancel" in project("multirun", "cancel", str(run)).stdout


def test_mistakes_are_one_line(capsys, tmp_path):
    assert main(["status", "no-such-run", "--runs-dir", str(tmp_path)]) == 2
    assert "no-such-run is neither" in capsys.readouterr().err
    with pytest.raises(SystemExit) as leaving:
        main(["retrain", "x"])
    assert leaving.value.code == 2 and "retrain" in capsys.readouterr().err
