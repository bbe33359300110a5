"""From what a user calls a teacher to a folder: the embedded one, a local folder, or a Hugging Face hub id."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from wandistill import catalog
from wandistill.demo import embedded_teacher_path
from wandistill.errors import ConfigError
from wandistill.models.hub_lock import fetched_once, told
from wandistill.models.wan_weights import read_json
from wandistill.train.progress import Progress

EMBEDDED = "embedded"
# The text-to-video models that exist in diffusers' layout, by their hub ids.
TEXT_TO_VIDEO_IDS = tuple(hub_id for model in catalog.models().values() for hub_id in model.repositories)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = [
    "model_index.json",
    "scheduler/*.json",
    "tokenizer/*",
    *(
        f"{component}/{pattern}"
        for component in ("transformer", "transformer_2", "text_encoder", "vae")
        for pattern in ("*.json", "*.safetensors")
    ),
]


def resolve_folder(path_or_id: str, revision: str = "") -> Path:
    """The local folder of a teacher; a hub id that is not in the cache is downloaded unless HF_HUB_OFFLINE is set.

    Args:
        revision: branch, tag or commit of a hub id; empty: the main branch.

    Raises:
        ConfigError: there is no such folder or hub repository, or it holds the original (not diffusers') layout.
    """
    if revision and (path_or_id == EMBEDDED or Path(path_or_id).expanduser().exists()):
        raise ConfigError(
            f"--teacher_revision {revision}: only a hub id has revisions, but --teacher_path is {path_or_id}: leave it "
            "out."
        )
    if path_or_id == EMBEDDED:
        return embedded_teacher_path()
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        check_layout(path)
        return path
    if path.exists():
        raise ConfigError(
            f"--teacher_path {path_or_id} is a file, but a teacher is a folder in diffusers' WanPipeline layout "
            f"(model_index.json, transformer/, vae/, ...): {_advice()}."
        )
    if not _HUB_ID.fullmatch(path_or_id):
        raise ConfigError(
            f"--teacher_path {path_or_id} does not exist (looked for the folder {path.absolute()}), and it is not a "
            f"hub id of the form OWNER/NAME: {_advice()}."
        )
    _refuse_other_ids(path_or_id)
    return _download(path_or_id, revision)


def _advice() -> str:
    return f"give a local folder, one of {', '.join(TEXT_TO_VIDEO_IDS)}, or '{EMBEDDED}' for the shipped teacher"


def _refuse_other_ids(hub_id: str) -> None:
    """Answers the ids of Wan's original checkpoints with the diffusers ones, without asking the hub."""
    if not hub_id.startswith("Wan-AI/") or hub_id.endswith("-Diffusers"):
        return
    diffusers_id = f"{hub_id}-Diffusers"
    if diffusers_id in TEXT_TO_VIDEO_IDS:
        raise ConfigError(
            f"--teacher_path {hub_id} is the original Wan checkpoint, which diffusers cannot load: "
            f"use {diffusers_id} instead, the same weights in diffusers' layout."
        )
    raise ConfigError(
        f"--teacher_path {hub_id} is not a text-to-video Wan in diffusers' layout: use one of "
        f"{', '.join(TEXT_TO_VIDEO_IDS)}."
    )


def _download(hub_id: str, revision: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    looked = f"looked for the folder {Path(hub_id).absolute()} and in the hub cache {constants.HF_HUB_CACHE}"
    cache = Path(constants.HF_HUB_CACHE)
    own = cache / f"models--{hub_id.replace('/', '--')}"
    lock = cache / f".{own.name}--{(revision or 'main').replace('/', '--')}.lock"

    def download() -> Path:
        return Path(snapshot_download(hub_id, revision=revision or None, allow_patterns=_WANTED))

    def total() -> int:
        files = snapshot_download(hub_id, revision=revision or None, allow_patterns=_WANTED, dry_run=True)
        return sum(file.file_size or 0 for file in files) if any(file.will_download for file in files) else 0

    # Whichever rank downloads, rank 0 tells: it is the one whose words are read. On a terminal the hub draws bars.
    silent = constants.HF_HUB_OFFLINE or os.environ.get("RANK", "0") != "0" or sys.stderr.isatty()
    progress = Progress("teacher MiB", 0, enabled=not silent)
    try:
        with told(own, (lambda: 0) if silent else total, progress.tell):
            return fetched_once(lock, download)
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hugging Face hub cannot be reached"
        part = getattr(error, "snapshot_path", None)
        found = f"is only in part in {part}" if part else f"was not found ({looked})"
        raise ConfigError(
            f"--teacher_path {hub_id} {found}, and {why}. Download it where there is a network "
            f"(`hf download {hub_id}`) and copy the folder or the cache here (HF_HUB_CACHE names the cache), or give a "
            "local folder."
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        at = f" at revision {revision}" if revision else ""
        status = getattr(getattr(error, "response", None), "status_code", None)
        answer = f"with status {status}" if status else f"with {type(error).__name__}"
        raise ConfigError(
            f"--teacher_path {hub_id}{at} was not found ({looked}): the Hugging Face hub answered {answer}. Check the "
            "spelling; for a gated or private repository log in with `hf auth login`. Otherwise "
            f"{_advice()}."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"--teacher_path {hub_id} could not be downloaded into {constants.HF_HUB_CACHE}: {error}. HF_HUB_CACHE "
            "names another place."
        ) from error


def check_layout(folder: Path) -> None:
    """Holds that a local folder has diffusers' layout.

    Raises:
        ConfigError: it has no model_index.json; says which -Diffusers id an original Wan folder corresponds to, or
            that the folder is one component of a pipeline.
    """
    if (folder / "model_index.json").is_file():
        return
    if original := _original_model(folder):
        raise ConfigError(
            f"{folder} holds an original Wan checkpoint ({original[0]}), which diffusers cannot load: use "
            f"{original[1]} instead, the same weights in diffusers' layout."
        )
    config = folder / "config.json"
    if config.is_file() and (folder.parent / "model_index.json").is_file():
        raise ConfigError(f"{folder} is one component of a pipeline: give the folder above it, {folder.parent}.")
    raise ConfigError(
        f"{folder} has no model_index.json, so it is not in diffusers' WanPipeline layout "
        f"(model_index.json, transformer/, vae/, text_encoder/, tokenizer/, scheduler/): {_advice()}."
    )


def _original_model(folder: Path) -> tuple[str, str] | None:
    """What shows that a folder is an original Wan checkpoint, and the diffusers id of the same weights."""
    experts = (folder / "high_noise_model", folder / "low_noise_model")
    configs = [path / "config.json" for path in (folder, *experts) if (path / "config.json").is_file()]
    config = read_json(configs[0]) if configs else {}
    is_wan = config.get("_class_name") == "WanModel" or config.get("model_type") in {"t2v", "i2v", "ti2v", "flf2v"}
    pickles = sorted(path.name for pattern in ("Wan2.*_VAE.pth", "models_t5_*.pth") for path in folder.glob(pattern))
    if not is_wan and not pickles:
        return None
    evidence = ", ".join([*pickles, *(str(path.relative_to(folder)) for path in configs[:1] if is_wan)])
    text_to_video = "one of " + ", ".join(TEXT_TO_VIDEO_IDS)
    if config.get("model_type") in {"i2v", "flf2v"}:
        return f"{evidence}; an image-to-video one", f"a text-to-video model, {text_to_video},"
    count = 2 if any(path.is_dir() for path in experts) else 1
    known = [model for model in catalog.models().values() if model.repositories and model.experts == count]
    widths = {model.repositories[0]: model.architecture.hidden_size for model in known}
    same = [hub_id for hub_id, width in widths.items() if config.get("dim", width) == width]
    return evidence, same[0] if len(same) == 1 else text_to_video
