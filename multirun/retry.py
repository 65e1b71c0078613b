"""`multirun retry`: what failed goes on in its own directory, with the code and the configuration that were frozen there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher import run as runs
from launcher import snapshot, status
from multirun.runs import SWEEP, Found
from trainer import config as configuration
from trainer.config import ConfigError, RunConfig, to_dict

FROZEN = ("run.json", "plan.json", "source.json")


@dataclass(frozen=True, kw_only=True)
class FrozenRun:
    """The part of launcher.run.Run that submission reads, from a run directory."""

    key: str
    path: Path
    config: RunConfig
    snapshot: Path
    submit: bool
    state: str


def read(run_dir: Path, *, submit: bool, state: str) -> FrozenRun:
    """A run as it was frozen; raises ConfigError where its code is gone or changed, or run.json is of another version."""
    config = configuration.load(run_dir)
    source = status.read_json(run_dir / "source.json")
    code = _code(run_dir, source)
    if submit and not (code / "launcher").is_dir():
        raise ConfigError(f"{run_dir}: its code is not there ({code}): launch the experiment anew")
    if submit and snapshot.tree(code).digest != source["tree"]:
        raise ConfigError(f"{run_dir}: its code in {code} was changed after it was frozen: launch the experiment anew")
    return FrozenRun(key=runs.key_of(run_dir), path=run_dir, config=config, snapshot=code, submit=submit, state=state)


def _code(run_dir: Path, source: dict[str, Any]) -> Path:
    """Where the frozen code lies: as it was written down, or beside the runs where both were moved."""
    stored = Path(source.get("snapshot") or run_dir / "no source.json")
    beside = run_dir.parent.parent / "code" / stored.name
    return beside if not stored.is_dir() and beside.is_dir() else stored


def select(found: Found, done_too: bool) -> list[FrozenRun]:
    """Every run of what was found: those that failed or never started are to be submitted, and with `done_too` a copy of
    each finished one in a directory of its own."""
    selected = []
    for run_dir, now in zip(found.runs, status.describe_all(found.runs), strict=True):
        again = now["state"] in (*runs.RETRIED, "frozen") and (now["state"] == "frozen" or status.has_ended(now))
        if now["state"] == "done" and done_too:
            run_dir, again = repeat(run_dir, found), True
        selected.append(read(run_dir, submit=again, state=now["state"]))
    return selected


def repeat(run_dir: Path, found: Found) -> Path:
    """The directory of one more run of a finished experiment: <name>-<key>-rN beside it, listed in its sweep."""
    config = configuration.load(run_dir)
    key = runs.key_of(run_dir).partition("-r")[0]
    number = len(runs.find(Path(config.launch.runs_dir), key)) or 1
    path = run_dir.with_name(f"{run_dir.name.partition(key)[0]}{key}-r{number}")
    if config.logging.run_name == run_dir.name:
        config = replace(config, logging=replace(config.logging, run_name=path.name))
    path.mkdir()
    for name in FROZEN:
        status.write_json(path / name, status.read_json(run_dir / name))
    status.write_json(path / "run.json", to_dict(config))
    if found.is_sweep and (found.path / SWEEP).is_file():
        choice = found.choices[found.runs.index(run_dir)]
        entries = status.read_json(found.path / SWEEP)["runs"]
        entry = {"key": runs.key_of(path), "path": str(path), "overrides": choice}
        status.write_json(found.path / SWEEP, {"runs": [*entries, entry]})
    return path


def words(run: FrozenRun) -> str:
    """Why a run is not submitted."""
    more = ": --done runs it again, in a new directory" if run.state == "done" else ""
    return f"{run.path.name}: {run.state}, left alone{more}"


def submit_all(selected: Sequence[FrozenRun]) -> list[dict[str, Any]]:
    """Queue the ones for SLURM, as arrays; local ones are left to the caller, who runs one after the other."""
    from launcher import submit

    return submit.submit([run for run in selected if run.submit and run.config.cluster.name == "slurm"])
