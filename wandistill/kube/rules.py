"""Rules between values that no schema can say. The chart's templates/_rules.tpl has the same sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wandistill import __version__
from wandistill.errors import ConfigError
from wandistill.kube.pools import find_teacher


def check_values(values: Mapping[str, Any]) -> None:
    """Refuses values that contradict each other, or that leave out what a job needs.

    Raises:
        ConfigError: which, and what to set.
    """
    _check_images(values)
    shared = _pods(values) > 1
    for name, own, needed in (
        ("output", values["output"], True),
        ("teacher.cache", values["teacher"]["cache"], False),
    ):
        _check_claim(name, own, needed=needed, shared=shared)
    _check_teacher(values)
    _check_data(values)
    if values["topology"] == "teacher-and-students" and values["training"].get("on_oom") == "replan":
        raise ConfigError(
            "training.on_oom is replan, but topology teacher-and-students has one placement, gpu0: leave on_oom out."
        )
    if values["prepare"]["enabled"] and values["training"].get("embeddings") == "online":
        raise ConfigError(
            "prepare.enabled is true, but training.embeddings is online: there is nothing to prepare; leave one of the "
            "two out."
        )


def _check_images(values: Mapping[str, Any]) -> None:
    if not values["image"]["train"]["repository"]:
        raise ConfigError(
            "image.train.repository is empty: build and push the image with 'make image "
            f"IMAGE=registry.example.com/wandistill' and 'docker push registry.example.com/wandistill:{__version__}', "
            "then set image.train.repository to registry.example.com/wandistill."
        )


def _pods(values: Mapping[str, Any]) -> int:
    """Pods that mount a claim at once; a run and what prepares it are two."""
    return sum(int(pool["nodes"]) for pool in values["pools"].values()) + int(values["prepare"]["enabled"])


def _check_claim(name: str, own: Mapping[str, Any], *, needed: bool, shared: bool) -> None:
    create = own["create"]
    if own["existingClaim"] and create["enabled"]:
        raise ConfigError(f"{name}: existingClaim and create are both set: take one of them.")
    if needed and not own["existingClaim"] and not create["enabled"]:
        raise ConfigError(
            f"{name}: there is no claim for runs: set {name}.existingClaim to one, or {name}.create.enabled to true."
        )
    if create["enabled"] and shared and "ReadWriteMany" not in create["accessModes"]:
        raise ConfigError(
            f"{name}.create.accessModes is {', '.join(create['accessModes'])}, but more than one pod mounts the claim: "
            "set it to ReadWriteMany, with a storage class that has it."
        )


def _check_teacher(values: Mapping[str, Any]) -> None:
    teacher = values["teacher"]
    cached = teacher["cache"]["existingClaim"] or teacher["cache"]["create"]["enabled"]
    embedded = find_teacher(teacher["model"]).name == "embedded"
    if embedded and teacher["path"]:
        raise ConfigError("teacher.path is set, but teacher.model is embedded: name the model that the folder holds.")
    if teacher["revision"] and (embedded or teacher["path"]):
        kept = "teacher.path is set" if teacher["path"] else "teacher.model is embedded"
        raise ConfigError(f"teacher.revision is set, but {kept}: only weights from the hub have revisions.")
    if not embedded and not cached:
        raise ConfigError(
            f"teacher.model {teacher['model']}: its weights need a claim: set teacher.cache.existingClaim or "
            "teacher.cache.create.enabled."
        )


def _check_data(values: Mapping[str, Any]) -> None:
    data = values["data"]
    given = [
        name
        for name, there in (
            ("prompts", data["prompts"]),
            ("configMap", data["configMap"]["name"]),
            ("existingClaim", data["existingClaim"]),
        )
        if there
    ]
    if len(given) > 1:
        raise ConfigError(f"data has {' and '.join(given)}: take one of them.")
    if not given and find_teacher(values["teacher"]["model"]).name != "embedded":
        raise ConfigError(
            f"data is empty, but teacher.model is {values['teacher']['model']}: set data.prompts, data.configMap.name "
            "or data.existingClaim."
        )
