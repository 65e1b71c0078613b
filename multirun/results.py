"""One table of many runs: what differs between them, and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from launcher import status
from multirun.runs import differences


def record(run: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Everything that is known of a run's outcome: its state as launcher.status describes it, and its result."""
    result = status.read_json(run / "result.json")
    return {**found, "result": result} if found["state"] == "done" and result else found


def records(runs: Sequence[Path], choices: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """One record a run; `overrides` holds what sets it apart: the sweep's own values, else what its run.json says."""
    if not any(choices):
        choices = differences(tuple(runs))
    described = status.describe_all(runs)
    return [
        {**record(run, now), "overrides": choice} for run, now, choice in zip(runs, described, choices, strict=True)
    ]


def table(found: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table; a column that is empty for every run is left out."""
    keys = list(dict.fromkeys(key for one in found for key in one["overrides"]))
    rows = [{key: one["overrides"].get(key, "") for key in keys} | _cells(one) for one in found]
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if any(row[name] for row in rows)]
    return columns, [[row[name] for name in columns] for row in rows]


def _cells(one: dict[str, Any]) -> dict[str, str]:
    result = one.get("result") or {}
    loss, memory = result.get("loss") or {}, result.get("peak_memory_gib") or {}
    balanced = " (balanced)" if result.get("routing") == "balanced" else ""
    return {
        "state": one["state"],
        "step": f"{one.get('step', 0)}/{one.get('steps', '?')}",
        "loss": _text(loss.get("last"), "{:.3f}"),
        "s/step": _text((result.get("step_time_s") or {}).get("median"), "{:.3f}"),
        "tokens/s a rank": _text(result.get("tokens_per_s_per_gpu"), "{:,.0f}"),
        "MFU": _text(result.get("mfu"), "{:.2%}") + (balanced if result.get("mfu") is not None else ""),
        "MFU, causal": _text(result.get("mfu_causal"), "{:.2%}"),
        "GiB": _text(memory.get("reserved"), "{:.1f}"),
        "run directory": one["path"],
    }


def _text(value: Any, form: str) -> str:
    return "" if value is None else form.format(value)


def show(found: Sequence[dict[str, Any]], out: TextIO) -> None:
    """The table, then reason and log of every run that ended badly."""
    columns, rows = table(found)
    print_table(columns, rows, out)
    for one in found:
        if "reason" in one:
            name = " ".join(f"{key}={value}" for key, value in one["overrides"].items()) or Path(one["path"]).name
            print(f"\n{name}: {one['state']}: {one['reason']}", file=out)
            if "log" in one:
                print(f"  log: {one['log']}", file=out)
    out.flush()


def print_table(columns: list[str], rows: list[list[str]], out: TextIO) -> None:
    """A plain table; nothing in it is shortened, so that paths can be copied."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold", no_wrap=not out.isatty())
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    Console(file=out, width=None if out.isatty() else 10_000, highlight=False).print(made)
