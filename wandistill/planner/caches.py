"""Memory of what runs beside the steps: the text encoder, the rollouts' batches, and the VAE that draws samples."""

from __future__ import annotations

from itertools import pairwise

from wandistill.planner.activations import forward_peak
from wandistill.planner.parameters import Vae
from wandistill.planner.request import PlanRequest
from wandistill.planner.terms import Term

# Batches of the caches (wandistill.data.embeddings and .latents).
_EMBEDDING_TOKENS, _EMBEDDING_PROMPTS = 4096, 64
_ROLLOUT_TOKENS, _ROLLOUTS = 16_384, 64


def text_encoder(request: PlanRequest) -> Term:
    """Its weights, in the teacher's dtype or, for 8-bit ones, bfloat16; float32 on a CPU."""
    parameters = request.model.text_encoder.parameters
    width = 4 if request.teacher_dtype == "float32" or not request.on_gpu else 2
    return Term("text encoder", width * parameters, f"{parameters / 1e6:,.1f} M parameters x {width} B")


def encoding(request: PlanRequest) -> Term:
    """Attention scores, to which UMT5 adds a bias and so computes them without a fused kernel, and a feed-forward."""
    encoder, tokens = request.model.text_encoder, request.model.token_length
    rows = max(1, min(_EMBEDDING_PROMPTS, _EMBEDDING_TOKENS // tokens))
    scores = rows * encoder.num_heads * tokens * tokens
    states = rows * tokens * (3 * encoder.d_ff + 6 * encoder.d_model)
    return Term("text encoding", 8 * scores + 4 * states, f"{rows} prompts of {tokens} tokens")


def rollouts_at_once(request: PlanRequest) -> int:
    """Samples of one batch of the teacher's rollouts on a rank."""
    return max(1, min(_ROLLOUTS, _ROLLOUT_TOKENS // request.tokens))


def rollout_rows(request: PlanRequest) -> int:
    """Rows of that batch, both halves of guidance counted."""
    return rollouts_at_once(request) * (2 if request.guided else 1)


def sampling(request: PlanRequest) -> list[Term]:
    """The VAE in float32 beside the student, which has drawn before."""
    vae = request.model.vae
    each = decode_bytes_per_pixel(vae)
    pixels = request.width * request.height
    drawing = forward_peak(request.student_pass(1)).total
    return [
        Term("vae", 4 * vae.parameters, f"{vae.parameters / 1e6:,.1f} M parameters x 4 B"),
        Term("vae decoding", max(int(each * pixels), drawing), f"{pixels:,} pixels x {each:,.0f} B"),
    ]


def decode_bytes_per_pixel(vae: Vae) -> float:
    """Peak of `AutoencoderKLWan.decode` for one frame, in bytes a pixel of the picture.

    Every convolution keeps its input for the next frame, at all levels; the last level works on seven tensors beside
    (three frames of padded input, its output, block input, shortcut and activation), the residual kind also on copies
    of the level's input.
    """
    base = vae.decoder_base_dim or vae.base_dim
    widths = [base * multiple for multiple in (vae.dim_mult[-1], *reversed(vae.dim_mult))]
    levels = len(vae.dim_mult)
    convolutions = 2 * (vae.num_res_blocks + 1)
    kept = 0.0
    for level, (inputs, outputs) in enumerate(pairwise(widths)):
        if not vae.is_residual:
            inputs = outputs
        pixels = 4 ** (levels - 1 - level) * (vae.patch_size or 1) ** 2
        kept += 4 * (inputs + (convolutions - 1) * outputs) / pixels
    last = 4 * widths[-1] / (vae.patch_size or 1) ** 2
    copies = 1.5 * 4 * widths[-2] / (vae.patch_size or 1) ** 2 if vae.is_residual else 0.0
    return kept + 7 * last + copies
