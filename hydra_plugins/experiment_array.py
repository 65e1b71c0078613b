"""Hydra takes a launcher only from a package of this name: hydra/launcher=array is multirun.array."""

from __future__ import annotations

from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore


class ExperimentArray(BasicLauncher):
    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        from multirun.array import compose_once

        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        compose_once(hydra_context.config_loader)

    def launch(self, job_overrides: Any, initial_job_idx: int) -> Any:
        from multirun.array import launch

        returns = super().launch(job_overrides, initial_job_idx)
        launch(self.config.hydra.sweep.dir, job_overrides, returns)
        return returns


NODE = {"_target_": "hydra_plugins.experiment_array.ExperimentArray"}
ConfigStore.instance().store(group="hydra/launcher", name="array", node=NODE, provider="multirun")
