"""Narrower students: heads and channels that do nothing are dropped, and what is kept fits together.

The wide teachers here are made of a small one by doubling every channel: layers write both copies and read one of
them. Norms see the same mean and variance, so the wide model computes what the small one does, and the copies that
nobody reads have no importance. Cut to the small one's size it must be the small one again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from wandistill.architecture import WanArchitecture
from wandistill.models.forward import forward
from wandistill.models.student import build_student
from wandistill.models.wan import open_teacher
from wandistill.models.weights import TransformerFiles
from wandistill.models.width import Cut, Importance, measure_importance, weight_importance
from wandistill.student_config import student_spec

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "ffn_dim": 20,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 10,
    "freq_dim": 8,
    "rope_max_seq_len": 32,
}
WIDE = {**SMALL, "num_attention_heads": 4, "ffn_dim": 40}


def small_model() -> WanTransformer3DModel:
    """Random, also where diffusers' initialisation is constant."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(**SMALL).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += 0.3 * torch.randn_like(parameter)
    return model


def channels_read(name: str) -> str:
    """The set of channels that the input dimension of weight `name` runs over, with its block."""
    block = ".".join(name.split(".")[:2])
    inner = {"attn1.to_out": "self", "attn2.to_out": "cross", "ffn.net.2": "ffn"}
    for layer, channels in inner.items():
        if layer in name:
            return f"{block} {channels}"
    if "attn2.to_k" in name or "attn2.to_v" in name:
        return "text"
    outer = {"time_embedder.linear_2": "time_hidden", "text_embedder.linear_2": "text_hidden"}
    return next((channels for layer, channels in outer.items() if layer in name), "residual")


def doubled(small: WanTransformer3DModel, seed: int) -> WanTransformer3DModel:
    """The wide teacher; `seed` draws, for each set of channels, which copy is read."""
    draw = random.Random(seed)
    sides: dict[str, int] = {}
    wide = WanTransformer3DModel(**WIDE).eval().requires_grad_(False)
    weights = {}
    for name, shape in ((name, tensor.shape) for name, tensor in wide.state_dict().items()):
        tensor = small.state_dict()[name]
        if "time_proj" in name:  # six chunks, each of which is doubled
            tensor = tensor.unflatten(0, (6, -1)).repeat(1, 2, *[1] * (tensor.ndim - 1)).flatten(0, 1)
        elif tensor.shape[0] != shape[0]:
            tensor = torch.cat([tensor, tensor])
        elif name.endswith("scale_shift_table"):
            tensor = torch.cat([tensor, tensor], dim=-1)
        if tensor.ndim == 2 and tensor.shape[1] != shape[1]:
            side = sides.setdefault(channels_read(name), draw.randrange(2))
            copies = [tensor, torch.zeros_like(tensor)]
            tensor = torch.cat(copies if side == 0 else copies[::-1], dim=1)
        weights[name] = tensor
    wide.load_state_dict(weights)
    return wide


def batches(count: int = 2) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(2, 4, 1, 4, 4, generator=generator),
            torch.rand(2, generator=generator),
            torch.randn(2, 6, 10, generator=generator),
        )
        for _ in range(count)
    ]


def architecture(config: dict[str, Any]) -> WanArchitecture:
    return WanArchitecture.from_config(config)


def by_weights(model: WanTransformer3DModel, folder: Path, blocks: tuple[int, ...]) -> Importance:
    model.save_pretrained(folder)
    return weight_importance([TransformerFiles(folder)], blocks)


def by_activations(model: WanTransformer3DModel, folder: Path, blocks: tuple[int, ...]) -> Importance:
    return measure_importance(model, batches(), blocks)


def test_the_wide_teacher_computes_what_the_small_one_does():
    small = small_model()
    for x, t, prompt in batches():
        expected, _ = forward(small, x, t, prompt)
        actual, _ = forward(doubled(small, 0), x, t, prompt)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("measure", [by_weights, by_activations])
def test_cutting_channels_that_nobody_reads_gives_the_same_model(
    tmp_path: Path, measure: Callable[..., Importance], seed: int
):
    small = small_model()
    wide = doubled(small, seed)
    cut = Cut(measure(wide, tmp_path, (0, 1)), architecture(SMALL), architecture(WIDE), (0, 1))
    for name, expected in small.state_dict().items():
        assert torch.equal(cut(name, wide.state_dict()[name]), expected), name


def test_a_cut_of_fewer_blocks_takes_each_ones_own_channels(tmp_path: Path):
    small = small_model()
    wide = doubled(small, 1)
    cut = Cut(by_weights(wide, tmp_path, (1,)), architecture({**SMALL, "num_layers": 1}), architecture(WIDE), (1,))
    for name, expected in small.blocks[1].state_dict().items():
        assert torch.equal(cut(f"blocks.0.{name}", wide.blocks[1].state_dict()[name]), expected), name


def test_a_narrower_feed_forward_alone_leaves_heads_and_residual_channels_whole():
    small = small_model()
    for block in small.blocks:
        block.ffn.net[2].weight[:, 5:11] = 0  # six channels that do nothing
    shape = architecture({**SMALL, "ffn_dim": 14})
    cut = Cut(measure_importance(small, batches(), (0, 1)), shape, architecture(SMALL), (0, 1))
    student = WanTransformer3DModel(**{**SMALL, "ffn_dim": 14}).eval()
    student.load_state_dict({name: cut(name, tensor) for name, tensor in small.state_dict().items()})
    for x, t, prompt in batches():
        expected, _ = forward(small, x, t, prompt)
        actual, _ = forward(student, x, t, prompt)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_whole_heads_are_kept_however_their_single_channels_rank():
    small = small_model()
    out = small.blocks[0].attn1.to_out[0].weight
    out[:, :12] = 0
    out[:, 3] = 2.0  # one loud channel in a silent head; the other head is louder as a whole
    out[:, 12:] = 1.0
    shape = architecture({**SMALL, "num_attention_heads": 1})
    cut = Cut(measure_importance(small, batches(), (0, 1)), shape, architecture(SMALL), (0, 1))
    kept = cut("blocks.0.attn1.norm_q.weight", torch.arange(24.0))
    assert torch.equal(kept, torch.arange(12.0, 24.0))


def test_activations_count_as_well_as_weights():
    small = small_model()
    gate = small.blocks[0].ffn.net[0].proj
    gate.weight[:10] *= 100  # the first half's activations are far larger; what reads them weighs the same
    importance = measure_importance(small, batches(), (0,)).blocks[0]["ffn"]
    assert importance[:10].sum() > 0.9 * importance.sum()


def test_every_vector_of_importances_sums_to_one_and_experts_average(tmp_path: Path):
    first = measure_importance(small_model(), batches(), (0, 1))
    second = by_weights(small_model(), tmp_path, (0, 1))
    for importance in (first, second, first + second):
        vectors = [*importance.outer.values(), *(v for block in importance.blocks.values() for v in block.values())]
        assert len(vectors) == 4 + 2 * 3
        for vector in vectors:
            assert float(vector.sum()) == pytest.approx(1)
    mean = (first.outer["residual"] + second.outer["residual"]) / 2
    assert torch.equal((first + second).outer["residual"], mean)


def test_importance_does_not_depend_on_how_samples_are_batched():
    small = small_model()
    together = [tuple(torch.cat(parts) for parts in zip(*batches(), strict=True))]
    first, second = (measure_importance(small, b, (0, 1)) for b in (batches(), together))
    torch.testing.assert_close(first.outer["text"], second.outer["text"], rtol=1e-5, atol=1e-8)


def test_measuring_leaves_no_hook_behind_and_wants_a_batch():
    small = small_model()
    with pytest.raises(ValueError, match="at least one batch"):
        measure_importance(small, [], (0,))
    measure_importance(small, batches(), (0,))
    assert not any(module._forward_pre_hooks for module in small.modules())


def test_a_narrower_student_is_built_from_shards_in_its_own_shape(tiny_wan: Callable[[str], Path]):
    folder = open_teacher(str(tiny_wan("t2v-a14b")))
    spec = student_spec({"blocks": [0, 2], "num_attention_heads": 1, "ffn_dim": 10}, folder.architecture)
    sources = [TransformerFiles(folder.path / expert.value) for expert in folder.experts]
    importance = weight_importance(sources, spec.blocks)
    first, again = (build_student(folder, spec, "average", importance=importance) for _ in range(2))
    assert sum(tensor.numel() for tensor in first.parameters()) == spec.architecture.parameters
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in first.state_dict().items())
    velocity, _ = first(torch.randn(1, 16, 1, 4, 4), torch.tensor([0.5]), torch.randn(1, 3, 16))
    assert velocity.shape == (1, 16, 1, 4, 4) and velocity.isfinite().all()
