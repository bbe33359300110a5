"""`--report_to`: the step's figures to a tracker, beside metrics.jsonl."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker
from accelerate.utils import is_tensorboard_available, is_wandb_available

from wandistill.config import TrainConfig
from wandistill.errors import ConfigError


class Tracker:
    """accelerate's tracker of the run, or none.

    Raises:
        ConfigError: the tracker's package is not installed.
    """

    def __init__(self, config: TrainConfig, output_dir: Path, *, enabled: bool) -> None:
        self._tracker: GeneralTracker | None = None
        available = {"tensorboard": is_tensorboard_available, "wandb": is_wandb_available}
        if config.report_to == "none" or not enabled:
            return
        if not available[config.report_to]():
            raise ConfigError(
                f"--report_to {config.report_to}: that package is not installed; pip install {config.report_to}."
            )
        if config.report_to == "tensorboard":
            self._tracker = TensorBoardTracker("tensorboard", logging_dir=str(output_dir))
        else:
            self._tracker = WandBTracker("wandistill", dir=str(output_dir))
        self._tracker.start()
        self._tracker.store_init_configuration(dataclasses.asdict(config))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures of optimizer step `step`."""
        if self._tracker is not None:
            self._tracker.log(dict(figures), step=step)

    def close(self) -> None:
        """Ends the tracker's run."""
        if self._tracker is not None:
            self._tracker.finish()
