"""The text logs of a run's ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from launcher import status
from launcher.slurm import Queue
from trainer.config import ConfigError

_LOOK_S = 0.3
_SQUEUE_S = 15.0  # between questions to SLURM, which serves everybody


def rank_logs(run: Path, rank: int | None, attempt: int | None) -> list[Path]:
    """Log files of an attempt (None: the newest), of one rank or of all in order; raises ConfigError for none."""
    directory = run / "logs" / f"attempt_{attempt or status.attempts(run) or 1}"
    if rank is not None:
        if not (directory / f"rank_{rank}.log").is_file():
            raise ConfigError(f"{directory / f'rank_{rank}.log'} is not there")
        return [directory / f"rank_{rank}.log"]
    paths = sorted(directory.glob("rank_*.log"), key=lambda path: int(path.stem.removeprefix("rank_")))
    if not paths:
        now = status.describe(run)
        if "log" in now:  # of the job script: no rank was started
            return [Path(now["log"])]
        raise ConfigError(f"no logs in {directory}: the run is {now['state']}")
    return paths


def show(paths: Sequence[Path], out: TextIO) -> None:
    """Print whole files, each under its path where there are several."""
    for path in paths:
        if len(paths) > 1:
            print(f"==> {path} <==", file=out)
        out.write(path.read_text(errors="replace"))
    out.flush()


def follow(runs: Sequence[Path], rank: int | None, out: TextIO) -> None:
    """Print lines as they are written, marked with their rank (and run, where there are several), until all runs have
    ended; a new attempt is followed too."""
    offsets: dict[Path, int] = {}
    queue = Queue(_SQUEUE_S)
    open_ = list(runs)
    while open_:
        for run, now in zip(list(open_), status.describe_all(open_, queue), strict=True):
            ended = status.has_ended(now) and not status.is_held(run)
            for path in sorted((run / "logs").glob(f"attempt_{status.attempts(run)}/rank_*.log")):
                name = path.stem.removeprefix("rank_")
                if rank is None or name == str(rank):
                    mark = f"[{name}] " if len(runs) == 1 else f"[{run.name} {name}] "
                    offsets[path] = _print_new_lines(path, offsets.get(path, 0), mark, ended, out)
            if ended:
                open_.remove(run)
        time.sleep(_LOOK_S if open_ else 0)


def _print_new_lines(path: Path, offset: int, mark: str, ended: bool, out: TextIO) -> int:
    """Print what follows offset, up to the last line end; returns the new offset in bytes."""
    with open(path, "rb") as file:
        file.seek(offset)
        content = file.read()
    if not ended:
        content = content[: content.rfind(b"\n") + 1]
    for line in content.decode(errors="replace").splitlines():
        print(f"{mark}{line}", file=out)
    out.flush()
    return offset + len(content)
