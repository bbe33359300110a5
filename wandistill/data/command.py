"""`wandistill prepare`."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import time

from wandistill import config
from wandistill import teacher as placement
from wandistill.config import TrainConfig
from wandistill.data.prepare import prepare_data
from wandistill.teacher.base import Teacher
from wandistill.train import distributed
from wandistill.train.placing import settle
from wandistill.train.run import resolve, tell_notes
from wandistill.units import format_seconds

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings of `wandistill train`: the same flags find the same caches."""
    config.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Fills the caches; returns 0."""
    prepare(config.from_arguments(args))
    return 0


def prepare(settings: TrainConfig) -> None:
    """Fills the caches that `wandistill train` with the same settings would fill, and ends.

    Raises:
        WandistillError: see `prepare_data`.
    """
    began = time.monotonic()
    world = distributed.start(settings)
    placed: list[Teacher] = []
    try:
        setup = resolve(settings, world)
        settled = settle(setup.config, setup.folder, setup.spec, world, trains=False)
        setup = dataclasses.replace(setup, config=settled.config)
        tell_notes(setup)

        def place() -> Teacher:
            placed.append(placement.place(placement.Setting(setup.config, setup.folder, setup.dtype, world)))
            return placed[0]

        data = prepare_data(setup.config, setup.folder, place, world, settled.prompt_cost())
        if world.is_main:
            _log.info(
                f"{setup.config.cache_path}: complete for {len(data)} training items of {len(data.prompts)} prompts, "
                f"after {format_seconds(time.monotonic() - began)}."
            )
    finally:
        for teacher in placed:
            teacher.close()
        distributed.stop()
