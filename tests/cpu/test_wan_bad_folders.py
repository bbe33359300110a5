"""A teacher's folder that is incomplete, damaged or of another kind: one error that names the file and the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wandistill.errors import ConfigError
from wandistill.models.wan import open_teacher


def update(file: str, **changes: Any) -> Callable[[Path], None]:
    """Changes fields of a JSON file; the value `...` removes the field."""

    def damage(path: Path) -> None:
        config = {**json.loads((path / file).read_text()), **changes}
        (path / file).write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))

    return damage


def remove(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        else:
            (path / name).unlink()

    return damage


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).write_bytes(change((path / name).read_bytes()))

    return damage


def header_of(data: bytes) -> dict[str, Any]:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def with_header(data: bytes, header: dict[str, Any]) -> bytes:
    body = data[8 + int.from_bytes(data[:8], "little") :]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def shift_offsets(data: bytes) -> bytes:
    header = header_of(data)
    name = min((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])
    header[name]["data_offsets"][0] += 4
    return with_header(data, header)


def widen_dtype(data: bytes) -> bytes:
    header = header_of(data)
    next(entry for name, entry in header.items() if name != "__metadata__")["dtype"] = "F64"
    return with_header(data, header)


def drop_last_tensor(data: bytes) -> bytes:
    header = header_of(data)
    name = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])
    begin, end = header.pop(name)["data_offsets"]
    return with_header(data, header)[: begin - end]


SINGLE = "transformer/diffusion_pytorch_model.safetensors"
SHARD = "transformer/diffusion_pytorch_model-00002-of-00003.safetensors"
TEXT_SHARD = "text_encoder/model-00003-of-00005.safetensors"

CASES: list[tuple[str, str, Callable[[Path], None], str]] = [
    # The second expert.
    (
        "a14b lacks transformer_2",
        "t2v-a14b",
        remove("transformer_2"),
        "transformer_2 is missing, but .*model_index.json",
    ),
    (
        "a14b lacks transformer_2's weights",
        "t2v-a14b",
        remove("transformer_2/diffusion_pytorch_model.safetensors.index.json"),
        r"transformer_2 holds no weights: diffusion_pytorch_model.safetensors or .* is missing; it has .*00001",
    ),
    ("no boundary_ratio", "t2v-a14b", update("model_index.json", boundary_ratio=...), "boundary_ratio is null"),
    ("null boundary_ratio", "t2v-a14b", update("model_index.json", boundary_ratio=None), "boundary_ratio is null"),
    ("boundary_ratio of 875", "t2v-a14b", update("model_index.json", boundary_ratio=875), "boundary_ratio is 875"),
    (
        "experts of different width",
        "t2v-a14b",
        lambda path: _rebuild_transformer(path / "transformer_2", ffn_dim=24),
        r"transformer and .*transformer_2 differ in architecture \(ffn_dim 40 and 24\)",
    ),
    # Missing parts.
    ("no vae folder", "t2v-14b", remove("vae"), "vae is missing, but .*model_index.json lists the component vae"),
    ("no vae listed", "t2v-14b", update("model_index.json", vae=[None, None]), "model_index.json lists no vae"),
    ("no text encoder listed", "t2v-14b", update("model_index.json", text_encoder=...), "lists no text_encoder"),
    ("no transformer config", "t2v-14b", remove("transformer/config.json"), "transformer/config.json is missing"),
    ("no scheduler config", "t2v-14b", remove("scheduler/scheduler_config.json"), "scheduler_config.json is missing"),
    ("no tokenizer", "t2v-14b", remove("tokenizer/tokenizer.json"), "tokenizer has neither tokenizer.json nor"),
    ("no weights", "t2v-1.3b", remove(SINGLE), r"transformer holds no weights: diffusion_pytorch_model.safetensors"),
    (
        "a missing shard",
        "t2v-14b",
        remove(SHARD),
        "lacks diffusion_pytorch_model-00002-of-00003.safetensors: .* 3 shards",
    ),
    ("a missing text encoder shard", "t2v-14b", remove(TEXT_SHARD), "text_encoder lacks model-00003-of-00005"),
    # Damaged files.
    ("a weight file cut short", "t2v-1.3b", rewrite(SINGLE, lambda data: data[:-100]), f"{SINGLE} is not a complete"),
    ("a weight file cut within the header", "t2v-1.3b", rewrite(SINGLE, lambda data: data[:50]), f"{SINGLE} is not a"),
    ("an empty weight file", "t2v-1.3b", rewrite(SINGLE, lambda data: b""), f"{SINGLE} is not a complete"),
    ("a weight file with a tail", "t2v-1.3b", rewrite(SINGLE, lambda data: data + b"1"), "header asks for"),
    ("a header that is not JSON", "t2v-1.3b", rewrite(SINGLE, lambda data: data[:8] + b"x" + data[9:]), "is not JSON"),
    ("offsets with a gap", "t2v-1.3b", rewrite(SINGLE, shift_offsets), f"{SINGLE} is not a complete .* has .* bytes"),
    ("a dtype that the bytes don't match", "t2v-1.3b", rewrite(SINGLE, widen_dtype), "in F64 has"),
    (
        "a web page in place of the file",
        "t2v-1.3b",
        rewrite(SINGLE, lambda data: b"<!doctype html>" * 9),
        "not a complete",
    ),
    (
        "a Git LFS pointer",
        "t2v-1.3b",
        rewrite(SINGLE, lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        "is a Git LFS pointer",
    ),
    ("a shard cut short", "t2v-14b", rewrite(SHARD, lambda data: data[:-4]), f"{SHARD} is not a complete"),
    ("a text encoder cut short", "t2v-14b", rewrite(TEXT_SHARD, lambda data: data[:-4]), f"{TEXT_SHARD} is not a"),
    (
        "a shard without its tensor",
        "t2v-14b",
        rewrite(SHARD, drop_last_tensor),
        f"{SHARD} lacks the tensor .* that .*index.json",
    ),
    (
        "a tensor too few",
        "t2v-1.3b",
        rewrite(SINGLE, drop_last_tensor),
        "transformer holds .* its config.json describes",
    ),
    (
        "a config cut short",
        "t2v-14b",
        rewrite("vae/config.json", lambda data: data[:30]),
        "vae/config.json is not a read",
    ),
    (
        "a model_index that is a list",
        "t2v-14b",
        rewrite("model_index.json", lambda data: b"[]"),
        "must hold a JSON object",
    ),
    # Another kind of model.
    (
        "an image-to-video pipeline",
        "t2v-a14b",
        update("model_index.json", _class_name="WanImageToVideoPipeline"),
        "is of an image-to-video model",
    ),
    ("another pipeline", "t2v-14b", update("model_index.json", _class_name="FluxPipeline"), "_class_name FluxPipeline"),
    (
        "an image-to-video transformer",
        "t2v-14b",
        update("transformer/config.json", image_dim=1280, added_kv_proj_dim=5120, in_channels=36),
        "transformer/config.json is of an image-to-video transformer .*image_dim 1280",
    ),
    (
        "Wan2.2's image-to-video transformer",
        "t2v-a14b",
        update("transformer_2/config.json", in_channels=36),
        "transformer_2/config.json is of an image-to-video transformer .*in_channels 36",
    ),
    (
        "a VACE transformer",
        "t2v-14b",
        update("transformer/config.json", _class_name="WanVACETransformer3DModel"),
        "is of a WanVACETransformer3DModel",
    ),
    ("a VAE of other channels", "ti2v-5b", update("transformer/config.json", in_channels=16), "has in_channels 16 and"),
    ("another model's config", "t2v-14b", update("transformer/config.json", num_layers=4), "are of different models"),
    ("a config with text", "t2v-14b", update("transformer/config.json", num_layers="3"), 'has num_layers "3"'),
    ("another text encoder", "t2v-14b", update("text_encoder/config.json", model_type="t5"), "model_type t5"),
    ("a text encoder of other width", "t2v-14b", update("text_encoder/config.json", d_model=8), "d_model is 8"),
    ("no latent statistics", "t2v-14b", update("vae/config.json", latents_mean=...), "must give latents_mean"),
    ("a shift of 0", "t2v-14b", update("scheduler/scheduler_config.json", flow_shift=0), "flow shift of 0"),
]


def _rebuild_transformer(folder: Path, **sizes: int) -> None:
    from diffusers import WanTransformer3DModel
    from tiny_wan import TRANSFORMER

    shutil.rmtree(folder)
    WanTransformer3DModel(**{**TRANSFORMER, **sizes}).save_pretrained(folder)


@pytest.mark.parametrize(("kind", "damage", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_folder_that_cannot_be_a_teacher_is_refused_by_name(tiny_wan_copy, kind, damage, message):
    path = tiny_wan_copy(kind)
    open_teacher(str(path))
    damage(path)
    with pytest.raises(ConfigError, match=f"(?s){message}") as refused:
        open_teacher(str(path))
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_weights_whose_names_differ_from_the_config_are_refused_when_loaded(tiny_wan_copy):
    import torch

    path = tiny_wan_copy("t2v-1.3b")
    rewrite(SINGLE, lambda data: data.replace(b"proj_out.bias", b"proj_oot.bias"))(path)
    folder = open_teacher(str(path))
    with pytest.raises(ConfigError, match=r"transformer lack 1 tensors .* such as proj_out.bias"):
        folder.load_transformer(folder.experts[0], torch.float32, "cpu")
