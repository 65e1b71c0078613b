"""One run: its key, its directory, and the freezing of both."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher import snapshot, status
from launcher.check import Problem, check
from launcher.machine import Machine
from launcher.plan import make_plan
from launcher.resolve import resolve, slug
from launcher.schema import Refused
from launcher.snapshot import Tree
from trainer.config import NOT_IDENTITY, RunConfig, canonical_json, digest, to_dict

NEW = "new"
_KEY = re.compile(r"-([0-9a-f]{10}(?:-r\d+)?)$")
RETRIED = ("failed", "cancelled", "preempted", "lost")  # what launch.again=failed tries again


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that passed every check. Nothing is on disk before `freeze`."""

    key: str  # experiment and code; with -rN when it repeats a finished run
    path: Path  # absolute run directory
    config: RunConfig  # resolved
    plan: dict[str, Any]
    tree: Tree  # the code
    choices: dict[str, str]  # option per group
    state: str  # of what is on disk under this key: "new", or as launcher.status.describe says
    submit: bool  # False: it is done, has failed or is under way, and launch.again does not ask for more

    @property
    def snapshot(self) -> Path:
        """The frozen code, shared by all runs that use it."""
        return self.runs_dir / "code" / self.tree.digest

    @property
    def digest(self) -> str:
        """Of run.json: rank 0 logs the same one."""
        return digest(canonical_json(to_dict(self.config)))

    @property
    def runs_dir(self) -> Path:
        return Path(self.config.launch.runs_dir)


class RunRefused(Refused):
    """A run that breaks rules; `plan` is there when only this machine stands in its way."""

    def __init__(self, problems: list[Problem], plan: dict[str, Any] | None):
        self.problems, self.plan = problems, plan
        super().__init__(problem.text for problem in problems)


def prepare(
    config: RunConfig,
    choices: dict[str, str],
    *,
    machine: Machine,
    tree: Tree,
    sweep: str = "",
) -> Run:
    """Resolve, check and plan a run and find what exists of it; writes nothing, raises RunRefused.

    `sweep`: the name of the sweep that it belongs to.
    """
    config = resolve(config, machine)
    problems = check(config, machine)
    if problems:
        experiment_is_sound = all(problem.concerns_machine for problem in problems)
        raise RunRefused(problems, make_plan(config) if experiment_is_sound else None)
    key = run_key(config, tree.digest)
    runs_dir = Path(config.launch.runs_dir)
    found = find(runs_dir, key)
    path = found[-1] if found else None
    state = status.describe(path)["state"] if path else NEW
    again = config.launch.again
    submit = state in (NEW, "frozen") or (state in RETRIED and again == "failed")
    if again == "all" and (state == "done" or state in RETRIED):
        key, path, state, submit = f"{key}-r{len(found)}", None, NEW, True
    if path is None:
        path = (
            runs_dir / (sweep or time.strftime("%Y-%m-%d")) / f"{slug(config.launch.name or config.model.name)}-{key}"
        )
    else:
        key = key_of(path)
    names = replace(config.logging, run_name=config.logging.run_name or path.name, group=config.logging.group or sweep)
    config = replace(config, logging=names)
    return Run(
        key=key,
        path=path,
        config=config,
        plan=make_plan(config),
        tree=tree,
        choices=choices,
        state=state,
        submit=submit,
    )


def run_key(config: RunConfig, tree_digest: str) -> str:
    """Hash of the experiment and the code; where and how it runs is left out."""
    experiment = {name: part for name, part in to_dict(config).items() if name not in NOT_IDENTITY}
    return digest(canonical_json({"experiment": experiment, "code": tree_digest}))


def key_of(path: Path) -> str:
    """The key in a run directory's name; raises Refused where there is none."""
    match = _KEY.search(path.name)
    if not match:
        raise Refused([f"{path} is not named like a run directory (<name>-<key>)"])
    return match.group(1)


def find(runs_dir: Path, key: str) -> list[Path]:
    """The run directories of this key: the first one, then its repetitions in order. Copies of other names are not."""
    paths = [path for path in runs_dir.glob(f"*/*-{key}*") if _KEY.search(path.name) and (path / "run.json").is_file()]
    paths = [path for path in paths if key_of(path).partition("-r")[0] == key]
    return sorted(paths, key=lambda path: int(key_of(path).partition("-r")[2] or 0))


def freeze(run: Run, root: Path | None = None) -> None:
    """Write the run directory and the code it runs; a directory that exists keeps its results and gets the new run.json.

    `root`: the project whose code `run.tree` lists; None: the one that this module belongs to.
    """
    root = root or snapshot.project_root()
    snapshot.freeze(root, run.tree, run.snapshot)
    files = {
        "run.json": to_dict(run.config),
        "plan.json": run.plan,
        "source.json": snapshot.source(root, run.tree, run.snapshot),
    }
    if run.path.exists():
        for name, content in files.items():
            status.write_json(run.path / name, content)
        return
    run.path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{run.path.name}-", dir=run.path.parent))
    try:
        partial.chmod(0o755)
        for name, content in files.items():
            status.write_json(partial / name, content)
        os.rename(partial, run.path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not run.path.exists():  # else another command froze the same run first: equal by its key
            raise Refused([f"{run.path}: cannot be written ({error.strerror})"]) from error


def torchrun_command(run: Run) -> str:
    """The line that runs a frozen directory without the launcher."""
    parallelism = run.config.parallelism
    nodes = ""
    if parallelism.nodes > 1:
        nodes = f"--nnodes {parallelism.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29400 "
    code, path = shlex.quote(str(run.snapshot)), shlex.quote(str(run.path))
    return f"cd {code} && torchrun {nodes}--nproc-per-node {parallelism.gpus_per_node} -m trainer {path}"
