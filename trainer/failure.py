"""How a rank says what went wrong with it: failure-<rank>.json, also where it hangs."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

NATIVE_GRACE_S = 10.0


def write_failure(run_dir: Path, rank: int, error: str, trace: str) -> None:
    """failure-<rank>.json, by rename: what an operator reads first. What was written first stays."""
    path = run_dir / f"failure-{rank}.json"
    if path.exists():
        return
    partial = path.with_suffix(".partial")
    content = {"rank": rank, "host": socket.gethostname(), "error": error, "traceback": trace}
    partial.write_text(json.dumps(content, indent=1))
    partial.rename(path)


class StallWatch:
    """Ends this process as failed where `progress` is not called again within timeout_s (0: never).

    Every thread's stack goes to stderr and the watched one's to `report(error, trace)`. Make it on the thread to watch.
    Where native code holds the interpreter's lock, the stacks follow NATIVE_GRACE_S later, and nothing is reported.
    """

    def __init__(self, timeout_s: float, report: Callable[[str, str], None]):
        self._timeout_s, self._report = timeout_s, report
        self._watched = threading.get_ident()
        self._stopped = threading.Event()
        self.progress(0)
        if timeout_s:
            threading.Thread(target=self._watch, name="stall watch", daemon=True).start()

    def progress(self, step: int) -> None:
        """`step` optimizer steps are done."""
        self._step, self._deadline_s = step, time.monotonic() + self._timeout_s
        if self._timeout_s:
            faulthandler.dump_traceback_later(self._timeout_s + NATIVE_GRACE_S, exit=True, file=sys.stderr)

    def stop(self) -> None:
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while time.monotonic() < self._deadline_s:
            if self._stopped.wait(min(1.0, self._timeout_s)):
                return
        error = (
            f"StallError: nothing finished for train.stall_timeout_s={self._timeout_s:g} s after step {self._step}: "
            "the stacks of every thread are in each rank's log"
        )
        print(error, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        stack = "".join(traceback.format_stack(sys._current_frames()[self._watched]))
        try:
            self._report(error, stack)
        finally:
            os._exit(1)  # the watched thread cannot be interrupted
