"""The whole trainer as a process: what it leaves behind, a resume that changes nothing, failures that are told."""

import dataclasses
import json
import shutil
import subprocess
import sys

import pytest

from tests.trainer.processes import MODEL, RUN, TWO, course, freeze, rows, start
from trainer.config import CheckpointConfig


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of six steps with a checkpoint every two, in one process without hydra, submitit and wandb."""
    run = dataclasses.replace(RUN, checkpoint=CheckpointConfig(every_steps=2, keep=2))
    run_dir = freeze(tmp_path_factory.mktemp("runs") / "tiny-0123456789", run)
    ((code, output),) = start(run_dir, fresh=True)
    assert code == 0, output
    return run_dir


def test_a_run_leaves_its_rows_status_and_result(finished):
    assert [row["step"] for row in rows(finished)] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows(finished) if "eval_loss" in row] == [3, 6]
    assert all(row["routing"] == "learned" and "mfu" not in row for row in rows(finished))
    status = json.loads((finished / "status.json").read_text())
    assert (status["state"], status["step"], status["steps"]) == ("done", 6, 6)
    result = json.loads((finished / "result.json").read_text())
    assert result["status"] == "done" and result["steps"] == 6
    assert "mfu" not in result and "cpu" in result["notes"]["mfu"]
    assert result["loss"] == {"first": rows(finished)[0]["loss"], "last": rows(finished)[-1]["loss"]}
    assert result["loss"]["last"] < result["loss"]["first"]


def test_only_the_newest_checkpoints_are_kept(finished):
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["step_00000004", "step_00000006"]


def test_a_resumed_run_equals_the_uninterrupted_one_bitwise(finished, tmp_path):
    """Killed after step 5: the rows after step 4 are given up, and steps 5 and 6 come out the same."""
    run_dir = tmp_path / finished.name
    shutil.copytree(finished, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step_00000006")
    (run_dir / "checkpoints" / "step_00000008.partial").mkdir()
    (run_dir / "result.json").unlink()
    (run_dir / "failure-0.json").write_text("{}")  # of the attempt that was killed
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:5]) + '{"step": 6, "lo')
    ((code, output),) = start(run_dir)
    assert code == 0, output
    assert not (run_dir / "failure-0.json").exists()
    assert "continues after step 4" in output and "step_00000008.partial is not complete" in output
    assert course(run_dir) == course(finished)
    # A new process's first step compiles and warms up: the step time leaves it out, and knows it by its attempt.
    assert [row["attempt"] for row in rows(run_dir)] == [1, 1, 1, 1, 2, 2]


def test_a_run_that_is_done_is_not_trained_again(finished):
    before = {path.name: path.stat().st_mtime_ns for path in finished.iterdir()}
    ((code, output),) = start(finished)
    assert code == 0 and "is done" in output
    assert {path.name: path.stat().st_mtime_ns for path in finished.iterdir()} == before


def test_another_layout_is_refused(finished, tmp_path):
    run_dir = tmp_path / finished.name
    shutil.copytree(finished, run_dir)
    (run_dir / "result.json").unlink()
    data = json.loads((run_dir / "run.json").read_text())
    data["optimizer"]["name"] = "sign_sgd"
    (run_dir / "run.json").write_text(json.dumps(data))
    ((code, output),) = start(run_dir)
    assert code != 0 and "CheckpointError" in output and "sign_sgd" in output


def test_same_seed_same_losses_and_another_seed_others(finished, tmp_path):
    again = freeze(tmp_path / "again", RUN)
    other = freeze(tmp_path / "other", dataclasses.replace(RUN, train=dataclasses.replace(RUN.train, seed=1)))
    for run_dir in (again, other):
        ((code, output),) = start(run_dir)
        assert code == 0, output
    assert course(again) == course(finished)
    assert course(other)[0]["loss"] != course(finished)[0]["loss"]


def test_ranks_with_different_configurations_refuse_to_start(tmp_path):
    run_dir = freeze(tmp_path / "run", TWO)
    other = freeze(tmp_path / "other", dataclasses.replace(TWO, data=dataclasses.replace(TWO.data, seq_len=32)))
    edit = f"import os\nif os.environ['RANK'] == '1':\n    main(Path({str(other)!r}))"
    for code, output in start(run_dir, 2, edit):
        assert code != 0
        assert "data.seq_len: rank 0 has 64, rank 1 has 32" in output


def test_a_non_finite_loss_stops_before_the_update_and_leaves_a_file(tmp_path):
    run_dir = freeze(tmp_path / "run", dataclasses.replace(RUN, checkpoint=CheckpointConfig(every_steps=1)))
    edit = (
        "import trainer.train as t\noriginal = t.forward_backward\ncalls = []\n"
        "def broken(model, *rest):\n"
        "    calls.append(1)\n"
        "    totals = original(model, *rest)\n"
        "    if len(calls) == 3: totals.sums[0] = float('nan')\n"
        "    return totals\n"
        "t.forward_backward = broken"
    )
    ((code, _),) = start(run_dir, edit=edit)
    assert code != 0
    failure = json.loads((run_dir / "failure-0.json").read_text())
    assert "step 3" in failure["error"] and "NonFiniteError" in failure["error"] and failure["host"]
    assert json.loads((run_dir / "status.json").read_text())["state"] == "failed"
    assert [row["step"] for row in rows(run_dir)] == [1, 2]
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step_00000001", "step_00000002"]


def test_a_failing_save_ends_the_run_and_names_the_path(tmp_path):
    run_dir = freeze(tmp_path / "run", dataclasses.replace(RUN, checkpoint=CheckpointConfig(every_steps=2)))
    (run_dir / "checkpoints").write_text("a file where the directory should be")
    ((code, output),) = start(run_dir)
    assert code != 0 and "CheckpointError" in output and "step_00000002.partial" in output


def test_balanced_weights_are_not_saved_unless_forced(tmp_path):
    run = dataclasses.replace(
        RUN, model=dataclasses.replace(MODEL, routing="balanced"), checkpoint=CheckpointConfig(every_steps=6)
    )
    ((code, output),) = start(freeze(tmp_path / "refused", run))
    assert code != 0 and "checkpoint.force=true" in output
    forced = freeze(
        tmp_path / "forced", dataclasses.replace(run, checkpoint=CheckpointConfig(every_steps=6, force=True))
    )
    ((code, output),) = start(forced)
    assert code == 0, output
    assert (forced / "checkpoints" / "step_00000006" / "metadata.json").is_file()
    assert all(row["routing"] == "balanced" for row in rows(forced))
    assert all(row["load_balance_max_over_mean"] == pytest.approx(1, abs=0.05) for row in rows(forced))


def test_a_stalled_run_prints_stacks_and_fails_by_name(tmp_path):
    stalled = dataclasses.replace(RUN, train=dataclasses.replace(RUN.train, stall_timeout_s=90.0))
    run_dir = freeze(tmp_path / "run", stalled)
    edit = (
        "import time, trainer.train as t\noriginal, progress = t.forward_backward, t.StallWatch.progress\n"
        "done = [0]\n"
        "def hang(*a):\n    return original(*a) if done[0] < 2 else time.sleep(100)\n"
        "def impatient(watch, step):\n"
        "    done[0] = step\n    watch._timeout_s = 90.0 if step < 2 else 0.5\n    progress(watch, step)\n"
        "t.forward_backward, t.StallWatch.progress = hang, impatient"
    )
    ((code, output),) = start(run_dir, edit=edit, timeout_s=60)
    assert code == 1 and "trainer/train.py" in output and "Current thread" in output
    failure = json.loads((run_dir / "failure-0.json").read_text())
    assert "train.stall_timeout_s=0.5 s after step 2" in failure["error"]
    assert "in hang" in failure["traceback"]


def test_a_stall_in_native_code_ends_too(tmp_path):
    """Nothing in Python runs: the stacks come from a thread of the interpreter's own."""
    code = (
        "import ctypes, pathlib, trainer.failure as f\n"
        "f.NATIVE_GRACE_S = 0.5\n"
        f"f.StallWatch(0.5, lambda *a: pathlib.Path({str(tmp_path / 'reported')!r}).touch())\n"
        "ctypes.PyDLL(None).sleep(60)  # holds the lock\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1 and "Timeout" in done.stderr and not (tmp_path / "reported").exists()
