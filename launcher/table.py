"""result.json in words."""

from __future__ import annotations

from typing import Any

ROWS = {
    "status": "status",
    "steps": "steps",
    "step_time_s": "seconds a step",
    "tokens_per_s_per_gpu": "tokens/s a rank",
    "mfu": "MFU",
    "mfu_causal": "MFU, causal",
    "hfu": "HFU, causal",
    "peak_flops": "peak FLOP/s",
    "peak_memory_gib": "peak GPU memory, GiB",
    "host_memory_gib": "host memory, GiB",
    "loss": "loss",
    "grad_norm_last": "last gradient norm",
    "routing": "routing",
    "parameters": "parameters",
}


def result_table(result: dict[str, Any]) -> str:
    """One line per number that is known, then what is said about numbers, equal remarks together."""
    lines = [f"{title:<22}{_words(key, result[key])}" for key, title in ROWS.items() if result.get(key) is not None]
    names_by_note: dict[str, list[str]] = {}
    for name, note in (result.get("notes") or {}).items():
        names_by_note.setdefault(note, []).append(name)
    notes = [f"  {', '.join(names)}: {note}" for note, names in names_by_note.items()]
    return "\n".join([*lines, *(["notes", *notes] if notes else [])])


def _words(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(key, item)}" for name, item in value.items() if item is not None)
    if key in ("mfu", "mfu_causal", "hfu"):
        return f"{value:.2%}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
