"""Arithmetic and memory traffic of a Wan forward, counted from its operations."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from wandistill.planner.activations import Pass


class Work(NamedTuple):
    """What a pass has a device do."""

    matrix_flops: float  # of linear layers
    attention_flops: float
    traffic: float  # bytes that element-wise operations read and write
    weights: float  # bytes of weights read


@lru_cache(maxsize=4096)
def block_work(run: Pass) -> Work:
    """One block's forward; 2 floating-point operations a multiplication and addition.

    Element-wise traffic, in bytes an element of the residual stream (U) and of the feed-forward, follows the
    lines of diffusers' `WanTransformerBlock` (0.42): a float32 copy reads e and writes 4, a norm, a product or a sum in
    float32 reads and writes 4 each, the rotary embedding works on halves in float32 (four products, two sums, two
    strided copies), an RMS norm reads and writes e.
    """
    architecture, sizes, compute = run.architecture, run.sizes, run.compute
    hidden, e = architecture.hidden_size, compute.hidden
    rows, prompt_rows = sizes.rows, run.batch * run.prompt
    # q, k, v, out and q, out of the two attentions, both feed-forward matrices; k and v of the prompt.
    matrices = 2 * rows * (6 * hidden * hidden + 2 * hidden * architecture.ffn_dim) + 4 * prompt_rows * hidden * hidden
    attention = 4 * rows * hidden * (run.tokens + run.prompt)
    convert = e + 4 if e == 2 else 0  # to float32 or back
    modulated = convert + 8 + 8 + 8 + convert  # float, norm, product, sum, type_as
    gated = 2 * convert + (e + 4) + 12  # float, product with the gate, sum, type_as
    rotary: float = 2 * (4 * (e / 2 + 2) + 2 * 6 + 2 * (2 + e / 2))
    stream: float = 2 * modulated + 2 * gated + convert  # self-attention and feed-forward
    stream += (2 * convert + 8) + 3 * e  # norm2; the sum after cross-attention
    stream += 3 * 2 * e + rotary  # RMS norms of both queries and one key
    return Work(
        matrix_flops=matrices,
        attention_flops=attention,
        traffic=stream * sizes.state + 2 * e * sizes.ffn + 2 * e * sizes.prompt,
        weights=compute.stored * architecture.block_parameters,
    )


@lru_cache(maxsize=4096)
def forward_work(run: Pass) -> Work:
    """One forward through all blocks and what lies outside them."""
    block, outer, layers = block_work(run), outer_work(run), run.architecture.num_layers
    return Work(*(layers * inside + outside for inside, outside in zip(block, outer, strict=True)))


@lru_cache(maxsize=4096)
def outer_work(run: Pass) -> Work:
    """What a forward does outside the blocks: the embeddings of patches, time and prompt, and the head."""
    architecture, sizes, compute = run.architecture, run.sizes, run.compute
    hidden, rows, prompt_rows = architecture.hidden_size, sizes.rows, run.batch * run.prompt
    outer_rows = rows if run.per_token else run.batch
    outer = 2 * rows * (sizes.latents + sizes.velocity) // rows * hidden
    outer += 2 * outer_rows * (7 * hidden * hidden + architecture.freq_dim * hidden)
    outer += 2 * prompt_rows * hidden * (architecture.text_dim + hidden)
    return Work(
        matrix_flops=outer,
        attention_flops=0.0,
        traffic=40 * sizes.state,
        weights=compute.stored * (architecture.parameters - architecture.num_layers * architecture.block_parameters),
    )
