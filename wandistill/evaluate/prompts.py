"""Which prompts a student is evaluated on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wandistill.config import TrainConfig
from wandistill.data.prompts import read_images, read_prompts
from wandistill.demo.captions import heldout_prompts, scene_number, student_holds_out
from wandistill.errors import ConfigError

# Prompts unless --count says otherwise; a real teacher takes seconds to minutes for each.
EMBEDDED_COUNT, COUNT = 512, 64


@dataclass(frozen=True)
class EvaluationPrompts:
    """The prompts and what there is to say about them."""

    prompts: list[str]
    source: str
    seen: int | None
    """How many of them the student may have been trained on; None where the training data is not there any more."""

    @property
    def notes(self) -> list[str]:
        """What a reader of the figures must know."""
        if self.seen is None:
            return ["The run's training data is not there any more: whether it held these prompts is unknown."]
        if self.seen == 0:
            return []
        return [
            f"{self.seen} of the {len(self.prompts)} prompts are among the training prompts too, so the figures say "
            "less about new ones: give others with --prompts FILE."
        ]


def choose_prompts(
    config: TrainConfig, *, embedded: bool, file: Path | None, column: str, count: int | None, seed: int
) -> EvaluationPrompts:
    """`file`'s prompts; else, with the embedded teacher, held-out captions; else the run's sample prompts; else the
    last prompts of the training data.

    Args:
        config: of the run.
        embedded: whether the teacher is the embedded one.
        file: prompts, in any format that `--data_path` takes, or None.
        column: of `file`.
        count: most prompts; None: 512 with the embedded teacher, 64 with others.
        seed: of the choice of held-out captions.

    Raises:
        ConfigError: a count below 1, a file that cannot be read, or no prompts to be found.
    """
    if count is not None and count < 1:
        raise ConfigError(f"--count {count}: must be at least 1.")
    wanted = count or (EMBEDDED_COUNT if embedded else COUNT)
    if file is not None:
        prompts, source = read_prompts(file, column)[:wanted], str(file)
    elif embedded:
        prompts, source = heldout_prompts(wanted, seed), "held-out captions of the embedded teacher's scenes"
    elif config.sample_prompts and Path(config.sample_prompts).is_file():
        prompts, source = read_prompts(Path(config.sample_prompts))[:wanted], f"sample prompts {config.sample_prompts}"
    else:
        prompts, source = _training_prompts(config)[-wanted:], f"last prompts of the training data {config.data_path}"
        if not prompts:
            raise ConfigError(
                f"there is nothing to evaluate on: the run's --data_path {config.data_path!r} is not there any more. "
                "Give a file of prompts with --prompts FILE."
            )
    return EvaluationPrompts(prompts, source, _count_seen(config, prompts, embedded))


def _count_seen(config: TrainConfig, prompts: list[str], embedded: bool) -> int | None:
    if embedded and not config.data_path:
        return sum(_is_training_scene(prompt) for prompt in prompts)
    training = set(_training_prompts(config))
    return sum(prompt in training for prompt in prompts) if training else None


def _is_training_scene(prompt: str) -> bool:
    """Whether the demo's own training prompts, which are drawn from all captions that are not held out, may hold it."""
    try:
        return not student_holds_out(scene_number(prompt))
    except ValueError:
        return False


def _training_prompts(config: TrainConfig) -> list[str]:
    """The prompts of the run's data; empty where they are gone."""
    path = Path(config.data_path)
    if not config.data_path or not path.exists():
        return []
    if path.is_dir():
        return [image.caption for image in read_images(path, config.data_column)]
    return read_prompts(path, config.data_column)
