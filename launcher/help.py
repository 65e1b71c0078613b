"""--help: what can be chosen, each option with the comment line of its file. Read from conf, without composing it."""

from __future__ import annotations

from pathlib import Path

HEAD = """\
python -m launcher [group=option ...] [key=value ...]: compose, check, submit and train a mixture-of-experts model

  python -m launcher                                             tiny model on this machine, no GPU needed
  python -m launcher model=qwen3_235b offload=none compile=fullgraph
  python -m launcher --multirun model=qwen3_235b offload=none,optimizer,full
  python -m launcher +experiment=qwen3_235b_max_throughput

  launch.dry_run=true    plan and job script; nothing is written, nothing is submitted
  launch.submit=false    freeze the run directory and print the torchrun line
  launch.again=failed    next attempt of a failed run; launch.again=all runs a finished one anew
  launch.wait=true       stay until it ends; the exit code is the run's
  launch.json=true       one JSON object on stdout and nothing else

Exit codes: 0 done or handed over, 1 a run failed, 2 refused (nothing written, nothing submitted), 130 cancelled.
"""
FOOT = """\
Every key of every group can be set: --cfg job shows them with their values. Hydra's own flags: --hydra-help."""


def help_text(directories: list[Path], groups: dict[str, list[str]]) -> str:
    """The help for these groups and their options; `directories` are where their files lie, the first one counts."""
    width = max(len(option) for options in groups.values() for option in options)
    lines = [HEAD]
    for group, options in groups.items():
        lines.append(group)
        lines += [f"  {option:<{width}}  {_meaning(directories, group, option)}".rstrip() for option in options]
    return "\n".join([*lines, "", FOOT])


def _meaning(directories: list[Path], group: str, option: str) -> str:
    """The first comment of the option's file that is not a directive for Hydra."""
    path = next(file for directory in directories if (file := directory / group / f"{option}.yaml").is_file())
    for line in path.read_text().splitlines():
        if line.startswith("# ") and not line.startswith("# @"):
            return line.removeprefix("# ")
    return ""
