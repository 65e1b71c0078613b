"""Checkpoints of a run: every rank's part of the TrainState, complete only when metadata.json is there.

A save goes to step_XXXXXXXX.partial, its metadata is written last, and the directory is renamed. So a directory without
the ending is complete, whatever killed the job. The layout is fixed: a checkpoint is read by as many ranks, laid out
alike, as wrote it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.directory import METADATA, complete_and_torn, directory
from trainer.config import ConfigError, RunConfig, to_dict
from trainer.parallel.mesh import Mesh
from trainer.state import TrainState


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the text names the path."""


def save_is_due(step: int, config: RunConfig) -> bool:
    every = config.checkpoint.every_steps
    return every > 0 and (step % every == 0 or step == config.train.steps)


def may_save(config: RunConfig) -> bool:
    """Weights trained with forced-balanced routing are only good for measurements."""
    return config.model.routing != "balanced" or config.checkpoint.force


def refuse_balanced(config: RunConfig) -> None:
    """Raises ConfigError where checkpoints are asked for that may not be saved."""
    if config.checkpoint.every_steps and not may_save(config):
        raise ConfigError(
            "model.routing=balanced with checkpoint.every_steps="
            f"{config.checkpoint.every_steps}: set checkpoint.force=true to save such weights, or model.routing=learned"
        )


def newest(run_dir: Path, mesh: Mesh) -> int:
    """Step of the newest complete checkpoint as rank 0 sees it, 0 if there is none. All ranks call it.

    Others may see an older one on a shared file system for a while. Torn ones are named on stderr and skipped.
    """
    complete, torn = complete_and_torn(run_dir) if mesh.rank == 0 else ([], [])
    for path in torn:
        print(f"warning: {path} is not complete and is not used", file=sys.stderr, flush=True)
    return mesh.gather(max(complete, default=0))[0]


def _layout(config: RunConfig) -> dict[str, Any]:
    """What has to agree between writer and reader."""
    data = to_dict(config)
    frozen = {"model.freeze": config.model.freeze, "model.num_hidden_layers": config.model.num_hidden_layers}
    return {"parallelism": data["parallelism"], "optimizer": config.optimizer.name, **frozen}


def save(run_dir: Path, state: TrainState, config: RunConfig, mesh: Mesh) -> None:
    """Write the state after `state.step` and drop the oldest checkpoints beyond checkpoint.keep. All ranks call it.

    Raises CheckpointError on every rank if any of them could not write; earlier checkpoints stay.
    """
    final = directory(run_dir, state.step)
    partial = final.with_name(final.name + ".partial")

    def write_part() -> None:
        torch.save(state.state_dict(), partial / f"rank_{mesh.rank:05d}.pt")

    def publish() -> None:
        metadata = {"step": state.step, "world_size": mesh.world_size, "layout": _layout(config)}
        (partial / METADATA).write_text(json.dumps(metadata, indent=1))
        if final.exists():  # of an attempt whose later steps were given up
            shutil.rmtree(final)
        partial.rename(final)
        complete = sorted(path for path in final.parent.glob("step_*") if path.suffix != ".partial")
        for path in complete[: -config.checkpoint.keep]:
            shutil.rmtree(path)

    def prepare() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    for action, ranks in ((prepare, (0,)), (write_part, range(mesh.world_size)), (publish, (0,))):
        error = None
        if mesh.rank in ranks:
            try:
                action()
            except (OSError, RuntimeError) as caught:  # torch.save reports a full disk as RuntimeError
                error = f"rank {mesh.rank}: {caught}"
        failures = [text for text in mesh.gather(error) if text]
        if failures:
            raise CheckpointError(f"step {state.step}: {partial} could not be written: {'; '.join(failures)}")


def load(run_dir: Path, step: int, state: TrainState, config: RunConfig, mesh: Mesh) -> None:
    """Continue from the complete checkpoint of `step`. All ranks call it.

    Raises CheckpointError on every rank if it is of another layout, or any rank cannot read its part of it.
    """
    source = directory(run_dir, step)
    part = source / f"rank_{mesh.rank:05d}.pt"
    error = None
    try:
        metadata = json.loads((source / METADATA).read_text())
        if metadata["layout"] != _layout(config):
            raise CheckpointError(f"it was written by {metadata['layout']}, this run is {_layout(config)}")
        state.load_state_dict(torch.load(part, map_location="cpu", weights_only=True))
        if state.step != step:
            raise CheckpointError(f"{part.name} is of step {state.step}")
    except Exception as caught:  # noqa: BLE001  a damaged file raises almost anything
        text = str(caught).partition("\n")[0]
        error = text if isinstance(caught, CheckpointError) else f"{type(caught).__name__}: {text}"
    failures = {rank: text for rank, text in enumerate(mesh.gather(error)) if text}
    if failures:
        shown = "; ".join(f"rank {rank}: {text}" for rank, text in list(failures.items())[:5])
        raise CheckpointError(
            f"{source} cannot be continued from, {shown}. Remove it to continue from the one before, if any"
        )
