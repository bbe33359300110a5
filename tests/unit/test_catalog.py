"""The catalogue: its entries, their sources, and what is said of a name that is not in it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import yaml

import wandistill
from wandistill.catalog import find_gpu, find_model, find_node, gpus, model_from_folder, models, nodes
from wandistill.errors import ConfigError
from wandistill.units import GIB

PACKAGE = Path(wandistill.__file__).parent
EMBEDDED = PACKAGE / "demo" / "teacher"
GPUS = [
    *("rtx-3090", "rtx-4090", "a10g", "l4", "l40s", "a6000", "a100-40gb", "a100-80gb"),
    *("h100-80gb", "h200-141gb", "b200-180gb", "rtx-5090", "rtx-pro-6000"),
]


def test_the_models_and_gpus_that_the_planner_promises_are_there() -> None:
    assert list(gpus()) == GPUS
    assert list(models()) == ["wan2.1-t2v-1.3b", "wan2.1-t2v-14b", "wan2.2-t2v-a14b", "wan2.2-ti2v-5b", "embedded"]


def test_every_number_of_a_gpu_has_a_source() -> None:
    content = yaml.safe_load((PACKAGE / "catalog.yaml").read_text())
    for name, entry in content["gpus"].items():
        numbers = {"memory", "usable", "bf16", "fp8", "tf32", "bandwidth", "host_link", "peer_link"}
        stated = {field for field in numbers if entry[field] is not None}
        # A card without 8-bit floats has no number to give a source for.
        assert stated <= set(entry["source"]), name
    for kind in ("models", "text_encoders", "vaes", "nodes"):
        assert all(entry["source"] for entry in content[kind].values())


@pytest.mark.parametrize("gpu", gpus().values(), ids=gpus())
def test_a_gpu_s_numbers_are_plausible(gpu: object) -> None:
    assert dataclasses.is_dataclass(gpu)
    card = find_gpu(gpu.name)  # type: ignore[attr-defined]
    assert 0.9 * card.memory < card.usable < card.memory
    assert card.fp8 is None or card.fp8 == pytest.approx(2 * card.bf16, rel=0.02)
    assert card.tf32 == pytest.approx(card.bf16 / 2, rel=0.02)
    assert card.peer_kind in ("nvlink", "pcie", "host")
    assert card.products and all(product.startswith("NVIDIA-") for product in card.products)


def test_node_shapes_have_gpus_of_the_catalogue() -> None:
    assert all(shape.gpu in gpus() and shape.host_memory > 32 * GIB for shape in nodes().values())


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("wan2.2-t2v-a14b", "wan2.2-t2v-a14b"),
        ("WAN2.2-T2V-A14B", "wan2.2-t2v-a14b"),
        ("Wan-AI/Wan2.2-T2V-A14B-Diffusers", "wan2.2-t2v-a14b"),
        ("embedded", "embedded"),
    ],
)
def test_a_model_is_found_by_name_and_by_hub_id(value: str, name: str) -> None:
    assert find_model(value).name == name


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("rtx-3090", "rtx-3090"),
        ("RTX_3090", "rtx-3090"),
        ("3090", "rtx-3090"),
        ("NVIDIA-H200", "h200-141gb"),
        ("a100", "a100-80gb"),
    ],
)
def test_a_gpu_is_found_by_name_alias_and_kubernetes_label(value: str, name: str) -> None:
    assert find_gpu(value).name == name


@pytest.mark.parametrize(
    ("find", "value", "hint"),
    [
        (find_model, "wan2.2-t2v-14b", "Did you mean wan2.2-t2v-a14b?"),
        (find_gpu, "rtx-3091", "Did you mean rtx-3090?"),
        (find_node, "g5.12xlarg", "Did you mean g5.12xlarge?"),
    ],
)
def test_an_unknown_name_lists_the_known_ones_and_guesses(find: object, value: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find(value)  # type: ignore[operator]
    assert value in str(caught.value) and hint in str(caught.value) and "known are" in str(caught.value)


def test_the_embedded_entry_equals_its_folder() -> None:
    entry, folder = find_model("embedded"), model_from_folder(EMBEDDED)
    names = {"name": "", "title": "", "repositories": (), "source": {}}
    assert dataclasses.replace(entry, **names) == dataclasses.replace(folder, **names)  # type: ignore[arg-type]


def test_a_folder_s_blocks_have_the_bytes_that_its_headers_say_and_unknown_ones_without_weights(tmp_path: Path) -> None:
    architecture = find_model("embedded").architecture
    assert model_from_folder(EMBEDDED).block_bytes == 2 * architecture.block_parameters
    folder = Path(shutil.copytree(EMBEDDED, tmp_path / "teacher"))
    weights = folder / "transformer_2" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert model_from_folder(folder).block_bytes is None, "whoever loads it says that it was cut short"
    weights.unlink()
    assert model_from_folder(folder).block_bytes is None
    weights.with_name("diffusion_pytorch_model.safetensors.index.json").write_text(
        '{"weight_map": {"proj_out.bias": 1}}'
    )
    assert model_from_folder(folder).block_bytes is None, "whoever loads it says that its index names no file"


def test_a_local_folder_is_read_from_its_configs_alone(tmp_path: Path) -> None:
    for file in EMBEDDED.rglob("*.json"):
        copy = tmp_path / file.relative_to(EMBEDDED)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text())
    assert find_model(str(tmp_path)).parameters == find_model("embedded").parameters


def test_a_folder_without_its_second_expert_has_one_and_no_boundary(tmp_path: Path) -> None:
    for file in EMBEDDED.rglob("*.json"):
        copy = tmp_path / file.relative_to(EMBEDDED)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text())
    index = json.loads((tmp_path / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"transformer_2": [None, None]}))
    model = find_model(str(tmp_path))
    assert model.experts == 1 and model.boundary is None


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("model_index.json", '{"_class_name": "StableDiffusionPipeline"}', "StableDiffusionPipeline"),
        ("model_index.json", "no json", "is not JSON"),
        ("vae/config.json", None, "cannot be read"),
    ],
)
def test_a_folder_that_is_no_teacher_is_an_error_that_names_the_file(
    tmp_path: Path, file: str, content: str | None, text: str
) -> None:
    for source in EMBEDDED.rglob("*.json"):
        copy = tmp_path / source.relative_to(EMBEDDED)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(source.read_text())
    target = tmp_path / file
    if content is None:
        target.unlink()
    else:
        target.write_text(content)
    with pytest.raises(ConfigError, match=text):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("model", "size", "tokens"),
    [
        ("wan2.1-t2v-14b", (832, 480), 1560),
        ("wan2.1-t2v-14b", (1280, 720), 3600),
        ("wan2.2-ti2v-5b", (1280, 704), 880),
        ("embedded", (64, 64), 16),
    ],
)
def test_tokens_follow_from_the_vae_and_the_patches(model: str, size: tuple[int, int], tokens: int) -> None:
    assert find_model(model).tokens(*size) == tokens
    assert find_model("wan2.1-t2v-14b").tokens(832, 480, frames=81) == 32_760


def test_a_resolution_that_the_patches_cannot_divide_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"width must be a multiple of 16 .* take 832 or 848"):
        find_model("wan2.1-t2v-14b").tokens(840, 480)
