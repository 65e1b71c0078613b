"""From step times to throughput and MFU, and the result of a whole run. Free of torch."""

from __future__ import annotations

import math
from typing import Any

from trainer.config import RunConfig
from trainer.flops import Flops, parameter_counts
from trainer.metrics.files import known

UTILISATIONS = ("mfu", "mfu_causal", "hfu")


def rates(
    config: RunConfig,
    flops: Flops,
    peak: float | None,
    step_time_s: float,
    tokens_per_rank: int,
    real_tokens: int | None = None,
) -> dict[str, float]:
    """Throughput of one step: tokens/s/GPU, TFLOP/s/GPU, and the three utilisations where the peak is known.

    tokens_per_rank: positions that one rank processed in the step, padding included (the reference benchmark's
    convention, on which mfu and TFLOP/s rest). real_tokens: those of all ranks that are no padding.
    """
    per_second = tokens_per_rank / step_time_s
    values = {"tokens_per_s_per_gpu": per_second, "tflops_per_gpu": per_second * flops.per_token / 1e12}
    if real_tokens is not None:
        values["real_tokens_per_s_per_gpu"] = real_tokens / config.parallelism.world_size / step_time_s
    if peak is not None:
        values["mfu"] = per_second * flops.per_token / peak
        values["mfu_causal"] = per_second * flops.per_token_causal / peak
        values["hfu"] = per_second * flops.per_token_executed / peak
    return values


def quantile(values: list[float], q: float) -> float:
    """Linear interpolation between the sorted values."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def window(config: RunConfig, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The rows over which times are reported, and in words which ones they are.

    The last benchmark.window_steps ones, without the first of each attempt: it compiles and warms up.
    """
    firsts = [i for i, row in enumerate(rows) if i == 0 or row.get("attempt") != rows[i - 1].get("attempt")]
    warm = [row for i, row in enumerate(rows) if i not in firsts]
    if not warm:
        return rows[-1:], "the only step, which includes compilation and warm-up"
    chosen = warm[-config.benchmark.window_steps :]
    words = f"steps {chosen[0]['step']} to {chosen[-1]['step']}, n = {len(chosen)}"
    left_out = [rows[i]["step"] for i in firsts if chosen[0]["step"] < rows[i]["step"] < chosen[-1]["step"]]
    if left_out:
        words += f", without the first step after a restart ({', '.join(map(str, left_out))})"
    return chosen, words


def _utilisation_of_window(name: str, chosen: list[dict[str, Any]], median_s: float) -> float | None:
    """Mean work of a step over the median time: the work of packed rows differs between steps."""
    if any(name not in row for row in chosen):
        return None
    return sum(row[name] * row["step_time_s"] for row in chosen) / len(chosen) / median_s


def _median(times_s: list[float]) -> dict[str, float] | None:
    return {"median": quantile(times_s, 0.5), "n": len(times_s)} if times_s else None


def build_result(
    config: RunConfig,
    rows: list[dict[str, Any]],
    flops: Flops,
    peak: float | None,
    peak_source: str,
    *,
    peak_memory_gib: dict[str, float] | None = None,
    host_memory_gib: float | None = None,
    compile_time_s: float | None = None,
    save_times_s: list[float] | None = None,
    notes: dict[str, str] | None = None,
) -> dict[str, Any]:
    """What result.json holds for a finished run of `rows` (all of metrics.jsonl, at least one).

    A field that is not known is absent, with the reason under `notes`. Without `compile_time_s` it is the first step's
    time less the median. peak_memory_gib holds `allocated` and `reserved`. save_times_s: one per checkpoint.
    """
    chosen, words = window(config, rows)
    times = [row["step_time_s"] for row in chosen]
    median_s = quantile(times, 0.5)
    tokens_per_rank = config.grad_accumulation * config.data.micro_batch_size * config.data.seq_len
    throughput = rates(config, flops, peak, median_s, tokens_per_rank)
    real = [row["real_tokens"] for row in chosen if "real_tokens" in row]
    if real:
        throughput["real_tokens_per_s_per_gpu"] = sum(real) / len(real) / config.parallelism.world_size / median_s
    for name in UTILISATIONS:
        throughput[name] = _utilisation_of_window(name, chosen, median_s) or throughput.get(name)
    reasons = {"step_time_s": words}
    if compile_time_s is None and len(rows) > 1:
        compile_time_s = max(0.0, rows[0]["step_time_s"] - median_s)
        reasons["compile_time_s"] = "the first step's time less the median: compilation and all other warm-up"
    losses = [row["loss"] for row in rows if "loss" in row]
    counts = parameter_counts(config.model)
    result = {
        "status": "done",
        "steps": rows[-1]["step"],
        "step_time_s": {
            "median": median_s,
            "p10": quantile(times, 0.1),
            "p90": quantile(times, 0.9),
            "n": len(times),
        },
        "compile_time_s": compile_time_s,
        "eval_time_s": _median([row["eval_time_s"] for row in rows if "eval_time_s" in row]),
        "checkpoint_time_s": _median(save_times_s or []),
        **throughput,
        "flops_per_token": flops.per_token,
        "peak_flops": peak,
        "peak_source": peak_source,
        "peak_memory_gib": known(peak_memory_gib or {}) or None,
        "host_memory_gib": host_memory_gib,
        "loss": {"first": losses[0], "last": losses[-1]} if losses else None,
        "grad_norm_last": rows[-1].get("grad_norm"),
        "routing": config.model.routing if config.model.num_sparse_layers else None,
        "parameters": {"total": counts.total, "active": counts.active},
    }
    result = known(result)
    return result | {"notes": {**_absences(result, peak_source, len(rows)), **reasons, **(notes or {})}}


def _absences(result: dict[str, Any], peak_source: str, steps: int) -> dict[str, str]:
    """Why a field is not there."""
    why = {
        "compile_time_s": f"{steps} step: nothing to compare it with",
        "eval_time_s": "no step was followed by an evaluation",
        "checkpoint_time_s": "this attempt saved no checkpoint",
        "peak_memory_gib": "the device keeps no account of its memory",
        "host_memory_gib": "not measured",
        "loss": "no step had supervised tokens",
        "grad_norm_last": "not measured",
        "real_tokens_per_s_per_gpu": "rows do not say how many tokens are real",
        "routing": "the model has no experts",
        "plan_error": "the plan predicts neither memory nor step time",
        **dict.fromkeys((*UTILISATIONS, "peak_flops"), peak_source),
    }
    return {name: reason for name, reason in why.items() if name not in result}
