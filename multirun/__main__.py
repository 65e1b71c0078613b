"""`python -m multirun VERB RUN...`: look at runs and sweeps, from any directory."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher import status, watch
from launcher.refusal import disk, working_directory
from launcher.table import result_table
from multirun import logs, results
from multirun.runs import Found, find
from trainer.config import ConfigError

REFUSED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: shown, or done; 1: a run that retry waited for failed; 2: refused, with one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        working_directory()
        with disk():
            found = [find(name, options.runs_dir) for name in options.run]
            return options.act(found, options) or 0
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m multirun",
        description="Look at runs and sweeps: RUN is a run directory, a sweep's directory or a key.",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for name, act, words in (
        ("status", show_status, "state, step and reason of every run"),
        ("results", show_results, "one table of what came out"),
        ("logs", show_logs, "the text logs of the ranks"),
        ("cancel", cancel, "stop runs that are queued or under way"),
        ("retry", retry, "submit again what failed, was cancelled or was lost; it goes on from its newest checkpoint"),
    ):
        verb = verbs.add_parser(name, help=words, description=words)
        verb.set_defaults(act=act)
        verb.add_argument("run", nargs="+", metavar="RUN", help="run directory, sweep directory or key")
        verb.add_argument(
            "--runs-dir", type=Path, default=Path("runs"), help="where keys are looked up (default: runs)"
        )
        if name in ("status", "results"):
            verb.add_argument(
                "--json", action="store_true", help="one JSON value on stdout: an object for one run, else a list"
            )
        if name == "retry":
            verb.add_argument("--done", action="store_true", help="finished runs too, each in a directory of its own")
            verb.add_argument(
                "--wait", action="store_true", help="stay until they end (on this machine it always does)"
            )
        if name == "logs":
            verb.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")
            verb.add_argument("--rank", type=int, help="of this rank only")
            verb.add_argument("--attempt", type=int, help="of this attempt (default: the newest)")
    return parser


def _print_json(found: Sequence[Found], content: list[dict[str, Any]]) -> None:
    alone = len(found) == 1 and not found[0].is_sweep
    print(json.dumps(content[0] if alone else content))


def show_status(found: Sequence[Found], options: argparse.Namespace) -> None:
    """State of every run, from its files, its processes and SLURM."""
    described = status.describe_all([run for one in found for run in one.runs])
    if options.json:
        _print_json(found, described)
        return
    for one in described:
        print(status_line(one))
        if "reason" in one:
            print(f"  {one['reason']}")
        if "log" in one:
            print(f"  log: {one['log']}")


def status_line(one: dict[str, Any]) -> str:
    """One run in one line."""
    state = watch.waiting(one) if "waits" in one else one["state"]
    parts = [f"{Path(one['path']).name}  {state}", f"step {one.get('step', 0)}/{one.get('steps', '?')}"]
    parts += [f"loss {one['loss']:.3f}"] if "loss" in one else []
    parts += [f"MFU {one['mfu']:.1%}"] if "mfu" in one else []
    parts += [f"{watch.clock(one['time_left_s'])} left"] if "time_left_s" in one else []
    if one["state"] not in (*status.FINAL, "queued") and "heartbeat_age_s" in one:
        parts.append(f"heartbeat {one['heartbeat_age_s']:.0f} s ago")
    parts += [f"{words} {one[key]}" for key, words in (("attempt", "attempt"), ("job_id", "job")) if key in one]
    return ", ".join(parts)


def show_results(found: Sequence[Found], options: argparse.Namespace) -> None:
    """The result of every run; those that have none say why."""
    alone = len(found) == 1 and len(found[0].runs) == 1
    rows = results.records([run for one in found for run in one.runs], [c for one in found for c in one.choices])
    if options.json:
        _print_json(found, rows)
    elif alone and "result" in rows[0]:
        print(f"{result_table(rows[0]['result'])}\nrun directory: {rows[0]['path']}")
    else:
        results.show(rows, sys.stdout)


def show_logs(found: Sequence[Found], options: argparse.Namespace) -> None:
    """Rank logs: of several runs one after the other, or line by line as they are written."""
    runs = [run for one in found for run in one.runs]
    if options.follow:
        logs.follow(runs, options.rank, sys.stdout)
        return
    for run in runs:
        logs.show(logs.rank_logs(run, options.rank, options.attempt), sys.stdout)


def cancel(found: Sequence[Found], options: argparse.Namespace) -> None:
    """Stop runs; a sweep that runs one after the other starts no further one."""
    for one in found:
        if one.is_sweep:
            status.write_json(one.path / status.CANCEL, {"time": time.time()})
    runs = [run for one in found for run in one.runs]
    for run, words in zip(runs, status.cancel(runs), strict=True):
        print(f"{run.name}: {words}")


def retry(found: Sequence[Found], options: argparse.Namespace) -> int:
    """Submit what failed; returns 1 where a run that was waited for failed again."""
    from multirun import array
    from multirun import retry as retrying

    code = 0
    for one in found:
        (one.path / status.CANCEL).unlink(missing_ok=True) if one.is_sweep else None
        selected = retrying.select(one, options.done)
        for run in selected:
            if not run.submit:
                print(retrying.words(run))
        jobs = retrying.submit_all(selected)
        for job in jobs:
            print(f"{Path(job['path']).name}: job {job['job_id']}", flush=True)
        here = [run for run in selected if run.submit and run.config.cluster.name == "local"]
        choices = [{"run": run.path.name} for run in here]
        interrupted = array.one_after_the_other(here, choices, one.path, sys.stdout)
        waited = [run.path for run in here] + ([Path(job["path"]) for job in jobs] if options.wait else [])
        if waited:
            code = code or (130 if interrupted else watch.wait(waited))
    return code


if __name__ == "__main__":
    sys.exit(main())
