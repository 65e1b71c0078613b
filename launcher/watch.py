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
from launcher.table import result_table

_LOOK_S = 0.2
_LINE_S = 5.0  # between lines where there is no terminal to overwrite one
_TAIL = 25  # lines of a traceback that are shown
_STOPPED_S = 30.0  # a cancelled run is given this long to end before the command stops waiting for it
EXIT_CODES = {"done": 0, "cancelled": 130}


def wait(run_dirs: list[Path], out: TextIO | None = None) -> int:
    """Follow submitted runs to their ends, one line of progress at a time; returns the first exit code that is not 0.

    Ctrl-C and SIGTERM cancel the run that is being followed: 130.
    """
    return next((code for code in [follow(path, out) for path in run_dirs] if code), 0)


def follow(run_dir: Path, out: TextIO | None = None) -> int:
    """Follow one run to its end, then show its result or its failure; exit code 0 only where it is done."""
    out = out or sys.stdout
    line = LiveLine(out)
    with _interrupts() as interrupts:
        deadline = None
        while (now := status.describe(run_dir))["state"] not in status.FINAL or status.is_held(run_dir):
            if interrupts and deadline is None:
                deadline = time.monotonic() + _STOPPED_S
                line.show(f"{run_dir.name}: {status.cancel(run_dir)}", always=True)
            if deadline is not None and time.monotonic() > deadline:
                break
            if deadline is None:
                line.show(progress(run_dir, now))
            time.sleep(_LOOK_S)
    line.clear()
    show_end(run_dir, now, out)
    return EXIT_CODES.get(now["state"], 1)


def progress(run_dir: Path, now: dict[str, Any]) -> str:
    """One line: name, step, loss, tokens/s, MFU or why there is none, time left."""
    step, steps = now.get("step", 0), now.get("steps")
    head = f"{run_dir.name}  {now['state']}"
    row = status.last_row(run_dir)
    if not step or row.get("step", 0) > step:  # rows of an earlier attempt are not this one's
        return head
    parts = [f"{run_dir.name}  step {step}/{steps}"]
    if "loss" in row:
        parts.append(f"loss {row['loss']:.3f}")
    if "tokens_per_s_per_gpu" in row:
        parts.append(f"{row['tokens_per_s_per_gpu']:,.0f} tokens/s per rank")
    parts.append(f"MFU {100 * row['mfu']:.1f} %" if "mfu" in row else no_mfu(run_dir))
    if "step_time_s" in row:
        minutes, seconds = divmod(round(row["step_time_s"] * (steps - step)), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    return "  ".join(parts)


def no_mfu(run_dir: Path) -> str:
    """Why a run has no MFU."""
    device = status.read_json(run_dir / "run.json").get("cluster", {}).get("device", "device")
    if device != "cpu":
        names = status.read_json(run_dir / "environment.json").get("gpus") or ["this GPU"]
        device = str(names[0])
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
        if failure["rank"] == now.get("rank"):
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
def _interrupts() -> Iterator[list[int]]:
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
