"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from trainer.config import ScheduleConfig


def learning_rate(schedule: ScheduleConfig, lr: float, step: int, steps: int) -> float:
    """The rate of the step with index `step` (from 0) of `steps`.

    Warm-up is linear and its first step has lr / warmup_steps, not 0. The decay takes the last `decay_steps` steps (0:
    all after the warm-up) and its last one, step == steps - 1, has exactly min_lr.
    """
    if step < schedule.warmup_steps:
        return lr * (step + 1) / schedule.warmup_steps
    if schedule.name == "constant":
        return lr
    start = steps - schedule.decay_steps if schedule.decay_steps else schedule.warmup_steps
    start = max(start, schedule.warmup_steps)
    if step < start:
        return lr
    progress = (step - start + 1) / (steps - start)
    left = (1 + math.cos(math.pi * progress)) / 2 if schedule.name == "cosine" else 1 - progress
    return schedule.min_lr + (lr - schedule.min_lr) * left
