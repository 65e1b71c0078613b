"""The launching side of a sweep: every run is prepared before any is submitted; all of them, or none."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from launcher import index, status, submit, watch
from launcher import run as runs
from launcher.refusal import disk
from multirun import results
from multirun.runs import SWEEP
from trainer.config import ConfigError

if TYPE_CHECKING:
    from launcher.run import Run

REFUSED = 2


def compose_once(config_loader: Any) -> None:
    """Let Hydra compose each job once: its sweeper does so to see whether a job is legal, and its launcher once more.

    Every job gets the sweep's own directory, whatever launch.name its own options choose.
    """
    compose = config_loader.load_sweep_config
    composed: dict[tuple[str, ...], Any] = {}

    def load_sweep_config(master_config: Any, sweep_overrides: list[str]) -> Any:
        key = tuple(sweep_overrides)
        if key not in composed:
            composed[key] = compose(master_config, sweep_overrides)
            composed[key].hydra.sweep.dir = master_config.hydra.sweep.dir
            return composed[key]
        return composed.pop(key)  # the second caller writes into it

    config_loader.load_sweep_config = load_sweep_config


def launch(sweep_dir: str, job_overrides: Sequence[Sequence[str]], returns: Sequence[Any]) -> None:
    """Act on what Hydra's jobs (each of them: prepare one run) returned. Leaves by SystemExit unless all went well."""
    sweep = Path(sweep_dir).resolve()
    choices = own_overrides(job_overrides)
    prepared, problems = sort(returns, choices)
    as_json = any(job.cfg.launch.get("json") is True for job in returns)
    problems = problems or refusals(prepared, choices)
    (sweep / "multirun.yaml").unlink(missing_ok=True)  # Hydra's; sweep.json and every run.json say more
    if problems or prepared[0].config.launch.dry_run:
        remove_traces(sweep)
    if problems:
        raise SystemExit(refuse(problems, len(returns), as_json))
    try:
        code = act(prepared, choices, sweep)
    except ConfigError as error:  # sbatch or the disk
        code = refuse([("the sweep", str(error).splitlines())], len(returns), as_json)
    if code:
        raise SystemExit(code)


def own_overrides(job_overrides: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Per job the overrides in which the jobs of a sweep differ."""
    jobs = [dict(text.lstrip("+").split("=", 1) for text in job if "=" in text) for job in job_overrides]
    keys = dict.fromkeys(key for job in jobs for key in job)
    swept = [key for key in keys if len({job.get(key) for job in jobs}) > 1]
    return [{key: job.get(key, "") for key in swept} for job in jobs]


def sort(returns: Sequence[Any], choices: Sequence[dict[str, str]]) -> tuple[list[Run], list[tuple[str, list[str]]]]:
    """Prepared runs, and for each job that is refused its name and its problems; other exceptions are raised."""
    prepared, problems = [], []
    for job, choice in zip(returns, choices, strict=True):
        outcome = job.return_value  # raises what the job raised
        if isinstance(outcome, ConfigError):
            problems.append((name(choice), str(outcome).splitlines()))
        else:
            prepared.append(outcome)
    return prepared, problems


def name(choice: dict[str, str]) -> str:
    """A job in the words of its own overrides."""
    return " ".join(f"{key}={value}" for key, value in choice.items()) or "the only run"


def refusals(prepared: Sequence[Run], choices: Sequence[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """What is wrong with the sweep although every run of it is right."""
    first: dict[Path, str] = {}
    problems = []
    for run, choice in zip(prepared, choices, strict=True):
        if run.path in first:
            text = f"the same experiment as {first[run.path]}: only cluster, launch or logging keys differ"
            problems.append((name(choice), [text]))
        first.setdefault(run.path, name(choice))
    launch = prepared[0].config.launch
    queue = [run for run in prepared if run.submit and run.config.cluster.name == "local"]
    if launch.submit and not launch.dry_run and launch.wait == "false" and len(queue) > 1:
        text = "launch.wait=false: runs on this machine go one after the other, so the command stays; leave it out"
        problems.append(("the sweep", [text]))
    return problems


def refuse(problems: Sequence[tuple[str, list[str]]], count: int, as_json: bool) -> int:
    """Name every bad job and its problems; returns the exit code."""
    if as_json:
        print(json.dumps({"refused": [{"run": job, "problems": lines} for job, lines in problems]}))
    print(f"refused: {len(problems)} of {count} runs break rules, nothing was submitted", file=sys.stderr)
    for job, lines in problems:
        for line in lines:
            print(f"  {job}: {line}", file=sys.stderr)
    return REFUSED


def remove_traces(sweep: Path) -> None:
    """Hydra has made the sweep's directory before any job was checked."""
    for directory in (sweep, sweep.parent):
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()


def act(prepared: Sequence[Run], choices: Sequence[dict[str, str]], sweep: Path) -> int:
    """Do with the runs what launch.* asks; returns the exit code."""
    launch = prepared[0].config.launch
    if launch.dry_run:
        return dry_run(prepared, choices)
    wanted = [run for run in prepared if run.submit]
    entries = [
        {"key": run.key, "path": str(run.path), "overrides": choice}
        for run, choice in zip(prepared, choices, strict=True)
    ]
    with disk("choose another launch.runs_dir"):
        for run in wanted:
            runs.freeze(run)
        write_sweep(sweep, entries)
    index.remember([*(run.path for run in wanted if not launch.submit), sweep])
    out = sys.stderr if launch.json else sys.stdout
    print(f"sweep       {sweep}", file=out, flush=True)
    if not launch.submit:
        commands = {run.path: runs.torchrun_command(run) for run in prepared}
        stored = [entry | {"command": commands[Path(entry["path"])]} for entry in entries]
        print(json.dumps(stored) if launch.json else "\n".join(commands.values()))
        return 0
    on_slurm = [run for run in wanted if run.config.cluster.name == "slurm"]
    with disk():
        jobs = submit.submit(on_slurm)
    for job in jobs:
        print(f"job {job['job_id']}  {job['path']}", file=out, flush=True)
    if jobs:
        print("\n".join(submit.announce(str(sweep), jobs)), file=out, flush=True)
    interrupted = one_after_the_other(prepared, choices, sweep, out)
    if launch.wait == "true" and on_slurm:
        submit.wait(on_slurm)
    return report(prepared, choices, jobs, out, interrupted)


def write_sweep(sweep: Path, entries: Sequence[dict[str, Any]]) -> None:
    """sweep.json; a sweep of the same name goes on, with the runs that it has."""
    paths = [entry["path"] for entry in entries]
    before = [entry for entry in status.read_json(sweep / SWEEP).get("runs", []) if entry["path"] not in paths]
    status.write_json(sweep / SWEEP, {"runs": [*before, *entries]})
    (sweep / status.CANCEL).unlink(missing_ok=True)


def dry_run(prepared: Sequence[Run], choices: Sequence[dict[str, str]]) -> int:
    """Plan of every run and every script that would be submitted; nothing is written."""
    if prepared[0].config.launch.json:
        print(json.dumps([{"key": run.key, "path": str(run.path), **run.plan} for run in prepared]))
        return 0
    from launcher.plan import describe

    for run, choice in zip(prepared, choices, strict=True):
        print(f"== {name(choice)}\nrun         {run.path} (not written)")
        print("\n".join(describe(run.plan)))
        if run.config.cluster.name != "slurm":
            print(f"\n{submit.script(run)}")
    for group in submit.arrays([run for run in prepared if run.config.cluster.name == "slurm"]):
        print(f"\n== for {len(group)} run(s)\n{submit.array_script(group)}")
    return 0


def one_after_the_other(prepared: Sequence[Run], choices: Sequence[dict[str, str]], sweep: Path, out: TextIO) -> bool:
    """Run the local ones; a failure stops only its own run. Returns whether the user stopped the sweep."""
    with watch.interrupts() as seen:
        for number, (run, choice) in enumerate(zip(prepared, choices, strict=True), start=1):
            head = f"[{number}/{len(prepared)}] {name(choice)}"
            if not run.submit:
                print(f"{head}: already {run.state}", file=out, flush=True)
            if not run.submit or run.config.cluster.name != "local":
                continue
            if seen or (sweep / status.CANCEL).exists():
                return True
            try:
                with disk():
                    submit.submit([run])
            except KeyboardInterrupt:
                return True
            except ConfigError as error:  # another command has started it meanwhile
                print(f"{head}: {error}", file=out, flush=True)
                continue
            end = watch.follow(run.path, out, seen, head)
            print(f"{head}: {end['state']}" + (f": {end['reason']}" if "reason" in end else ""), file=out, flush=True)
    return bool(seen)


def report(
    prepared: Sequence[Run],
    choices: Sequence[dict[str, str]],
    jobs: Sequence[dict[str, Any]],
    out: TextIO,
    interrupted: bool,
) -> int:
    """One table of all runs, or one JSON list; exit code 1 if any failed, 130 if the user stopped the sweep."""
    found = results.records([run.path for run in prepared], choices)
    if prepared[0].config.launch.json:
        print(json.dumps(found))
    elif len(jobs) < len(prepared) or prepared[0].config.launch.wait == "true":
        print(file=out)
        results.show(found, out)
    failed = any(one["state"] in ("failed", "cancelled", "preempted", "lost") for one in found)
    if failed or interrupted:
        print("\nlaunch.again=failed tries again what failed, and starts what was not started", file=out, flush=True)
    return 130 if interrupted else int(failed)
