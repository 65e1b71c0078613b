"""What a waiting command shows: how far the run is, and how it ended."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from launcher import status
from launcher.slurm import Queue
from launcher.table import result_table

_LOOK_S = 0.2
_LINE_S = 5.0  # between lines where there is no terminal to overwrite one
_SQUEUE_S = 15.0  # between questions to SLURM, which serves everybody
_TAIL = 25  # lines of a traceback that are shown
_STOPPED_S = 30.0  # a cancelled run is given this long to end before the command stops waiting for it
EXIT_CODES = {"done": 0, "cancelled": 130}


def wait(run_dirs: list[Path], out: TextIO | None = None) -> int:
    """Follow submitted runs to their ends and show how each ended; returns the first exit code that is not 0.

    Ctrl-C and SIGTERM cancel the runs: 130.
    """
    out = out or sys.stdout
    codes = []
    with interrupts() as seen:
        for run_dir in run_dirs:
            end = follow(run_dir, out, seen, run_dir.name)
            show_end(run_dir, end, out)
            codes.append(EXIT_CODES.get(end["state"], 1))
    return next((code for code in codes if code), 0)


def follow(run_dir: Path, out: TextIO, seen: list[int], name: str) -> dict[str, Any]:
    """Show one run's progress until it has ended, or until a signal in `seen` has cancelled it; returns its state."""
    line = LiveLine(out)
    deadline, queue = None, Queue(_SQUEUE_S)
    while True:
        now = status.describe(run_dir, queue)
        if status.has_ended(now) and not status.is_held(run_dir):
            break
        if seen and deadline is None:
            deadline = time.monotonic() + _STOPPED_S
            line.show(f"{name}: {status.cancel([run_dir])[0]}", always=True)
        if deadline is None:
            line.show(f"{name}  {progress(run_dir, now)}")
        elif time.monotonic() > deadline:
            break
        time.sleep(_LOOK_S)
    line.clear()
    return now


def progress(run_dir: Path, now: dict[str, Any]) -> str:
    """One line: step, loss, tokens/s, MFU or why there is none, time left."""
    step, steps = now.get("step", 0), now.get("steps")
    if "waits" in now:
        return waiting(now)
    rows = [row for row in status.last_rows(run_dir, 1) if row["step"] <= (step or 0)]
    if not rows:  # of this attempt
        return now["state"]
    row = rows[-1]
    parts = [f"step {step}/{steps}"]
    if "loss" in row:
        parts.append(f"loss {row['loss']:.3f}")
    if "tokens_per_s_per_gpu" in row:
        parts.append(f"{row['tokens_per_s_per_gpu']:,.0f} tokens/s per rank")
    parts.append(f"MFU {100 * row['mfu']:.1f} %" if "mfu" in row else no_mfu(run_dir))
    if (left := status.time_left_s(run_dir, step, steps)) is not None:
        parts.append(f"{clock(left)} left")
    return "  ".join(parts)


def waiting(now: dict[str, Any]) -> str:
    """Why SLURM has not started a run, and when it expects to."""
    start = f", expected start {now['expected_start'].replace('T', ' ')}" if "expected_start" in now else ""
    return f"{now['state']} ({now['waits']}{start})"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def no_mfu(run_dir: Path) -> str:
    """Why a run has no MFU."""
    device = status.read_json(run_dir / "status.json").get("device", "this device")
    return f"no MFU: {device} is not in the peak table"


def show_end(run_dir: Path, now: dict[str, Any], out: TextIO) -> None:
    """The result's table, or the reason, the failing rank's traceback and its log; then the run directory."""
    if now["state"] == "done":
        print(result_table(status.read_json(run_dir / "result.json")), file=out)
    else:
        print(f"{now['state']}: {now.get('reason', 'no reason recorded')}", file=out)
        for line in traceback_tail(run_dir, now):
            print(f"  {line}", file=out)
        if "log" in now:
            print(f"log: {now['log']}", file=out)
    print(f"run directory: {run_dir}", file=out, flush=True)


def traceback_tail(run_dir: Path, now: dict[str, Any]) -> list[str]:
    """Last lines of the failing rank's traceback, or of its log where it left none."""
    for failure in status.failures(run_dir):
        if failure["rank"] == now.get("rank") and failure["traceback"]:
            return failure["traceback"].rstrip().splitlines()[-_TAIL:]
    try:
        return Path(now["log"]).read_text(errors="replace").splitlines()[-_TAIL:]
    except (KeyError, FileNotFoundError):
        return []


class LiveLine:
    """A line that is overwritten on a terminal, and printed now and then elsewhere."""

    def __init__(self, out: TextIO):
        self._out, self._live = out, out.isatty()
        self._last, self._time = "", 0.0

    def show(self, text: str, always: bool = False) -> None:
        """Show the text; without a terminal only if it is new and the last one is a few seconds old."""
        if text == self._last:
            return
        if self._live:
            self._out.write("\r\x1b[K" + text[: shutil.get_terminal_size().columns - 1])
        elif always or time.monotonic() - self._time > _LINE_S:
            self._out.write(text + "\n")
        else:
            return
        self._last, self._time = text, time.monotonic()
        self._out.flush()

    def clear(self) -> None:
        """Leave an empty line to write on."""
        if self._live:
            self._out.write("\r\x1b[K")


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collects Ctrl-C and SIGTERM instead of dying of them: the run has to be stopped first."""
    seen: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: seen.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
