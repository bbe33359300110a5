"""`wandistill prepare`."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import time

from wandistill import config
from wandistill import teacher as placement
from wandistill.config import TrainConfig
from wandistill.data.prepare import prepare_data, prepare_embeddings
from wandistill.launch import prepared
from wandistill.models.wan import open_teacher
from wandistill.train import distributed
from wandistill.train.placed_teacher import PlacedTeacher
from wandistill.train.placing import settle
from wandistill.train.setup import resolve, tell_notes
from wandistill.units import format_seconds

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings of `wandistill train`: the same flags find the same caches."""
    config.add_arguments(parser)
    parser.add_argument(
        "--only",
        choices=("embeddings",),
        help="the prompts' embeddings alone, which need the text encoder and no GPU (default: latents too)",
    )


def run(args: argparse.Namespace) -> int:
    """Fills the caches; returns 0."""
    settings = config.from_arguments(args)
    with prepared.marked(settings):
        if args.only:
            only_embeddings(settings)
        else:
            prepare(settings)
    return 0


def only_embeddings(settings: TrainConfig) -> None:
    """Fetches the teacher and encodes the prompts.

    Raises:
        WandistillError: see `prepare_embeddings`.
    """
    with distributed.joined(settings) as (world, _):
        settings = dataclasses.replace(settings, teacher_dtype=settings.dtype_on(world.device.type))
        folder = open_teacher(settings.teacher_path, settings.teacher_revision)
        count = prepare_embeddings(settings, folder, world)
        if world.is_main:
            _log.info(f"{settings.cache_path}: complete for the embeddings of {count} prompts.")


def prepare(settings: TrainConfig) -> None:
    """Fills the caches that `wandistill train` with the same settings would fill, and ends.

    Raises:
        WandistillError: see `prepare_data`.
    """
    began = time.monotonic()
    with distributed.joined(settings) as (world, _):
        setup = resolve(settings, world)
        settled = settle(setup.config, setup.folder, setup.spec, world, trains=False)
        setup = dataclasses.replace(setup, config=settled.config)
        tell_notes(setup)
        # Every rank fills caches; there is no student that the teacher's rank would have no room for.
        everyone = dataclasses.replace(setup.config, teacher_rank_trains="yes")
        teacher = PlacedTeacher(placement.Setting(everyone, setup.folder, setup.dtype, world))
        data = prepare_data(setup.config, setup.folder, teacher.get, world, settled.prompt_cost())
        teacher.release()
        if world.is_main:
            _log.info(
                f"{setup.config.cache_path}: complete for {len(data)} training items of {len(data.prompts)} prompts, "
                f"after {format_seconds(time.monotonic() - began)}."
            )
