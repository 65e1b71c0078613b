"""The text logs of a run's ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from launcher import status
from trainer.config import ConfigError

_LOOK_S = 0.3


def rank_logs(run: Path, rank: int | None, attempt: int | None) -> list[Path]:
    """Log files of an attempt (None: the newest), of one rank or of all in order; raises ConfigError for none."""
    directory = run / "logs" / f"attempt_{attempt or status.attempts(run) or 1}"
    if rank is not None:
        if not (directory / f"rank_{rank}.log").is_file():
            raise ConfigError(f"{directory / f'rank_{rank}.log'} is not there")
        return [directory / f"rank_{rank}.log"]
    paths = sorted(directory.glob("rank_*.log"), key=lambda path: int(path.stem.removeprefix("rank_")))
    if not paths:
        raise ConfigError(f"no logs in {directory}: the run is {status.describe(run)['state']}")
    return paths


def show(paths: Sequence[Path], out: TextIO) -> None:
    """Print whole files, each under its path where there are several."""
    for path in paths:
        if len(paths) > 1:
            print(f"==> {path} <==", file=out)
        out.write(path.read_text(errors="replace"))
    out.flush()


def follow(run: Path, rank: int | None, out: TextIO) -> None:
    """Print lines as they are written, marked with their rank, until the run has ended; a new attempt is followed too."""
    offsets: dict[Path, int] = {}
    while True:
        ended = status.describe(run)["state"] in status.FINAL and not status.is_held(run)
        if (run / "logs").is_dir():
            for path in sorted((run / "logs").glob(f"attempt_{status.attempts(run)}/rank_*.log")):
                name = path.stem.removeprefix("rank_")
                if rank is None or name == str(rank):
                    offsets[path] = _print_new_lines(path, offsets.get(path, 0), f"[{name}] ", ended, out)
        if ended:
            return
        time.sleep(_LOOK_S)


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
