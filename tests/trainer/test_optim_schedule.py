"""The learning rate by step: tables worked out by hand."""

import pytest

from trainer.config import ScheduleConfig
from trainer.optim.schedule import learning_rate


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ({"name": "constant"}, [1, 1, 1, 1, 1, 1]),
        ({"name": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"name": "linear", "warmup_steps": 2}, [0.5, 1, 0.75, 0.5, 0.25, 0]),
        ({"name": "linear", "warmup_steps": 2, "min_lr": 0.2}, [0.5, 1, 0.8, 0.6, 0.4, 0.2]),
        ({"name": "linear", "decay_steps": 2, "min_lr": 0.5}, [1, 1, 1, 1, 0.75, 0.5]),
        ({"name": "cosine", "warmup_steps": 2}, [0.5, 1, 0.8535533905932737, 0.5, 0.14644660940672627, 0]),
        ({"name": "cosine", "decay_steps": 2, "min_lr": 0.1}, [1, 1, 1, 1, 0.55, 0.1]),
        ({"name": "wsd", "warmup_steps": 2, "decay_steps": 2}, [0.5, 1, 1, 1, 0.5, 0]),
        ({"name": "wsd", "warmup_steps": 1, "decay_steps": 4, "min_lr": 0.2}, [1, 1, 0.8, 0.6, 0.4, 0.2]),
    ],
)
@pytest.mark.parametrize("lr", [1.0, 3e-4])
def test_table(schedule, expected, lr):
    schedule = {**schedule, "min_lr": schedule.get("min_lr", 0.0) * lr}
    rates = [learning_rate(ScheduleConfig(**schedule), lr, step, 6) for step in range(6)]
    assert rates == pytest.approx([lr * share for share in expected], rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup_steps, decay_steps", [(0, 0), (10, 0), (10, 30), (60, 40)])
def test_starts_above_zero_peaks_at_lr_and_ends_exactly_at_min_lr(name, warmup_steps, decay_steps):
    schedule = ScheduleConfig(name=name, warmup_steps=warmup_steps, decay_steps=decay_steps, min_lr=3e-7)
    rates = [learning_rate(schedule, 1e-3, step, 100) for step in range(100)]
    peak = rates.index(max(rates))
    assert rates[0] > 0 and max(rates) <= 1e-3
    assert rates[: peak + 1] == sorted(rates[: peak + 1]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == 3e-7
    if warmup_steps:
        assert rates[warmup_steps - 1] == 1e-3
