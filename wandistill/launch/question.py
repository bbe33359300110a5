"""What a run asked the planner, kept as JSON: a launcher that knows nothing of the run any more asks it again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wandistill.catalog import Gpu, model_from_folder
from wandistill.config import TrainConfig, from_mapping
from wandistill.planner.from_config import request_of_config
from wandistill.planner.request import Machines, PlanRequest
from wandistill.student_config import student_spec


@dataclass(frozen=True)
class Question:
    """A run as it was placed."""

    config: TrainConfig  # resolved, the placement too
    folder: str  # of the teacher
    machines: Machines  # as measured

    def request(self) -> PlanRequest:
        """The planner's request, for the placement that the run has."""
        model = model_from_folder(Path(self.folder))
        spec = student_spec(self.config.student_config, model.architecture)
        return request_of_config(self.config, model, spec, self.machines)

    def to_json(self) -> dict[str, Any]:
        """As files hold it."""
        return {
            "config": dataclasses.asdict(self.config),
            "folder": self.folder,
            "machines": dataclasses.asdict(self.machines),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Question:
        """From what `to_json` gave."""
        machines = dict(content["machines"])
        if machines["gpu"] is not None:
            lists = {name: tuple(machines["gpu"][name]) for name in ("capability", "products")}
            machines["gpu"] = Gpu(**{**machines["gpu"], **lists})
        return cls(from_mapping(content["config"]), content["folder"], Machines(**machines))
