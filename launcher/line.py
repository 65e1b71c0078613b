"""The line on which a SLURM job's ranks hear from launcher.batch, on the first node, that the run is over.

Sooner and surer than by files: a shared file system may show them half a minute late.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from contextlib import closing, suppress

PORT = "MOE_LAUNCHER_LINE_PORT"  # the variable that tells the ranks
LEAVE_S = 2  # after another rank has failed: time for a traceback of one's own
_CONNECT_S = 60.0


class Line:
    """launcher.batch's end: a connection to every rank."""

    def __init__(self):
        self._server = socket.create_server(("", 0), backlog=4096)
        self.port = self._server.getsockname()[1]
        self._ranks: list[socket.socket] = []
        self._word = b""
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True, name="line").start()

    def _accept(self) -> None:
        while True:
            rank, _ = self._server.accept()
            with self._lock:
                self._ranks.append(rank)
                self._say([rank])

    def end(self, after_s: int) -> None:
        """Have every rank leave in so many seconds (at most 9), also those that connect later; the first call counts."""
        with self._lock:
            if not self._word:
                self._word = str(after_s).encode()
                self._say(self._ranks)

    def _say(self, ranks: list[socket.socket]) -> None:
        for rank in ranks if self._word else ():
            with suppress(OSError):  # it has left
                rank.sendall(self._word)


def listen(variables: Mapping[str, str]) -> int | None:
    """A rank's end: wait for the word, and return in how many seconds to leave; None where the line is broken."""
    with suppress(OSError, ValueError):
        address = variables.get("MASTER_ADDR", ""), int(variables.get(PORT, ""))
        with closing(socket.create_connection(address, timeout=_CONNECT_S)) as line:
            line.settimeout(None)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return int(line.recv(1))
    return None
