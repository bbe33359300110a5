"""The numbers of the recipe that makes the embedded teacher, one dataclass a stage.

Budgets are optimizer steps, not seconds, so that the same recipe does the same work on any machine. FULL takes about a
quarter of an hour on one H100; TINY only proves that every stage runs.
"""

from dataclasses import dataclass, replace
from typing import Any

from wandistill.demo.tokenizer import END_ID, PAD_ID, TOKEN_LENGTH, WORDS

FRAMES = 5
"""Frames of a training clip: two latent frames, the fewest that hold motion (1 + 4, the VAE's step in time)."""


@dataclass(frozen=True)
class JudgeRecipe:
    steps: int = 7000
    batch: int = 512
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    constant_share: float = 0.3
    noise: float = 0.1
    """Most noise added to a picture that the judge trains on, in units of the pictures' range -1..1."""


@dataclass(frozen=True)
class VaeRecipe:
    steps: int = 7200
    frame_batch: int = 128
    clip_batch: int = 32
    learning_rate: float = 3e-4
    warmup_steps: int = 300
    constant_share: float = 0.4
    clips_after: float = 0.15
    """Share of the steps after which every second step is one of clips; before, all are of single frames."""
    object_weight: float = 9.0
    """Loss weight of pixels that differ from the background. Unweighted, the VAE never draws the objects."""
    kl_weight: float = 2e-5
    latent_samples: int = 1024
    """Frames (and half as many clips) over which the latents' mean and standard deviation are measured."""


@dataclass(frozen=True)
class LatentsRecipe:
    frames: int = 400_000
    clips: int = 150_000
    frame_batch: int = 1000
    clip_batch: int = 250


@dataclass(frozen=True)
class TransformerRecipe:
    steps: int
    learning_rate: float
    warmup_steps: int
    constant_share: float
    frame_batch: int = 768
    clip_batch: int = 384
    caption_dropout: float = 0.1
    ema_decay: float = 0.999


@dataclass(frozen=True)
class EvaluationRecipe:
    captions: int = 512
    batch: int = 128
    steps: tuple[int, ...] = (50, 8)
    guidance_scale: float = 3.0
    judged_scenes: int = 4096
    """Drawn held-out scenes that the judge is tested on."""


@dataclass(frozen=True)
class Recipe:
    judge: JudgeRecipe = JudgeRecipe()
    vae: VaeRecipe = VaeRecipe()
    latents: LatentsRecipe = LatentsRecipe()
    transformer: TransformerRecipe = TransformerRecipe(
        steps=18_000, learning_rate=1e-3, warmup_steps=300, constant_share=0.5
    )
    """Text encoder and transformer together, over all noise levels."""
    experts: TransformerRecipe = TransformerRecipe(
        steps=2_500, learning_rate=4e-4, warmup_steps=100, constant_share=0.1
    )
    """Each of the two experts, from the transformer's averaged weights, with the text encoder frozen."""
    evaluation: EvaluationRecipe = EvaluationRecipe()
    boundary_ratio: float = 0.875
    """Time from which the high-noise expert acts: that of Wan2.2-T2V-A14B."""
    flow_shift: float = 3.0
    layers: int = 8

    def vae_config(self) -> dict[str, Any]:
        """Of AutoencoderKLWan: Wan 2.1's layout (8 x 8 pixels and 4 frames a latent), a sixth of its width."""
        return {
            "base_dim": 16,
            "z_dim": 16,
            "dim_mult": [1, 2, 4, 4],
            "num_res_blocks": 1,
            "attn_scales": [],
            "temperal_downsample": [False, True, True],  # diffusers' spelling
        }

    def transformer_config(self) -> dict[str, Any]:
        """Of WanTransformer3DModel: 6 heads x 32 channels."""
        return {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 6,
            "attention_head_dim": 32,
            "in_channels": 16,
            "out_channels": 16,
            "text_dim": 128,
            "freq_dim": 128,
            "ffn_dim": 768,
            "num_layers": self.layers,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 64,
        }

    def text_encoder_config(self) -> dict[str, Any]:
        """Of UMT5EncoderModel."""
        return {
            "vocab_size": len(WORDS),
            "d_model": 128,
            "d_kv": 32,
            "d_ff": 256,
            "num_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 4 * TOKEN_LENGTH,
            "dropout_rate": 0.0,
            "feed_forward_proj": "gated-gelu",
            "pad_token_id": PAD_ID,
            "eos_token_id": END_ID,
        }


FULL = Recipe()
TINY = Recipe(
    judge=JudgeRecipe(steps=4, batch=8),
    vae=VaeRecipe(steps=4, frame_batch=2, clip_batch=2, clips_after=0.0, latent_samples=4),
    latents=LatentsRecipe(frames=8, clips=4, frame_batch=4, clip_batch=2),
    transformer=replace(FULL.transformer, steps=4, frame_batch=4, clip_batch=2),
    experts=replace(FULL.experts, steps=2, frame_batch=4, clip_batch=2),
    evaluation=EvaluationRecipe(captions=4, batch=4, steps=(2,), judged_scenes=4),
    layers=2,
)
