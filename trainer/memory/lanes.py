"""Work beside the compute stream: a device's copy streams, and a host thread. Errors come back to who waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

Moment = Any  # a point on a device's timeline: torch.cuda.Event, or None: passed already


class OffloadError(RuntimeError):
    """Work on offloaded state failed or did not end in time; the text names step and parameter."""


class Lane:
    """A queue of device work beside the compute stream; on a CPU everything is done at once."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[], None], *after: Moment) -> Moment:
        """Queue `work` behind what this lane was given before and behind the moments `after`; returns its end."""
        if self._stream is None:
            work()
            return None
        for moment in after:
            if moment is not None:
                self._stream.wait_event(moment)
        with torch.cuda.stream(self._stream):
            work()
        return self._stream.record_event()

    def now(self) -> Moment:
        """The end of what the calling thread's current stream has been given so far."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    def hold_compute(self, moment: Moment) -> None:
        """Let the current stream go on only after `moment`; does not wait for the device."""
        if moment is not None:
            torch.cuda.current_stream().wait_event(moment)

    def wait(self, moment: Moment) -> None:
        """Let the calling thread go on only after `moment`."""
        if moment is not None:
            moment.synchronize()


class Worker:
    """One thread that does host work in the order in which it is given.

    After an error nothing more is done: everything queued behind it ends with the same error.
    """

    def __init__(self, name: str, threads: int | None = None):
        """threads: of torch's parallel operators in this thread; None: as many as in the calling one."""
        self._jobs: queue.SimpleQueue[tuple[str, Callable[[], Any], Future]] = queue.SimpleQueue()
        self._threads = threads or torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)  # an exit does not wait for it
        self._thread.start()

    def submit(self, words: str, job: Callable[[], Any]) -> Future:
        """Queue a job; its error will say `words`."""
        future: Future = Future()
        self._jobs.put((words, job, future))
        return future

    @torch.no_grad()
    def _work(self) -> None:
        torch.set_num_threads(self._threads)
        failure: OffloadError | None = None
        while True:
            words, job, future = self._jobs.get()
            if failure is None:
                try:
                    future.set_result(job())
                    continue
                except BaseException as error:  # noqa: BLE001  whatever it is, the training thread has to know
                    failure = OffloadError(f"{words}: {type(error).__name__}: {error}")
                    failure.__cause__ = error
            future.set_exception(failure)


def result(future: Future, timeout_s: float, words: str) -> Any:
    """What a worker's job returned; raises OffloadError saying `words` after timeout_s seconds (0: never)."""
    try:
        return future.result(timeout_s or None)
    except TimeoutError:
        if future.done():  # the job's own
            raise
        raise OffloadError(f"{words}: not done after {timeout_s:g} s") from None
