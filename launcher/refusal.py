"""What went wrong outside of our own code, as refusals in one line: Hydra's composing, and the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from launcher.schema import Refused

RAISE = "HYDRA_FULL_ERROR"  # with it Hydra raises its exceptions; else it prints them, most with a traceback
SEARCH_PATH = "Config search path:"  # from here on a message of Hydra lists directories
# fmt: off
DISK = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
    errno.ENAMETOOLONG,
)
# fmt: on


@contextmanager
def disk(hint: str = "") -> Iterator[None]:
    """Refuses, by its path, what the file system does not let us read or write; `hint`: what to do about it."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK:
            raise
        raise Refused([_os_words(error) + (f": {hint}" if hint else "")]) from error


def working_directory() -> None:
    """Raises Refused where the directory that this command was started in is gone."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise Refused(["the current directory does not exist any more: cd to another one"]) from None


@contextmanager
def composing(directories: Sequence[Path]) -> Iterator[Callable[[], None]]:
    """Turns what Hydra cannot compose into Refused; `directories`: where the files of groups lie.

    Yields a function to be called as soon as a configuration is there: from then on Hydra prints exceptions as ever, and
    processes that are started know nothing of this. What goes wrong for other reasons is raised as it is.
    """
    import yaml
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if RAISE in os.environ:  # the user wants tracebacks
        yield lambda: None
        return
    os.environ[RAISE] = "1"
    try:
        yield lambda: os.environ.pop(RAISE, None)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}" if mark else "a configuration file"
        raise Refused([f"{where}: is not YAML: {error.problem}"]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Refused([f"{_not_text(directories)}: is not YAML: {_one_line(str(error))}"]) from error
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else ""
        raise Refused([_one_line(f"{error} {cause}".partition(SEARCH_PATH)[0])]) from error
    except OSError as error:  # Hydra makes the directory of a sweep
        raise Refused([_os_words(error)]) from error
    finally:
        os.environ.pop(RAISE, None)


def _os_words(error: OSError) -> str:
    return ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _not_text(directories: Sequence[Path]) -> str:
    """The file that cannot be read as text: the error does not name it."""
    for directory in directories:
        for path in sorted(directory.rglob("*.yaml")):
            try:
                if any(not (character.isprintable() or character in "\t\r\n") for character in path.read_text()):
                    return str(path)
            except UnicodeDecodeError:
                return str(path)
    return "a configuration file"
