"""The data of a run: caches estimated, built, and read as training items."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wandistill.config import TrainConfig, parse_resolution
from wandistill.data.building import Work, check_disk
from wandistill.data.embeddings import (
    EmbeddingCache,
    OnlineEmbeddings,
    build_embeddings,
    embedding_ingredients,
    embedding_work,
)
from wandistill.data.images import encode_images, picture_hashes, picture_work
from wandistill.data.latents import CachedTargets, LatentCache, RolloutSettings, build_rollouts, rollout_work
from wandistill.data.source import Source, read_source
from wandistill.models.wan import WanFolder
from wandistill.planner.timing import PrepareCost
from wandistill.teacher.base import Teacher
from wandistill.train.distributed import World

_log = logging.getLogger(__name__)

# Teachers in 8 bits compute in bfloat16, and so does the text encoder beside them.
_TEXT_DTYPES = {"float32": torch.float32, "float16": torch.float16}


class TrainingData:
    """Training items by number: a prompt's rollouts, or a picture.

    Item i belongs to prompt i // rollouts.
    """

    def __init__(
        self,
        source: Source,
        rollouts: int,
        embeddings: EmbeddingCache | OnlineEmbeddings,
        latents: LatentCache,
        negative_prompt: str,
    ) -> None:
        self.prompts = source.prompts
        self.sample_prompts = source.sample_prompts
        self.negative = embeddings.negative(negative_prompt)  # [1, L, E]
        self._rollouts, self._embeddings, self._latents = rollouts, embeddings, latents

    def __len__(self) -> int:
        return len(self._latents)

    def batch(self, items: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Latents x0 [B, C, F, H, W] and prompt embeddings [B, L, E] of items; float32 on the CPU."""
        prompts = [self.prompts[item // self._rollouts] for item in items]
        return self._latents.batch(items), self._embeddings.batch(prompts)

    def states(self, items: Sequence[int], draws: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """State x [B, C, F, H, W], time t [B] and guided velocity of the rollout step that each draw picks.

        Only with `--targets cached`; see `CachedTargets.states`.
        """
        assert isinstance(self._latents, CachedTargets)
        return self._latents.states(items, draws)

    def sample_embeddings(self) -> Tensor:
        """Embeddings [n, L, E] of the prompts that are drawn during training."""
        return self._embeddings.batch(self.sample_prompts)


def prepare_data(
    config: TrainConfig,
    folder: WanFolder,
    teacher: Callable[[], Teacher],
    world: World,
    cost: PrepareCost | None = None,
) -> TrainingData:
    """Builds the caches that the run needs and lacks, on all ranks together, and opens them.

    First it says what will be written, and refuses if the disk has no room; then it builds embeddings, then latents,
    so that text encoder and teacher need not be in memory at once.

    Args:
        config: of the run, resolved (`wandistill.train.setup.resolve`).
        folder: the teacher's folder.
        teacher: gives the placed teacher; called, on every rank alike, only if rollouts are missing. It stays the
            caller's to close.
        world: the ranks; each calls this.
        cost: what one prompt with one rollout is predicted to take, to tell the time beforehand; not known of pictures.

    Raises:
        ConfigError: bad data, or no room on the disk (DoesNotFit).
        TrainingFailed: the teacher's velocity is not finite.
    """
    source = read_source(config)
    cache_dir, resolution = config.cache_path, parse_resolution(config.resolution)
    dtype, text_work = _text_dtype(config), _text_work(config, folder, source)
    if cost is not None:
        text_work = dataclasses.replace(text_work, item_seconds=cost.embedding_seconds)
    settings = _rollout_settings(config)
    if source.pictures is None:
        ingredients = embedding_ingredients(folder, dtype)
        latent_work = rollout_work(folder, source.prompts, settings, ingredients, cache_dir)
        if cost is not None:
            latent_work = dataclasses.replace(latent_work, item_seconds=cost.latent_seconds)
    else:
        hashes = picture_hashes(source.pictures, cache_dir, world)
        latent_work = picture_work(folder, hashes, resolution, cache_dir)
    cached = config.embeddings == "cached"
    check_disk([text_work, latent_work] if cached else [latent_work], cache_dir, world)

    embeddings: EmbeddingCache | OnlineEmbeddings
    if cached:
        embeddings = build_embeddings(text_work, folder, dtype, world)
    else:
        embeddings = OnlineEmbeddings(folder, dtype, world.device)
    if world.is_main:
        _warn(source, embeddings, folder)
    if source.pictures is None:
        latents = build_rollouts(latent_work, folder, teacher, embeddings, settings, world)
    else:
        latents = encode_images(latent_work, folder, source.pictures, resolution, world)
    rollouts = settings.rollouts if source.pictures is None else 1
    return TrainingData(source, rollouts, embeddings, latents, config.negative_prompt)


def prepare_embeddings(config: TrainConfig, folder: WanFolder, world: World) -> int:
    """Fills the cache of embeddings alone, which needs the text encoder and no teacher; returns how many it holds.

    Raises:
        ConfigError: bad data, or no room on the disk (DoesNotFit).
    """
    work = _text_work(config, folder, read_source(config))
    check_disk([work], config.cache_path, world)
    build_embeddings(work, folder, _text_dtype(config), world)
    return len(set(work.keys))


def _text_dtype(config: TrainConfig) -> torch.dtype:
    return _TEXT_DTYPES.get(config.teacher_dtype, torch.bfloat16)


def _text_work(config: TrainConfig, folder: WanFolder, source: Source) -> Work:
    """The embeddings that the run reads."""
    texts = [*source.prompts, *source.sample_prompts, config.negative_prompt]
    return embedding_work(folder, texts, config.cache_path, _text_dtype(config))


def _rollout_settings(config: TrainConfig) -> RolloutSettings:
    return RolloutSettings(
        rollouts=config.rollouts_per_prompt,
        resolution=parse_resolution(config.resolution),
        steps=config.rollout_steps,
        shift=config.flow_shift,
        guidance=config.guidance_scale,
        guidance_low=config.guidance_low,
        negative_prompt=config.negative_prompt,
        seed=config.seed,
        teacher_dtype=config.teacher_dtype,
        keep_states=config.targets == "cached",
    )


def _warn(source: Source, embeddings: EmbeddingCache | OnlineEmbeddings, folder: WanFolder) -> None:
    """Tells of settings without effect and of prompts that are cut; training goes on."""
    for note in source.notes:
        _log.warning(f"note: {note}")
    truncated = embeddings.truncated(source.prompts)
    if truncated:
        _log.warning(
            f"{truncated} of {len(source.prompts)} prompts are longer than the {folder.token_length} tokens that "
            f"{folder.name} takes: the teacher does not see their ends. Shorten them if the ends matter."
        )
