"""Where a run's checkpoints lie, and which of them are complete. Needs no torch."""

from __future__ import annotations

from pathlib import Path

METADATA = "metadata.json"  # written last


def directory(run_dir: Path, step: int) -> Path:
    """Of the checkpoint after `step` optimizer steps."""
    return run_dir / "checkpoints" / f"step_{step:08d}"


def complete_and_torn(run_dir: Path) -> tuple[list[int], list[Path]]:
    """Steps of the complete checkpoints, rising, and the directories that a killed save has left."""
    complete, torn = [], []
    for path in sorted((run_dir / "checkpoints").glob("step_*")):
        number = path.name.removeprefix("step_")
        if number.isdecimal() and (path / METADATA).is_file():
            complete.append(int(number))
        else:
            torn.append(path)
    return sorted(complete), torn


def surviving(run_dir: Path) -> str:
    """What the run can go on from, in words."""
    complete, _ = complete_and_torn(run_dir)
    return str(directory(run_dir, complete[-1])) if complete else "its start: there is no complete checkpoint"
