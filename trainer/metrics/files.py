"""JSON files of a run directory: whole ones replaced by rename, and the rows of metrics.jsonl."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def known(values: dict[str, Any]) -> dict[str, Any]:
    """The values that say something: absent means "not known", so None, NaN and infinities (no JSON) are left out."""
    return {
        key: value
        for key, value in values.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }


def replace(path: Path, text: str) -> None:
    """Write the file so that a reader sees the old or the new one whole, even if this process is killed."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Replace a JSON file; numbers that are no JSON are an error."""
    replace(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl in order; a last line cut short by a kill is left out, any other broken line is an error."""
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text().split("\n")[:-1], 1):  # behind the last line break: cut short
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from None
    return rows


def cut_rows(path: Path, last_step: int) -> None:
    """Keep the rows up to `last_step`, where a run resumes: the later ones belong to a course that was given up."""
    if path.exists():
        kept = [row for row in read_rows(path) if row["step"] <= last_step]
        replace(path, "".join(json.dumps(row) + "\n" for row in kept))
