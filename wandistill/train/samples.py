"""Pictures of the student during training."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from wandistill.config import TrainConfig, parse_resolution
from wandistill.data.prepare import TrainingData
from wandistill.models.sampling import draw_noise, rollout, to_pictures
from wandistill.models.wan import WanFolder
from wandistill.train.distributed import World
from wandistill.train.student import TrainedStudent


class SampleDrawer:
    """Draws the same prompts from the same noise every time, into SAMPLE_DIR/step-N/00.png and so on.

    Rank 0 draws alone; only with a sharded student all ranks run the forwards, since each holds a part.
    """

    def __init__(self, config: TrainConfig, folder: WanFolder, data: TrainingData, world: World) -> None:
        self._config, self._folder, self._world = config, folder, world
        self.prompts = data.sample_prompts
        self._embeddings = data.sample_embeddings()
        size = parse_resolution(config.resolution)
        self._noise = torch.cat([draw_noise(folder, config.seed + index, size) for index in range(len(self.prompts))])

    @torch.no_grad()
    def draw(self, student: TrainedStudent, step: int) -> None:
        """Draws after `step` optimizer steps."""
        if not (self._world.is_main or student.sharded):
            return
        device = self._world.device

        def velocity(x: Tensor, t: float) -> Tensor:
            rows = zip(x.split(1), self._embeddings.split(1), strict=True)
            time = torch.full((1,), t, device=device)
            return torch.cat([student.predict(one, time, prompt.to(device)).float() for one, prompt in rows])

        latents = rollout(velocity, self._noise.to(device), self._config.sample_steps, self._config.flow_shift)
        if self._world.is_main:
            vae = self._folder.load_vae(device)
            pixels = torch.cat([self._folder.decode(vae, one).cpu() for one in latents.split(1)])
            self._write(self._config.sample_path / f"step-{step}", pixels)

    def _write(self, folder: Path, pixels: Tensor) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for index, picture in enumerate(to_pictures(pixels)):
            picture.save(folder / f"{index:02d}.png")
        (folder / "prompts.txt").write_text("\n".join(self.prompts) + "\n", encoding="utf-8")
