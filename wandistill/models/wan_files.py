"""The files of a teacher in diffusers' WanPipeline layout: read, checked and put into numbers. Loads no weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandistill.architecture import WanArchitecture
from wandistill.errors import ConfigError
from wandistill.models.wan_weights import StoredTensor, component_tensors, read_json, sampled_content

HIGH, LOW = "transformer", "transformer_2"
# Config file and weight file stem of each component; None: the component has no weights.
_COMPONENTS: dict[str, tuple[str, str | None]] = {
    "scheduler": ("scheduler_config.json", None),
    "text_encoder": ("config.json", "model"),
    "tokenizer": ("tokenizer_config.json", None),
    HIGH: ("config.json", "diffusion_pytorch_model"),
    LOW: ("config.json", "diffusion_pytorch_model"),
    "vae": ("config.json", "diffusion_pytorch_model"),
}
_CLASSES = {HIGH: "WanTransformer3DModel", LOW: "WanTransformer3DModel", "vae": "AutoencoderKLWan"}
_LONGEST_PROMPT = 512  # tokens: what WanPipeline.__call__ pads to, and Wan was trained with


@dataclass(frozen=True)
class WanFiles:
    """A checked teacher folder: its configs and what follows from them."""

    path: Path
    components: tuple[str, ...]
    configs: dict[str, dict[str, Any]]  # component -> its config file
    tensors: dict[str, dict[str, StoredTensor]]  # component with weights -> its tensors
    boundary: float | None
    expand_timesteps: bool
    notes: list[str] = field(default_factory=list)

    @property
    def experts(self) -> tuple[str, ...]:
        """The transformers' component names, the high-noise one first."""
        return tuple(name for name in (HIGH, LOW) if name in self.components)

    @property
    def flow_shift(self) -> float:
        """The scheduler's shift k of u -> k u / (1 + (k-1) u): `shift` (Euler) or `flow_shift` (UniPC); 1 if unset."""
        config = self.configs["scheduler"]
        return float(config.get("shift", config.get("flow_shift", 1.0)))

    @property
    def token_length(self) -> int:
        """Tokens that a prompt is padded or cut to."""
        length = self.configs["tokenizer"].get("model_max_length") or _LONGEST_PROMPT
        return int(min(_LONGEST_PROMPT, length))

    def fingerprint(self, components: Iterable[str]) -> str:
        """A content key of `components` in hexadecimal; see `WanFolder.fingerprint`."""
        digest = hashlib.sha256()
        for name in sorted(components):
            digest.update(f"{name}\n".encode())
            if name == "tokenizer":
                for file in sorted(path for path in (self.path / name).iterdir() if path.is_file()):
                    digest.update(f"{file.name} {file.stat().st_size}\n".encode())
                    digest.update(file.read_bytes())
                continue
            config = {
                key: value
                for key, value in self.configs[name].items()
                if key == "_class_name" or not (key.startswith("_") or key == "transformers_version")
            }
            digest.update(json.dumps(config, sort_keys=True).encode())
            for chunk in sampled_content(self.tensors.get(name, {})):
                digest.update(chunk)
        return digest.hexdigest()


def read_files(path: Path) -> WanFiles:
    """Reads and checks a folder: that all components, configs and weight files are there and sound and fit together.

    Raises:
        ConfigError: something is missing, damaged or not a text-to-video Wan; the message names the file.
    """
    index_file = path / "model_index.json"
    index = read_json(index_file)
    _check_pipeline_class(index_file, index)
    components = _components(path, index)
    notes: list[str] = []
    boundary = _boundary(path, index, components, notes)
    configs, tensors = {}, {}
    for name in components:
        folder = path / name
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is missing, but {index_file} lists the component {name}: download or copy that folder too."
            )
        config_file, stem = _COMPONENTS[name]
        configs[name] = read_json(folder / config_file)
        if stem is not None:
            tensors[name] = component_tensors(folder, stem)
    files = WanFiles(path, components, configs, tensors, boundary, bool(index.get("expand_timesteps")), notes)
    _check_configs(files)
    return files


def _check_pipeline_class(index_file: Path, index: dict[str, Any]) -> None:
    name = index.get("_class_name")
    if name == "WanPipeline":
        return
    if "ImageToVideo" in str(name):
        raise ConfigError(
            f"{index_file} is of an image-to-video model ({name}); wandistill distils text-to-video Wan: give a folder "
            "whose model_index.json says WanPipeline."
        )
    raise ConfigError(
        f"{index_file} says _class_name {name}, but a teacher must be a WanPipeline: give a Wan 2.1 or 2.2 "
        "text-to-video folder in diffusers' layout."
    )


def _components(path: Path, index: dict[str, Any]) -> tuple[str, ...]:
    """The components that model_index.json lists; all but transformer_2 are needed."""
    listed = []
    for name in _COMPONENTS:
        entry = index.get(name)
        if isinstance(entry, list) and len(entry) == 2 and entry[1] is not None:
            listed.append(name)
        elif name != LOW:
            raise ConfigError(
                f"{path / 'model_index.json'} lists no {name}, which a teacher needs: restore the entry and the "
                f"folder {path / name}."
            )
    return tuple(listed)


def _boundary(path: Path, index: dict[str, Any], components: tuple[str, ...], notes: list[str]) -> float | None:
    """The boundary in t between the experts, None with one expert; adds to `notes` what was ignored."""
    boundary = index.get("boundary_ratio")
    if LOW not in components:
        if boundary is not None:
            notes.append(
                f"boundary_ratio {boundary} in {path / 'model_index.json'} is ignored: the folder has one expert "
                "(transformer_2 is null), as converted Wan2.1 folders have."
            )
        if (path / LOW).is_dir():
            notes.append(f"{path / LOW} is ignored: model_index.json does not list transformer_2.")
        return None
    if not isinstance(boundary, float) or not 0 < boundary < 1:
        raise ConfigError(
            f"{path / 'model_index.json'} lists transformer_2 but its boundary_ratio is {json.dumps(boundary)}: with "
            "two experts it must say at which t in 0..1 the high-noise one takes over (Wan2.2-T2V-A14B: 0.875). Add it."
        )
    return boundary


def _check_configs(files: WanFiles) -> None:
    """Holds that the configs are those of a text-to-video Wan, agree with each other and with the weights."""
    for name, wanted in _CLASSES.items():
        found = files.configs.get(name, {}).get("_class_name", wanted)
        if found != wanted:
            raise ConfigError(f"{files.path / name / 'config.json'} is of a {found}, but a teacher needs a {wanted}.")
    text_encoder = files.configs["text_encoder"]
    if text_encoder.get("model_type") != "umt5":
        raise ConfigError(
            f"{files.path / 'text_encoder' / 'config.json'} has model_type {text_encoder.get('model_type')}, but Wan's "
            "text encoder is a umt5: restore the component."
        )
    tokenizer = files.path / "tokenizer"
    if not any((tokenizer / name).is_file() for name in ("tokenizer.json", "spiece.model")):
        raise ConfigError(f"{tokenizer} has neither tokenizer.json nor spiece.model: download the component again.")
    _check_vae(files)
    for name in files.experts:
        _check_transformer(files, name)
    _check_numbers(files)
    if len(files.experts) == 2:
        _check_experts_agree(files)


def _check_vae(files: WanFiles) -> None:
    vae, file = files.configs["vae"], files.path / "vae" / "config.json"
    for name in ("latents_mean", "latents_std"):
        if not isinstance(vae.get(name), list) or len(vae[name]) != vae.get("z_dim", 16):
            raise ConfigError(
                f"{file} must give {name}, one number for each of the {vae.get('z_dim', 16)} latent channels: "
                "restore the file."
            )


def _check_transformer(files: WanFiles, name: str) -> None:
    config, file = files.configs[name], files.path / name / "config.json"
    channels, latent_channels = config.get("in_channels", 16), files.configs["vae"].get("z_dim", 16)
    image = [key for key in ("image_dim", "added_kv_proj_dim") if config.get(key) is not None]
    if image or channels > latent_channels:
        sign = f"{image[0]} {config[image[0]]}" if image else f"in_channels {channels}"
        raise ConfigError(
            f"{file} is of an image-to-video transformer ({sign}; a text-to-video one takes the VAE's "
            f"{latent_channels} channels and no image): wandistill distils text-to-video Wan, give such a folder."
        )
    architecture = WanArchitecture.from_config(config)
    for key, value in architecture.to_config().items():
        if any(not isinstance(number, int) or number < 1 for number in (value if key == "patch_size" else [value])):
            raise ConfigError(
                f"{file} has {key} {json.dumps(value)}: it must be a whole number from 1. Restore the file."
            )
    width = files.configs["text_encoder"].get("d_model")
    if architecture.text_dim != width:
        raise ConfigError(
            f"{file} has text_dim {architecture.text_dim}, but the text encoder's d_model is {width}: transformer and "
            "text encoder are of different models."
        )
    if (channels, architecture.out_channels) != (latent_channels, latent_channels):
        raise ConfigError(
            f"{file} has in_channels {channels} and out_channels {architecture.out_channels}, but the VAE has "
            f"{latent_channels} latent channels: transformer and VAE are of different models."
        )
    stored = sum(tensor.parameters for tensor in files.tensors[name].values())
    if stored != architecture.parameters:
        raise ConfigError(
            f"{files.path / name} holds {stored:,} parameters, but its config.json describes "
            f"{architecture.parameters:,}: config and weights are of different models, or a tensor is missing."
        )


def _check_numbers(files: WanFiles) -> None:
    shift = files.flow_shift
    if not shift > 0:
        raise ConfigError(
            f"{files.path / 'scheduler' / 'scheduler_config.json'} has a flow shift of {shift}: it must be above 0."
        )
    if files.token_length < 1:
        raise ConfigError(
            f"{files.path / 'tokenizer' / 'tokenizer_config.json'} has model_max_length {files.token_length}: it must "
            "be at least 1."
        )


def _check_experts_agree(files: WanFiles) -> None:
    high, low = (WanArchitecture.from_config(files.configs[name]).to_config() for name in (HIGH, LOW))
    differing = [f"{key} {high[key]} and {low[key]}" for key in high if high[key] != low[key]]
    if differing:
        raise ConfigError(
            f"The experts in {files.path / HIGH} and {files.path / LOW} differ in architecture "
            f"({', '.join(differing)}): both must be of one model, since one student follows both."
        )
