"""The trained student as a folder that stock diffusers loads, or as one file that ComfyUI loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from wandistill.architecture import WanArchitecture
from wandistill.errors import ConfigError, TrainingFailed
from wandistill.models.comfyui import PREFIX, file_metadata, original_name
from wandistill.models.export_readme import readme
from wandistill.models.weights import empty_transformer

if TYPE_CHECKING:
    from wandistill.models.wan import WanFolder

SETTINGS_FILE = "wandistill.json"
_SHARED_COMPONENTS = ("vae", "text_encoder", "tokenizer")
# Larger files of the teacher are hard links where the file system can: UMT5-XXL alone has 11 GB.
_LINK_FROM_BYTES = 256 * 2**20
_PROMPT = "a red apple on a wooden table, soft morning light"
_EMBEDDED_PROMPT = "a large red circle left of a small blue square on a gray background"


@dataclass(frozen=True)
class SampleSettings:
    """How an exported student is called; written beside it, and the defaults of `wandistill sample`."""

    steps: int
    width: int
    height: int
    token_length: int
    flow_shift: float
    dtype: str  # of text encoder and transformer, as torch names it
    guidance_scale: float = 1.0  # guidance is folded into the student: more would guide twice
    num_frames: int = 1


def export_student(
    transformer: WanTransformer3DModel,
    folder: WanFolder,
    destination: Path,
    *,
    resolution: tuple[int, int],
    steps: int,
    shift: float,
    dtype: torch.dtype = torch.float32,
    weights: Mapping[str, Tensor] | None = None,
    details: Mapping[str, Any] | None = None,
    example_prompt: str = "",
) -> None:
    """Writes a stock WanPipeline folder: one transformer, Euler's scheduler, the teacher's VAE and text encoder.

    The folder is written beside `destination` and renamed when it is complete; a folder that is there is replaced.
    The teacher's large files become hard links, where the file system allows it.

    Args:
        transformer: the student's `WanTransformer3DModel`, for its config; and its weights, unless `weights` has them.
        folder: the teacher.
        destination: the folder to write.
        resolution: width and height in pixels that the student was trained for.
        steps: of sampling by default.
        shift: of the schedule that the student was trained with.
        dtype: of the weights on disk; what Wan keeps in float32 stays float32.
        weights: of a `Student` by name, such as its average's; projections are left out.
        details: what else to record in wandistill.json; JSON values.
        example_prompt: of the README's call; empty: one that fits the teacher.

    Raises:
        TrainingFailed: the disk is full or not writable; what was at `destination` stays.
    """
    given = dict(transformer.state_dict()) if weights is None else transformer_weights(weights)
    settings = SampleSettings(steps, *resolution, folder.token_length, shift, str(dtype).removeprefix("torch."))
    parameters = sum(tensor.numel() for tensor in given.values())
    record = {
        "schema": 1,
        "kind": "student",
        "teacher": folder.name,
        "parameters": parameters,
        "sampling": asdict(settings),
        "details": dict(details or {}),
    }

    def write(target: Path) -> None:
        for component in _SHARED_COMPONENTS:
            _copy_tree(folder.path / component, target / component)
        FlowMatchEulerDiscreteScheduler(shift=shift).save_pretrained(target / "scheduler")
        _save_transformer(given, dict(transformer.config), target / "transformer", dtype)
        (target / "model_index.json").write_text(json.dumps(_model_index(folder), indent=2) + "\n", encoding="utf-8")
        (target / SETTINGS_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        prompt = example_prompt or (_EMBEDDED_PROMPT if folder.name == "embedded" else _PROMPT)
        text = readme(folder.name, parameters, asdict(settings), prompt)
        (target / "README.md").write_text(text, encoding="utf-8")

    _replace(destination, write)


def clear_killed(destination: Path) -> None:
    """Removes what exports that were killed have left beside `destination`; a student that one moved aside is put back.

    Only for whoever holds the run's lock (launch/lock.py): an export that still writes there loses its files.

    Raises:
        TrainingFailed: something there can't be removed.
    """
    with _disk_errors(destination):
        for state in ("former", "partial"):
            for path in destination.parent.glob(_sibling(destination, "[0-9]*", state).name):
                if state == "former" and not destination.exists():
                    os.rename(path, destination)
                else:
                    _remove(path)


def export_comfyui(
    weights: Mapping[str, Tensor], architecture: WanArchitecture, destination: Path, *, dtype: torch.dtype
) -> None:
    """Writes the transformer as one safetensors file under Wan's original names, as ComfyUI loads diffusion models.

    Args:
        weights: of a `WanTransformer3DModel` or a `Student` by name.
        architecture: of the transformer.
        destination: the file.
        dtype: of the weights on disk; what Wan keeps in float32 stays float32.

    Raises:
        TrainingFailed: the disk is full or not writable; a file that was there stays.
    """
    renamed = {
        PREFIX + original_name(name): stored_as(name, tensor, dtype)
        for name, tensor in transformer_weights(weights).items()
    }

    def write(target: Path) -> None:
        save_file(renamed, target, metadata=file_metadata(architecture))
        _set_usual_mode(target)

    _replace(destination, write)


def read_settings(folder: Path) -> SampleSettings | None:
    """The call that `folder` was exported with; None for a folder that wandistill did not export.

    Raises:
        ConfigError: wandistill.json is damaged.
    """
    file = folder / SETTINGS_FILE
    if not file.is_file():
        return None
    try:
        return SampleSettings(**json.loads(file.read_text(encoding="utf-8"))["sampling"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is damaged ({error}): export the student again with `wandistill export`.") from error


def transformer_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The transformer's own weights among those of a `Student`, under its names; others pass as they are."""
    prefix = "transformer."
    own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    return own or dict(weights)


def stored_as(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` on the CPU in `dtype`, or in float32 where diffusers keeps parameter `name` of a Wan so."""
    float32 = any(part in WanTransformer3DModel._keep_in_fp32_modules for part in name.split("."))
    return tensor.detach().to("cpu", torch.float32 if float32 else dtype).contiguous()


def _save_transformer(weights: Mapping[str, Tensor], config: dict[str, Any], target: Path, dtype: torch.dtype) -> None:
    model = empty_transformer(config)
    model.load_state_dict({name: stored_as(name, tensor, dtype) for name, tensor in weights.items()}, assign=True)
    model.save_pretrained(target)
    for weights_file in target.glob("*.safetensors"):
        _set_usual_mode(weights_file)


def _set_usual_mode(file: Path) -> None:
    """Gives a file the mode that umask gives others: safetensors leaves its files to their owner alone."""
    usual = file.with_name(f".{file.name}.mode")
    usual.touch()
    shutil.copymode(usual, file)
    usual.unlink()


def _model_index(folder: WanFolder) -> dict[str, Any]:
    index = json.loads((folder.path / "model_index.json").read_text(encoding="utf-8"))
    kept = {key: index[key] for key in ("_class_name", "_diffusers_version", *_SHARED_COMPONENTS) if key in index}
    return kept | {
        "boundary_ratio": None,
        "expand_timesteps": folder.expand_timesteps,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": [None, None],
    }


def _copy_tree(source: Path, target: Path) -> None:
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        real = file.resolve()  # a hub cache holds links to its blobs
        if real.stat().st_size >= _LINK_FROM_BYTES and _linked(real, copy):
            continue
        shutil.copyfile(real, copy)


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        return False
    return True


def _replace(destination: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a path beside `destination`, then puts it in its place."""
    beside, former = (_sibling(destination, str(os.getpid()), state) for state in ("partial", "former"))
    with _disk_errors(destination):
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            write(beside)
            if destination.is_dir():
                os.rename(destination, former)  # a folder cannot be renamed onto another
            os.replace(beside, destination)
        finally:
            if former.exists() and not destination.exists():
                os.rename(former, destination)
            for path in (beside, former):
                _remove(path)


def _sibling(destination: Path, process: str, state: str) -> Path:
    """A path beside `destination` that an export by a process uses while it is in a state."""
    return destination.with_name(f".{destination.name}.{process}.{state}")


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@contextmanager
def _disk_errors(destination: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(next(path for path in destination.parents if path.exists())).free
        raise TrainingFailed(
            f"{destination} could not be written ({error}; {free:,} bytes free there). Make room and run "
            "`wandistill export`; what was there before is untouched."
        ) from error
