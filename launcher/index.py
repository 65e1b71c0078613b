"""Where the runs and sweeps of this user lie, so that a key is found from any directory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def index_file() -> Path:
    """One path a line, the newest last; in the user's state directory."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "moe-launcher" / "runs"


def remember(paths: Iterable[Path]) -> None:
    """Add run directories or sweeps; a home that cannot be written only costs the look-up."""
    try:
        file = index_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a", encoding="utf-8", errors="surrogateescape") as index:  # one write: lines stay whole
            index.write("".join(f"{path.resolve()}\n" for path in paths))
    except (OSError, RuntimeError):  # RuntimeError: no home
        pass


def look_up(name: str) -> Path | None:
    """The newest directory that still exists and is named `name`, or `<anything>-name`."""
    try:
        known = index_file().read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except (OSError, RuntimeError):
        return None
    for line in reversed(known):
        path = Path(line)
        if (path.name == name or path.name.endswith(f"-{name}")) and os.path.isdir(
            path
        ):  # False too where we may not look
            return path
    return None
