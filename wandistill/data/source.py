"""What `--data_path` names: prompts, or captioned pictures. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wandistill.config import FIELDS, TrainConfig
from wandistill.data.prompts import read_images, read_prompts
from wandistill.demo.captions import training_prompts
from wandistill.errors import ConfigError

# The best number for a few minutes of training on a CPU: more rollouts would leave less time for steps.
EMBEDDED_PROMPTS = 1536
_SAMPLE_PROMPTS = 8


@dataclass(frozen=True)
class Source:
    """The training data as it was given."""

    prompts: list[str]  # of pictures, their captions
    pictures: list[Path] | None  # None: the latents come from the teacher's rollouts
    sample_prompts: list[str]  # to be drawn during training
    notes: list[str]  # settings that change nothing with this data


def read_source(config: TrainConfig) -> Source:
    """Reads `--data_path` and `--sample_prompts`; the embedded teacher without a path brings captions of its own.

    Raises:
        ConfigError: a path is missing, or what is there cannot be used; or `--targets cached` with pictures.
    """
    prompts, pictures = _read_data(config)
    if pictures is not None and config.targets == "cached":
        raise ConfigError(
            f"--targets cached and --data_path {config.data_path} contradict each other: cached targets are the states "
            "of the teacher's rollouts, and pictures have none. Use --targets online, or give a file of prompts."
        )
    if config.sample_prompts:
        samples = read_prompts(Path(config.sample_prompts))
    else:
        samples = list(dict.fromkeys(prompts[: 64 * _SAMPLE_PROMPTS]))[:_SAMPLE_PROMPTS]
    return Source(prompts, pictures, samples, _notes(config, pictures is not None))


def _read_data(config: TrainConfig) -> tuple[list[str], list[Path] | None]:
    if not config.data_path:
        if config.teacher_path != "embedded":
            raise ConfigError("--data_path is missing: give a file of prompts or a folder of captioned pictures.")
        return training_prompts(EMBEDDED_PROMPTS), None
    path = Path(config.data_path)
    if not path.is_dir():
        return read_prompts(path, config.data_column), None
    images = read_images(path, config.data_column)
    return [image.caption for image in images], [image.path for image in images]


def _notes(config: TrainConfig, has_pictures: bool) -> list[str]:
    def changed(names: Sequence[str]) -> list[str]:
        return [name for name in names if getattr(config, name) != FIELDS[name].default]

    notes = []
    if config.data_column and not has_pictures and Path(config.data_path).suffix.lower() == ".txt":
        notes.append("--data_column: a text file has no columns; it has no effect here.")
    if has_pictures:
        names = changed(["rollout_steps", "rollouts_per_prompt"])
        notes += [f"--{name}: the latents come from pictures, not rollouts; it has no effect here." for name in names]
    return notes
