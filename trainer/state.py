"""Everything that a resumed run needs, at one address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.data import TrainData
from trainer.models.qwen3 import Qwen3
from trainer.optim.optimizer import SlabOptimizer


@dataclass
class TrainState:
    """Model, optimizer, position in the data, and how far the run has come. `step` counts finished optimizer steps."""

    model: Qwen3
    optimizer: SlabOptimizer
    data: TrainData
    step: int = 0
    supervised_tokens: int = 0

    def state_dict(self) -> dict[str, Any]:
        """This rank's part; the masters determine the trained parameters."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "data": self.data.state_dict(),
            "step": self.step,
            "supervised_tokens": self.supervised_tokens,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as if never interrupted; a missing entry is an error."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.data.load_state_dict(state["data"])
        self.step, self.supervised_tokens = state["step"], state["supervised_tokens"]
