"""Rows of metrics.jsonl: one per optimizer step, whatever the device is still doing and whatever goes wrong."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

import trainer.metrics.report as report_module
import trainer.train as train_module
from tests.trainer.processes import RUN, rows
from trainer.config import CheckpointConfig, from_dict, to_dict
from trainer.parallel.mesh import build_mesh
from trainer.stop import StopRequest


class LateMark(report_module.Mark):
    """Of a device that has never caught up when it is asked."""

    def passed(self):
        return False


def _fail(step):
    """Replacements in trainer.train, by name: what goes wrong in or after optimizer step `step`."""
    calls = []

    def at(function, action):
        def run(*arguments, **named):
            calls.append(1)
            return action() if len(calls) == step else function(*arguments, **named)

        return run

    def crash():
        raise RuntimeError("broken here")

    return {
        "forward_backward": at(train_module.forward_backward, crash),
        "update": at(train_module.update, crash),
        "evaluate": lambda *a: crash(),
        "evaluate_nan": lambda *a: math.nan,
        "": None,
    }


def _train(run_dir: str, config_dict: dict, broken: str, step: int):
    """Train in this process; returns the error, and how many rows were in the file at each save."""
    config = from_dict(config_dict)
    train_module.Mark = report_module.Mark = LateMark
    saved, save = [], train_module.store.save

    def counted_save(directory, *rest):
        saved.append(len(rows(directory)))
        save(directory, *rest)

    train_module.store.save = counted_save
    if broken:
        setattr(train_module, broken.removesuffix("_nan"), _fail(step)[broken])
    stop = StopRequest(Path(run_dir), 0, grace_s=60)
    try:
        train_module.train(config, Path(run_dir), build_mesh(config.parallelism, torch.device("cpu")), "digest", stop)
    except Exception as error:  # noqa: BLE001  the test looks at it
        return f"{type(error).__name__}: {error}", saved
    return None, saved


def test_a_late_device_changes_no_row_and_a_checkpoint_comes_after_its_rows(ranks, tmp_path):
    run = dataclasses.replace(RUN, checkpoint=CheckpointConfig(every_steps=2))
    ((error, saved),) = ranks(1, _train, str(tmp_path), to_dict(run), "", 0)
    assert error is None and saved == [2, 4, 6]
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in found if "eval_loss" in row] == [3, 6]
    assert all(("eval_time_s" in row) == ("eval_loss" in row) for row in found)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["eval_time_s"]["n"] == 2 and result["checkpoint_time_s"]["n"] == 3
    assert result["loss"]["last"] == found[-1]["loss"]


@pytest.mark.parametrize(
    "broken, step, last, message",
    [
        ("forward_backward", 3, 2, "RuntimeError: broken here"),
        ("update", 3, 2, "RuntimeError: broken here"),
        ("evaluate", 3, 3, "RuntimeError: broken here"),  # after step 3 was applied
        ("evaluate_nan", 3, 3, "NonFiniteError: step 3: the held-out loss after it is nan"),
    ],
)
def test_a_failure_leaves_the_row_of_every_applied_step(ranks, tmp_path, broken, step, last, message):
    ((error, _),) = ranks(1, _train, str(tmp_path), to_dict(RUN), broken, step)
    assert error == message
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, last + 1))
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["step"], status["error"]) == ("failed", last, message)
    assert not (tmp_path / "result.json").exists()
