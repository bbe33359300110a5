"""`wandistill values`: the sizes of pools that are outside the chart's tables, as values for it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from wandistill.kube.pools import check_training, inputs, jobs
from wandistill.kube.render_command import add_values, read, to_yaml
from wandistill.kube.rules import check_values
from wandistill.kube.sizes import pool_sizes
from wandistill.kube.times import step_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The values, as for helm."""
    add_values(parser)


def run(args: argparse.Namespace) -> int:
    """Prints values that carry the numbers and what they were computed for.

    Raises:
        ConfigError: values that break a rule; DoesNotFit among them.
    """
    print("# Made by `wandistill values`: lay it over the values it was made of.")
    print(to_yaml([{"computed": computed(read(args))}]).removeprefix("---\n"), end="")
    return 0


def computed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of each job's pool.

    Raises:
        ConfigError: values that break a rule; DoesNotFit among them.
    """
    check_values(values)
    check_training(values["training"])
    made = {}
    for job in jobs(values):
        sized = pool_sizes(values, job)
        made[job.pool.name] = {
            "inputs": inputs(values, job.pool),
            "placement": sized.placement,
            "settings": dict(sized.settings),
            "memory": sized.pod.memory,
            "shm": sized.pod.shm,
            "stepSeconds": "" if sized.step_seconds is None else step_text(sized.step_seconds),
            "teacherMemory": sized.master.memory,
            "teacherShm": sized.master.shm,
        }
    return made
