"""The Hydra entry: one job is "prepare one run"; a single run is then submitted here, a sweep by multirun.array.

Exit codes: 0 done (or handed over), 1 a run failed, 2 refused: nothing was written and nothing was submitted.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import overrides, refusal
from launcher.help import help_text
from launcher.schema import Refused, to_config
from trainer.config import ConfigError

if TYPE_CHECKING:
    from launcher.machine import Machine
    from launcher.run import Run
    from launcher.snapshot import Tree

CONF = Path(__file__).resolve().parent.parent / "conf"
REFUSED = 2
LAUNCHER = "array"  # the only hydra/launcher that submits what is prepared here


def main() -> None:
    """Read sys.argv, run, and leave with the exit code."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this command quietly, as it ends any other
    try:
        refusal.working_directory()
        directories = overrides.directories_of(overrides.split_flags(sys.argv[1:])[0], CONF)
        if overrides.help_wanted(sys.argv[1:]):
            print(help_text(directories, overrides.options(directories)))
            return
        raise SystemExit(compose(overrides.rewrite(sys.argv[1:], CONF), directories))
    except Refused as refused:
        raise SystemExit(report(refused, as_json="launch.json=true" in sys.argv)) from None


def compose(arguments: list[str], directories: list[Path]) -> int:
    """Let Hydra compose and act on the arguments; returns the exit code, raises Refused for what cannot be composed."""
    import hydra  # a third of a second: only for command lines that may be right
    from omegaconf import OmegaConf

    from launcher.resolve import slug

    OmegaConf.register_new_resolver("slug_or", lambda name, other: slug(name) if name else other, replace=True)
    sys.argv[1:] = arguments
    door = Door()
    try:
        with refusal.composing(directories) as door.composed:
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(door.job)()
    except SystemExit as leaving:
        refused_by_hydra = leaving.code == 1 and not door.opened
        return REFUSED if refused_by_hydra else leaving.code
    return door.exit_code


class Door:
    """What a single run and every job of a sweep go through."""

    def __init__(self) -> None:
        self.opened = False  # Hydra has composed a configuration
        self.composed: Callable[[], Any] = lambda: None  # to be told so
        self.exit_code = 0

    @cached_property
    def here(self) -> tuple[Machine, Tree]:
        """Machine and code, looked at once: all runs of a sweep are made from the same code."""
        from launcher import machine, snapshot

        return machine.look(), snapshot.tree(snapshot.project_root())

    def job(self, composed: Any) -> Run | ConfigError | None:
        """Hydra's task function. In a sweep it answers with a prepared run or why there is none; else it submits."""
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        self.opened = True
        self.composed()
        settings = HydraConfig.get()
        if settings.mode == RunMode.MULTIRUN:
            launcher = settings.runtime.choices.get("hydra/launcher")
            if launcher != LAUNCHER:  # another one would prepare the runs and submit none of them
                line = f"hydra/launcher={launcher}: a sweep goes through hydra/launcher={LAUNCHER}; where to is cluster=local|slurm"
                raise SystemExit(report(Refused([line]), as_json=composed.launch.get("json") is True))
            try:
                return prepare(composed, settings, self.here, sweep=Path(settings.sweep.dir).name)
            except ConfigError as error:
                return error
        as_json = False
        try:
            as_json = composed.launch.get("json") is True
            run = prepare(composed, settings, self.here)
            self.exit_code = submit_one(run)
        except ConfigError as error:
            self.exit_code = report(error, as_json=as_json)
        return None


def prepare(composed: Any, settings: Any, here: tuple[Machine, Tree], *, sweep: str = "") -> Run:
    """From Hydra's containers to a prepared run; nothing of Hydra goes further. Raises Refused."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from launcher import run

    try:
        plain = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        where = getattr(error, "full_key", None) or "configuration"
        raise Refused([f"{where}: {str(error).splitlines()[0]}"]) from None
    choices = {
        group: str(option)
        for group, option in settings.runtime.choices.items()
        if not group.startswith("hydra/") and option is not None
    }
    machine, tree = here
    return run.prepare(to_config(plain), choices, machine=machine, tree=tree, sweep=sweep)


def report(error: ConfigError, *, as_json: bool) -> int:
    """Say what was refused: on stderr, and as the JSON object that launch.json=true promises. Returns the exit code."""
    lines, plan = str(error).splitlines(), getattr(error, "plan", None)
    if as_json:
        print(json.dumps({"refused": lines, **({"plan": plan} if plan else {})}))
    elif plan:
        print_plan(plan)
    for line in lines:
        print(f"refused: {line}", file=sys.stderr)
    return REFUSED


def print_plan(plan: dict[str, Any]) -> None:
    """The plan in words, to stdout."""
    from launcher.plan import describe

    print("\n".join(describe(plan)), flush=True)


def submit_one(run: Run) -> int:
    """Act on a prepared run as launch.* asks; returns the exit code."""
    from launcher import run as runs

    launch = run.config.launch
    if launch.dry_run:
        return _dry_run(run)
    if not run.submit:
        return _show_stored(run)
    if not launch.json:
        print(f"run         {run.path}\nfrozen      run.json {run.digest}, code {run.tree.digest}")
        print_plan(run.plan)
    with refusal.disk("choose another launch.runs_dir"):
        runs.freeze(run)
        if not launch.submit:
            return _frozen(run)
        from launcher import submit

        jobs = submit.submit([run])
    if launch.json:
        print(json.dumps(jobs[0]), flush=True)
    elif run.config.cluster.name == "slurm" or launch.wait == "false":
        print("\n".join([f"job         {jobs[0]['job_id']}, key {run.key}", *submit.announce(str(run.path), jobs)]))
    return submit.wait([run]) if launch.wait == "true" else 0


def _frozen(run: Run) -> int:
    """Say how a frozen run is started by hand."""
    from launcher import index
    from launcher import run as runs

    index.remember([run.path])
    command = runs.torchrun_command(run)
    stored = {"key": run.key, "path": str(run.path), "command": command}
    print(json.dumps(stored) if run.config.launch.json else f"frozen; start it with\n  {command}")
    return 0


def _dry_run(run: Run) -> int:
    from launcher import submit

    if run.config.launch.json:
        print(json.dumps({"key": run.key, "path": str(run.path), **run.plan}))
        return 0
    print(f"run         {run.path} (not written)")
    print_plan(run.plan)
    print(f"\n{submit.script(run)}")
    return 0


def _show_stored(run: Run) -> int:
    """Say what is known of a run that is not started again."""
    from launcher import status
    from launcher.run import RETRIED
    from launcher.table import result_table

    stored = status.describe(run.path)
    result = status.read_json(run.path / "result.json")
    if run.config.launch.json:
        print(json.dumps({**stored, "result": result}))
    elif run.state == "done":
        print(f"This experiment has run with this code before: {run.path}\n\n{result_table(result)}\n")
        print("Run it again with launch.again=all")
    else:
        reason = f" ({stored['reason']})" if "reason" in stored else ""
        print(f"This experiment is {run.state}{reason}: {run.path}", file=sys.stderr)
        retry = (
            "launch.again=failed tries again"
            if run.state in RETRIED
            else f"python -m multirun status {shlex.quote(str(run.path))}"
        )
        print(retry, file=sys.stderr)
    return 0 if run.state == "done" else 1
