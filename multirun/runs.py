"""Finds run directories: by path, by sweep, by key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import index
from launcher.status import read_json
from trainer.config import ConfigError

SWEEP = "sweep.json"  # written by multirun.array: columns, and per run key, path and its own overrides


@dataclass(frozen=True)
class Found:
    """What one argument of the command line names."""

    path: Path
    runs: tuple[Path, ...]  # run directories
    is_sweep: bool
    choices: tuple[dict[str, str], ...]  # of every run what makes it differ from the others, as in sweep.json


def find(name: str, runs_dir: Path) -> Found:
    """The run or the sweep of a path, a name or key below runs_dir, or one that this user started anywhere; raises
    ConfigError where there is none."""
    for path in _candidates(name, runs_dir):
        if (path / "run.json").is_file():
            return Found(path.resolve(), (path.resolve(),), False, ({},))
        if (path / SWEEP).is_file():
            return _sweep(path.resolve())
        if path.is_dir() and (runs := tuple(sorted(run.parent.resolve() for run in path.glob("*/run.json")))):
            return Found(path.resolve(), runs, True, ({},) * len(runs))
    raise ConfigError(
        f"{name} is neither a run directory, nor a directory of runs, nor a key below {runs_dir.resolve()} "
        "(--runs-dir names another) or of a run that was started by you"
    )


def _candidates(name: str, runs_dir: Path) -> Iterator[Path]:
    yield from (Path(name), runs_dir / name)
    yield from _of_key(name, runs_dir)
    if known := index.look_up(name):
        yield known


def _of_key(name: str, runs_dir: Path) -> list[Path]:
    """The newest run directory of a key or of a name."""
    matches = sorted(runs_dir.glob(f"*/*-{name}/run.json")) or sorted(runs_dir.glob(f"*/{name}/run.json"))
    return [path.parent for path in matches[-1:]]


def _sweep(path: Path) -> Found:
    """A sweep that may have been moved: its runs are looked up beside sweep.json first."""
    entries: list[dict[str, Any]] = read_json(path / SWEEP)["runs"]
    runs, choices = [], []
    for entry in entries:
        stored = Path(entry["path"])
        runs.append(path / stored.name if (path / stored.name / "run.json").is_file() else stored)
        choices.append(entry["overrides"])
    return Found(path, tuple(runs), True, tuple(choices))


def differences(runs: tuple[Path, ...]) -> tuple[dict[str, str], ...]:
    """Per run the groups and keys in which the runs differ; where an option differs by name, its keys are not listed."""
    configs = [read_json(run / "run.json") for run in runs]
    columns: list[str] = []
    for section in configs[0] if configs else ():
        if section in ("launch", "logging", "cluster"):
            continue
        parts = [config.get(section, {}) for config in configs]
        name = next((field for field in ("name", "mode") if field in parts[0]), "")
        names = [part.get(name) for part in parts]
        if len(set(names)) > 1:
            columns.append(f"{section}.{name}")
        for field in parts[0]:
            per_name: dict[Any, set[str]] = {}
            for part, option in zip(parts, names, strict=True):
                per_name.setdefault(option, set()).add(repr(part.get(field)))
            if any(len(values) > 1 for values in per_name.values()):
                columns.append(f"{section}.{field}")
    rows = []
    for config in configs:
        row = {}
        for column in columns:
            section, _, field = column.partition(".")
            row[section if field in ("name", "mode") else column] = str(config.get(section, {}).get(field))
        rows.append(row)
    return tuple(rows)
