"""A Wan teacher on disk: opened without loading weights, its components loaded one at a time when asked for."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wandistill.architecture import WanArchitecture
from wandistill.errors import ConfigError
from wandistill.models.held import hold
from wandistill.models.wan_files import WanFiles, read_files
from wandistill.models.wan_hub import resolve_folder
from wandistill.teacher.base import Expert

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import PreTrainedTokenizerBase, UMT5EncoderModel

_log = logging.getLogger(__name__)


@contextmanager
def progress_bars_on_terminals(library: str) -> Iterator[None]:
    """Within it `diffusers` or `transformers` draws its loading bars only where a person sees them."""
    bars = importlib.import_module(f"{library}.utils.logging")
    if sys.stderr.isatty() or not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()
    try:
        yield
    finally:
        bars.enable_progress_bar()


def open_teacher(path_or_id: str, revision: str = "") -> WanFolder:
    """Opens a teacher: `embedded`, a local folder in diffusers' WanPipeline layout, or a hub id at a revision.

    Reads the configs and the headers of the weight files, and checks both; loads no weights.

    Raises:
        ConfigError: not found, incomplete, damaged, or not a text-to-video Wan in diffusers' layout.
    """
    folder = WanFolder(path_or_id, read_files(resolve_folder(path_or_id, revision)))
    for note in folder.notes:
        _log.info(note)
    return folder


class WanFolder:
    """A Wan teacher's folder: what its configs say, and its components on request."""

    def __init__(self, name: str, files: WanFiles) -> None:
        vae = files.configs["vae"]
        self.name = name  # as the user gave it
        self.path: Path = files.path
        self.experts: tuple[Expert, ...] = tuple(Expert(component) for component in files.experts)
        self.boundary: float | None = files.boundary  # in t; None with one expert
        self.expand_timesteps: bool = files.expand_timesteps  # a timestep per token (Wan2.2-TI2V-5B)
        self.transformer_config: dict[str, Any] = files.configs[Expert.HIGH.value]
        self.architecture = WanArchitecture.from_config(self.transformer_config)
        self.flow_shift: float = files.flow_shift
        self.token_length: int = files.token_length
        self.latent_channels: int = vae.get("z_dim", 16)
        self.spatial_factor: int = vae.get("scale_factor_spatial") or 8
        self.temporal_factor: int = vae.get("scale_factor_temporal") or 4
        self.latents_mean: list[float] = vae["latents_mean"]
        self.latents_std: list[float] = vae["latents_std"]
        self.notes: list[str] = files.notes
        self._files = files

    def expert_for(self, t: float) -> Expert:
        """The expert for time `t` in 0..1: the high-noise one from the boundary on, whatever the sampling index."""
        if self.boundary is None or t >= self.boundary:
            return Expert.HIGH
        return Expert.LOW

    def latent_shape(self, width: int, height: int, frames: int = 1) -> tuple[int, int, int, int]:
        """The latents' shape (channels, frames, height, width) of a picture or video in pixels.

        Raises:
            ConfigError: the VAE's factors and the transformer's patches do not divide the size.
        """
        patch_frames, patch_height, patch_width = self.architecture.patch_size
        for what, size, patch in (("width", width, patch_width), ("height", height, patch_height)):
            step = self.spatial_factor * patch
            if size < step or size % step:
                below = max(size, 0) // step * step
                nearest = f"{below} or {below + step}" if below else f"{step}"
                raise ConfigError(
                    f"The resolution {width}x{height} does not fit {self.name}: its {what} must be a multiple "
                    f"of {step} (the VAE's {self.spatial_factor} times the patch's {patch}). Take {nearest}."
                )
        latent_frames = (frames - 1) // self.temporal_factor + 1
        if frames < 1 or (frames - 1) % self.temporal_factor or latent_frames % patch_frames:
            raise ConfigError(
                f"{frames} frames do not fit {self.name}: the VAE takes 1 frame, or 1 more than a multiple of "
                f"{self.temporal_factor}, such as {self.temporal_factor + 1}."
            )
        return (
            self.latent_channels,
            latent_frames,
            height // self.spatial_factor,
            width // self.spatial_factor,
        )

    def fingerprint(self, *components: str) -> str:
        """A content key of `components` (all of the folder's if none is named): 64 hexadecimal digits, SHA-256.

        The key depends on content alone, never on path, name, file times, shards or machine. Hashed are, for each
        component by name: its config with sorted keys, without the fields that only tell who wrote it (those that
        begin with `_`, but for `_class_name`, and `transformers_version`); of its weights what
        `wan_weights.sampled_content` documents (every tensor's name, dtype, shape, and up to 16 KiB of its
        bytes); of the tokenizer all files whole.
        """
        return self._files.fingerprint(components or self._files.components)

    def load_transformer(self, expert: Expert, dtype: torch.dtype, device: torch.device | str) -> WanTransformer3DModel:
        """One expert in `dtype` on `device`, frozen; the modules that Wan keeps in float32 are float32 in any dtype.

        Raises:
            ConfigError: the weights do not belong to the config.
        """
        from diffusers import WanTransformer3DModel

        return self._load(WanTransformer3DModel, expert.value, dtype, device)

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device | str) -> UMT5EncoderModel:
        """The text encoder in `dtype` on `device`, frozen."""
        from transformers import UMT5EncoderModel

        return self._held(self._load(UMT5EncoderModel, "text_encoder", dtype, device))

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The text encoder's tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path / "tokenizer", local_files_only=True)

    def load_vae(self, device: torch.device | str) -> AutoencoderKLWan:
        """The VAE in float32 on `device`, frozen (in half precision Wan's VAE loses quality, so diffusers advises)."""
        from diffusers import AutoencoderKLWan

        return self._held(self._load(AutoencoderKLWan, "vae", torch.float32, device))

    @staticmethod
    def _held(encoder: Any) -> Any:
        hold("encoders", [*encoder.parameters(), *encoder.buffers()])
        return encoder

    def _load(self, model_class: Any, component: str, dtype: torch.dtype, device: torch.device | str) -> Any:
        """A component through its library's own loader, tensor by tensor, which keeps its float32 modules."""
        folder = self.path / component
        # Straight to a GPU: the host then never holds a converted copy of the weights.
        placement = {} if torch.device(device).type == "cpu" else {"device_map": {"": device}}
        with progress_bars_on_terminals(model_class.__module__.partition(".")[0]):
            model, info = model_class.from_pretrained(
                folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True, **placement
            )
        missing = sorted(info["missing_keys"])
        if missing:
            # The libraries only warn, and would go on with random weights.
            raise ConfigError(
                f"The weights in {folder} lack {len(missing)} tensors that its config.json describes, such as "
                f"{missing[0]}: config and weights are of different models."
            )
        return model.eval().requires_grad_(False)

    @torch.no_grad()
    def decode(self, vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
        """Pixels [B, 3, frames, H, W] in -1..1 (the VAE clamps) of normalised latents [B, C, F, H, W]."""
        latents = latents.to(vae.device, vae.dtype)
        mean, inverse_std = self._statistics(latents)
        return vae.decode(latents / inverse_std + mean, return_dict=False)[0]

    @torch.no_grad()
    def encode(self, vae: AutoencoderKLWan, pixels: Tensor) -> Tensor:
        """Normalised latents [B, C, F, H, W], the mode of the posterior, of pixels [B, 3, frames, H, W] in -1..1."""
        latents = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.mode()
        mean, inverse_std = self._statistics(latents)
        return (latents - mean) * inverse_std

    def _statistics(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and 1/std per channel; the inverse because diffusers divides by it, and the last bit depends on that."""
        mean = torch.tensor(self.latents_mean).view(1, -1, 1, 1, 1).to(latents)
        inverse_std = 1.0 / torch.tensor(self.latents_std).view(1, -1, 1, 1, 1).to(latents)
        return mean, inverse_std
