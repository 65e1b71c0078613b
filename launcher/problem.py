"""A broken rule, in a form that a person and a test can read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trainer.config import RunConfig


@dataclass(frozen=True)
class Problem:
    """One broken rule: what was set, why it cannot be, and what could be set instead."""

    keys: tuple[str, ...]
    values: tuple[Any, ...]
    message: str
    alternatives: tuple[str, ...] = ()
    concerns_machine: bool = False  # the experiment is sound, but cannot run on this machine

    @property
    def text(self) -> str:
        """One line."""
        given = ", ".join(f"{key}={_show(value)}" for key, value in zip(self.keys, self.values, strict=True))
        instead = f"; legal: {', or '.join(self.alternatives)}" if self.alternatives else ""
        return f"{given}: {self.message}{instead}"


def problem(
    config: RunConfig, keys: Iterable[str], message: str, *alternatives: str, concerns_machine: bool = False
) -> Problem:
    """A Problem with the keys' values as they are in the configuration."""
    keys = tuple(keys)
    values = tuple(getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2]) for key in keys)
    return Problem(keys, values, message, alternatives, concerns_machine)


def files_are_here(config: RunConfig) -> bool:
    """Whether paths have to exist on this machine: a plan for SLURM, or a run to be moved, may name others."""
    return config.launch.submit and not (config.launch.dry_run and config.cluster.name == "slurm")


def _show(value: Any) -> str:
    """As it is written on the command line; a line break is shown, not made."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value.encode("unicode_escape").decode() if not value.isprintable() else value
    return str(value)
