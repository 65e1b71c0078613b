"""A checkpoint that cannot be continued from stops every rank, naming its path and what is wrong with it."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.trainer.runs import make_config
from trainer.build import build
from trainer.checkpoint import store
from trainer.config import from_dict
from trainer.data import build_data
from trainer.parallel import local
from trainer.parallel.mesh import build_mesh
from trainer.state import TrainState


def _config(keep=2):
    config = make_config(2, 2)
    config["data"] |= {"name": "random", "seq_len": 16, "global_batch_size": 2}
    config["checkpoint"] |= {"every_steps": 1, "keep": keep}
    return config


def _state(config, mesh):
    model, optimizer, _ = build(config, mesh)
    return TrainState(model, optimizer, build_data(config, mesh.rank, mesh.world_size))


def _save(run_dir, config_dict, steps):
    config = from_dict(config_dict)
    mesh = build_mesh(config.parallelism, torch.device("cpu"))
    state = _state(config, mesh)
    for state.step in steps:
        store.save(Path(run_dir), state, config, mesh)


def _load(run_dirs, config_dict):
    """What every rank says of the newest checkpoint of each directory."""
    config = from_dict(config_dict)
    mesh = build_mesh(config.parallelism, torch.device("cpu"))
    answers = []
    for run_dir in run_dirs:
        # As where rank 1 sees an older state of a shared file system.
        own = Path(run_dir) if mesh.rank == 0 or "stale" not in run_dir else Path(run_dir) / "nothing"
        step = store.newest(own, mesh)
        state = _state(config, mesh)
        for parameter in state.model.parameters():
            local(parameter).zero_()
        try:
            store.load(Path(run_dir), step, state, config, mesh)
        except store.CheckpointError as error:
            answers.append(str(error))
        else:
            zero = any(not local(p).any() and p.ndim > 1 and local(p).numel() for p in state.model.parameters())
            answers.append((step, state.step, zero))
    return answers


DAMAGE = {
    "part_missing": (lambda d: (d / "rank_00001.pt").unlink(), "rank 1: FileNotFoundError"),
    "part_cut": (lambda d: (d / "rank_00001.pt").write_bytes((d / "rank_00001.pt").read_bytes()[:1000]), "rank 1: "),
    "part_of_another_step": (
        lambda d: shutil.copy(d.with_name("step_00000002") / "rank_00001.pt", d),
        "rank 1: rank_00001.pt is of step 2",
    ),
    "metadata_cut": (lambda d: (d / "metadata.json").write_text('{"st'), "rank 0: JSONDecodeError"),
    "another_optimizer": (
        lambda d: (d / "metadata.json").write_text((d / "metadata.json").read_text().replace("adamw", "muon")),
        "it was written by",
    ),
}


def test_a_damaged_checkpoint_stops_every_rank_and_is_named(ranks, tmp_path):
    config = _config()
    ranks(2, _save, str(tmp_path / "good"), config, (2, 4))
    for name, (damage, _) in DAMAGE.items():
        shutil.copytree(tmp_path / "good", tmp_path / name)
        damage(tmp_path / name / "checkpoints" / "step_00000004")
    first, second = ranks(2, _load, [str(tmp_path / name) for name in DAMAGE], config)
    assert first == second
    for (name, (_, expected)), found in zip(DAMAGE.items(), first, strict=True):
        assert f"{name}/checkpoints/step_00000004 cannot be continued from" in found and expected in found, found


def test_torn_and_foreign_entries_are_skipped_and_rank_0_decides(ranks, tmp_path):
    """Also where another rank does not see the newest checkpoint yet."""
    config = _config(keep=3)
    run_dir = tmp_path / "stale"
    ranks(2, _save, str(run_dir), config, (1, 2, 3, 4))
    checkpoints = run_dir / "checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step_00000002", "step_00000003", "step_00000004"]
    (checkpoints / "step_00000004" / "metadata.json").unlink()  # deleted by hand, half way
    (checkpoints / "step_old").mkdir()
    (checkpoints / "step_00000009.partial").mkdir()
    (checkpoints / "step_00000009.partial" / "metadata.json").write_text("{}")  # killed before the rename
    for answer in ranks(2, _load, [str(run_dir)], config):
        assert answer == [(3, 3, False)]
    assert json.loads((checkpoints / "step_00000003" / "metadata.json").read_text())["world_size"] == 2


@pytest.mark.parametrize("keep", [1, 2])
def test_pruning_keeps_the_newest(ranks, tmp_path, keep):
    ranks(2, _save, str(tmp_path), _config(keep), (8, 9, 10, 11))
    kept = sorted(int(path.name.removeprefix("step_")) for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [10, 11][-keep:]
