"""The catalogue: models, GPUs and node shapes as typed records, from catalog.yaml or a local folder. No torch."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from wandistill.architecture import WanArchitecture
from wandistill.device_map import BYTES_PER_ELEMENT
from wandistill.errors import ConfigError
from wandistill.planner.parameters import TextEncoder, Vae
from wandistill.units import parse_bytes

_FILE = Path(__file__).with_name("catalog.yaml")
# WanPipeline encodes at most so many tokens of a prompt, whatever the tokenizer takes.
_LONGEST_PROMPT = 512


@dataclass(frozen=True)
class Model:
    """A teacher as its configs describe it."""

    name: str
    title: str
    repositories: tuple[str, ...]
    architecture: WanArchitecture  # of each expert
    experts: int
    boundary: float | None  # in t, between two experts
    flow_shift: float
    expand_timesteps: bool  # a timestep per token
    token_length: int  # tokens of a padded prompt
    text_encoder: TextEncoder
    vae: Vae
    source: Mapping[str, str]
    block_bytes: int | None = None  # of a block in the weights' files; None: not known

    @property
    def parameters(self) -> int:
        """Of all experts."""
        return self.experts * self.architecture.parameters

    def tokens(self, width: int, height: int, frames: int = 1) -> int:
        """Tokens of a picture or video in pixels.

        Raises:
            ConfigError: the VAE's factors and the transformer's patches do not divide the size.
        """
        step = self.resolution_step
        for name, size in (("width", width), ("height", height)):
            if size < step or size % step:
                near = sorted({max(size // step, 1) * step, (size // step + 1) * step})
                raise ConfigError(
                    f"--resolution {width}x{height}: the {name} must be a multiple of {step} for {self.name} (the "
                    f"VAE's {self.vae.scale_factor_spatial} times the transformer's patch); take "
                    f"{' or '.join(map(str, near))}."
                )
        factor = self.vae.scale_factor_spatial
        latent_frames = (frames - 1) // self.vae.scale_factor_temporal + 1
        return self.architecture.tokens((latent_frames, height // factor, width // factor))

    @property
    def resolution_step(self) -> int:
        """Pixels of which width and height are multiples."""
        return self.vae.scale_factor_spatial * self.architecture.patch_size[1]


@dataclass(frozen=True)
class Gpu:
    """A GPU. Bytes, TFLOP/s and GB/s as in catalog.yaml."""

    name: str
    title: str
    memory: int  # bytes, of the card
    usable: int  # bytes that CUDA reports as total
    bf16: float
    fp8: float | None
    tf32: float
    bandwidth: float
    host_link: float
    peer_link: float
    peer_kind: str  # nvlink, pcie or host
    capability: tuple[int, int]
    products: tuple[str, ...]  # values of the node label nvidia.com/gpu.product
    source: Mapping[str, str]


@dataclass(frozen=True)
class NodeShape:
    """A machine."""

    name: str
    gpu: str
    gpus: int
    host_memory: int  # bytes
    cores: int
    disk: float  # GB/s of sequential reads
    source: str


def models() -> dict[str, Model]:
    """All models of the catalogue by name."""
    return {name: _model(name) for name in _catalog()["models"]}


def gpus() -> dict[str, Gpu]:
    """All GPUs of the catalogue by name."""
    return {name: _gpu(name) for name in _catalog()["gpus"]}


def nodes() -> dict[str, NodeShape]:
    """All node shapes of the catalogue by name."""
    return {
        name: NodeShape(name=name, **{**entry, "host_memory": parse_bytes(entry["host_memory"])})
        for name, entry in _catalog()["nodes"].items()
    }


def find_model(value: str) -> Model:
    """The model that `value` names: a name or hub id of the catalogue, or a local folder whose configs are read.

    Raises:
        ConfigError: there is no such model; the message lists the known names.
    """
    entries = _catalog()["models"]
    for name, entry in entries.items():
        known = (name, *entry["repositories"])
        if value.lower() in (text.lower() for text in known):
            return _model(name)
    path = Path(value)
    if path.is_dir():
        return model_from_folder(path)
    if "/" in value or value.startswith("."):
        ids = [repository for entry in entries.values() for repository in entry["repositories"]]
        raise _unknown("--model", value, [*entries, *ids], "; nor is it a local folder")
    raise _unknown("--model", value, entries)


def find_gpu(value: str) -> Gpu:
    """The GPU that `value` names, also by an alias or as nvidia.com/gpu.product has it.

    Raises:
        ConfigError: there is no such GPU; the message lists the known names.
    """
    wanted = value.lower().replace("_", "-").replace(" ", "-")
    entries = _catalog()["gpus"]
    for name, entry in entries.items():
        known = (name, *(str(alias) for alias in entry["aliases"]), *entry["products"])
        if wanted in (text.lower() for text in known):
            return _gpu(name)
    raise _unknown("--gpu", value, entries)


def find_node(value: str) -> NodeShape:
    """The node shape that `value` names.

    Raises:
        ConfigError: there is no such shape; the message lists the known names.
    """
    known = nodes()
    if value.lower() not in known:
        raise _unknown("--node", value, known)
    return known[value.lower()]


def model_from_folder(path: Path) -> Model:
    """A local folder in diffusers' WanPipeline layout, from its config.json files; nothing is loaded. Of the weights'
    files, which need not be there, only headers are read.

    Raises:
        ConfigError: a config is missing or not JSON, or the folder holds another pipeline.
    """
    index = _json(path / "model_index.json")
    if index.get("_class_name") != "WanPipeline":
        raise ConfigError(
            f"--model {path}: its model_index.json describes a {index.get('_class_name')}, but a teacher is a "
            "WanPipeline folder of diffusers."
        )
    experts = [name for name in ("transformer", "transformer_2") if (index.get(name) or [None])[0]]
    configs = [_json(path / name / "config.json") for name in experts]
    architectures = {WanArchitecture.from_config(config) for config in configs}
    if len(architectures) != 1:
        raise ConfigError(f"--model {path}: transformer and transformer_2 are of different shapes; both must be alike.")
    scheduler = _json(path / "scheduler" / "scheduler_config.json")
    tokenizer = _json(path / "tokenizer" / "tokenizer_config.json")
    shift = scheduler.get("flow_shift") or scheduler.get("shift")
    return Model(
        name=str(path),
        title=str(path),
        repositories=(),
        architecture=architectures.pop(),
        experts=len(experts),
        boundary=index.get("boundary_ratio") if len(experts) == 2 else None,
        flow_shift=float(shift or 1.0),
        expand_timesteps=bool(index.get("expand_timesteps")),
        # Tokenizers without a limit say so with a number of 30 digits.
        token_length=int(min(_LONGEST_PROMPT, tokenizer.get("model_max_length", _LONGEST_PROMPT))),
        text_encoder=TextEncoder.from_config(_json(path / "text_encoder" / "config.json")),
        vae=Vae.from_config(_json(path / "vae" / "config.json")),
        source={"transformer": f"config.json files in {path}"},
        block_bytes=_block_bytes([path / name for name in experts]),
    )


def _block_bytes(folders: Iterable[Path]) -> int | None:
    """Bytes that a block takes in the files of the expert that has the larger ones; None where they are not there."""
    from wandistill.models.wan_weights import component_tensors

    sizes = []
    for folder in folders:
        try:
            tensors = component_tensors(folder, "diffusion_pytorch_model")
        except ConfigError:  # a plan takes configs alone, and whoever loads the weights says what is wrong with them
            return None
        blocks = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
        size = sum(tensor.end - tensor.begin for name, tensor in tensors.items() if name.startswith("blocks."))
        sizes.append(size // max(len(blocks), 1))
    return max(sizes, default=0) or None


@cache
def _catalog() -> dict[str, Any]:
    import yaml

    # The C loader reads the file in a tenth of the time; builds of PyYAML without libyaml lack it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with _FILE.open(encoding="utf-8") as file:
        content = yaml.load(file, Loader=loader)
    assert isinstance(content, dict)
    return content


@cache
def _model(name: str) -> Model:
    catalog = _catalog()
    entry = catalog["models"][name]
    architecture, files = WanArchitecture.from_config(entry["transformer"]), entry.get("files")
    return Model(
        name=name,
        title=entry["title"],
        repositories=tuple(entry["repositories"]),
        architecture=architecture,
        experts=entry["experts"],
        boundary=entry.get("boundary"),
        flow_shift=entry["flow_shift"],
        expand_timesteps=entry.get("expand_timesteps", False),
        token_length=entry["token_length"],
        text_encoder=TextEncoder.from_config(catalog["text_encoders"][entry["text_encoder"]]),
        vae=Vae.from_config(catalog["vaes"][entry["vae"]]),
        source=entry["source"],
        block_bytes=BYTES_PER_ELEMENT[files] * architecture.block_parameters if files else None,
    )


@cache
def _gpu(name: str) -> Gpu:
    entry = dict(_catalog()["gpus"][name])
    entry.pop("aliases")
    link = entry.pop("peer_link")
    for field in ("memory", "usable"):
        entry[field] = parse_bytes(entry[field])
    for field in ("capability", "products"):
        entry[field] = tuple(entry[field])
    return Gpu(name=name, peer_link=link["bandwidth"], peer_kind=link["kind"], **entry)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); a WanPipeline folder has this file.") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds a {type(content).__name__}, but must be a JSON object.")
    return content


def _unknown(flag: str, value: str, known: Iterable[str], also: str = "") -> ConfigError:
    names = list(known)
    close = difflib.get_close_matches(value.lower(), [name.lower() for name in names], n=1, cutoff=0.5)
    original = {name.lower(): name for name in names}
    hint = f" Did you mean {original[close[0]]}?" if close else ""
    return ConfigError(f"{flag} {value}: is not in the catalogue{also}; known are {', '.join(names)}.{hint}")
