"""Where the time of a step goes: kernels of two late steps of a frozen run directory, by GPU time.

python -m launcher ... launch.submit=false   ->  RUN_DIR
torchrun --nproc-per-node N benchmarks/profile_step.py RUN_DIR [TRACE.json]
"""

import sys
from pathlib import Path
from unittest.mock import patch

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from trainer.__main__ import main
from trainer.metrics.report import Report

STEPS = 2


def show(profiler: profile) -> None:
    """The kernels of the recorded steps; a trace file if the command line names one."""
    kernels = [
        event
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CUDA and not event.key.startswith("ProfilerStep")
    ]
    total = sum(event.self_device_time_total for event in kernels)
    print(f"{total / STEPS / 1000:.1f} ms of kernels a step")
    show_gaps(profiler)
    for event in sorted(kernels, key=lambda event: -event.self_device_time_total)[:45]:
        print(f"{event.self_device_time_total / STEPS / 1000:8.2f} ms  {event.count // STEPS:5} x  {event.key[:110]}")
    if len(sys.argv) > 2:
        profiler.export_chrome_trace(sys.argv[2])


def show_gaps(profiler: profile) -> None:
    """Where the GPU had nothing to do for more than 50 us, and between which kernels."""
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.name.startswith("ProfilerStep")
    )
    busy_until, last, gaps = spans[0][0], "", []
    for start, end, name in spans:
        if start - busy_until > 50:
            gaps.append((start - busy_until, last, name))
        if end > busy_until:
            busy_until, last = end, name
    print(f"{sum(gap for gap, _, _ in gaps) / STEPS / 1000:.2f} ms idle a step in gaps over 50 us:")
    for gap, before, after in sorted(gaps, reverse=True)[:12]:
        print(f"{gap / 1000:8.2f} ms idle  {before[:60]}  ->  {after[:60]}")


if __name__ == "__main__":
    step = Report.step
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=8, warmup=2, active=STEPS, repeat=1),
        on_trace_ready=show,
    ) as profiler:

        def recorded(*arguments):
            step(*arguments)
            profiler.step()

        with patch.object(Report, "step", recorded):
            main(Path(sys.argv[1]).resolve())
