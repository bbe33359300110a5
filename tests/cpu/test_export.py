"""Exported students: stock diffusers loads and runs them without wandistill, and ComfyUI knows their names."""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from wandistill.errors import ConfigError, TrainingFailed
from wandistill.models import export as export_module
from wandistill.models.comfyui import original_name
from wandistill.models.export import clear_killed, export_comfyui, export_student, read_settings
from wandistill.models.sampling import sample_folder, to_pictures
from wandistill.models.student import Student, build_student
from wandistill.models.wan import WanFolder, open_teacher
from wandistill.student_config import student_spec
from wandistill.teacher.base import Expert

TinyWan = Callable[[str], Path]

# The table of diffusers' scripts/convert_wan_to_diffusers.py for text to video: original -> diffusers, in its order.
CONVERTER = {
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.modulation": "scale_shift_table",
    "head.head": "proj_out",
    "modulation": "scale_shift_table",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "norm2": "norm__placeholder",
    "norm3": "norm2",
    "norm__placeholder": "norm3",
    "self_attn.q": "attn1.to_q",
    "self_attn.k": "attn1.to_k",
    "self_attn.v": "attn1.to_v",
    "self_attn.o": "attn1.to_out.0",
    "self_attn.norm_q": "attn1.norm_q",
    "self_attn.norm_k": "attn1.norm_k",
    "cross_attn.q": "attn2.to_q",
    "cross_attn.k": "attn2.to_k",
    "cross_attn.v": "attn2.to_v",
    "cross_attn.o": "attn2.to_out.0",
    "cross_attn.norm_q": "attn2.norm_q",
    "cross_attn.norm_k": "attn2.norm_k",
}

# Puts a package in the way that fails, as if wandistill were not installed.
WITHOUT_WANDISTILL = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "wandistill":
            raise ModuleNotFoundError("wandistill is not here")
sys.meta_path.insert(0, Refuse())
"""


def student_of(folder: WanFolder, **config: object) -> Student:
    return build_student(folder, student_spec(config, folder.architecture), "average")


def export(student: Student, folder: WanFolder, destination: Path, **options: object) -> Path:
    defaults = {"resolution": (32, 32), "steps": 3, "shift": 2.5, "example_prompt": "a red circle"}
    export_student(student.transformer, folder, destination, **(defaults | options))
    return destination


def readme_call(folder: Path) -> str:
    """The Python block of an exported folder's README."""
    blocks = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    return blocks[0]


def test_the_readmes_call_runs_without_wandistill_and_draws_what_sample_draws(tiny_wan: TinyWan, tmp_path: Path):
    sizes = {"t2v-1.3b": 32, "t2v-a14b": 32, "ti2v-5b": 64}
    # One process for all layouts, since most of its time goes into imports.
    program = WITHOUT_WANDISTILL + "import os\nfrom diffusers import WanTransformer3DModel\n"
    for kind, size in sizes.items():
        teacher = open_teacher(str(tiny_wan(kind)))
        folder = export(student_of(teacher, blocks=[0, 2]), teacher, tmp_path / kind, resolution=(size, size))
        # Strictly: any missing, unexpected or mismatched tensor is an error.
        program += (
            f"os.chdir({str(folder)!r})\n{readme_call(folder)}"
            "_, info = WanTransformer3DModel.from_pretrained('transformer', output_loading_info=True)\n"
            "assert not any(info.values()), info\n"
        )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for kind, size in sizes.items():
        settings = read_settings(tmp_path / kind)
        assert settings is not None
        pixels = sample_folder(
            open_teacher(str(tmp_path / kind)),
            ["a red circle"],
            steps=settings.steps,
            resolution=(size, size),
            guidance=settings.guidance_scale,
        )
        drawn = Image.open(tmp_path / kind / "picture.png")
        np.testing.assert_array_equal(np.asarray(to_pictures(pixels)[0]), np.asarray(drawn))


def test_a_two_expert_teachers_student_has_one_expert_and_no_boundary(tiny_wan: TinyWan, tmp_path: Path):
    teacher = open_teacher(str(tiny_wan("t2v-a14b")))
    student = export(student_of(teacher), teacher, tmp_path / "student")
    index = json.loads((student / "model_index.json").read_text())
    assert index["boundary_ratio"] is None and index["transformer_2"] == [None, None]
    assert not (student / "transformer_2").exists()
    opened = open_teacher(str(student))
    assert opened.experts == (Expert.HIGH,) and opened.boundary is None and not opened.notes
    assert opened.flow_shift == 2.5


def test_a_timestep_per_token_is_kept(tiny_wan: TinyWan, tmp_path: Path):
    teacher = open_teacher(str(tiny_wan("ti2v-5b")))
    student = export(student_of(teacher), teacher, tmp_path / "student", resolution=(64, 64))
    assert open_teacher(str(student)).expand_timesteps


def test_whoever_may_read_the_other_files_may_read_the_weights(tiny_wan: TinyWan, tmp_path: Path):
    teacher = open_teacher(str(tiny_wan("t2v-1.3b")))
    student = student_of(teacher)
    folder, file = export(student, teacher, tmp_path / "student"), tmp_path / "student.safetensors"
    export_comfyui(student.state_dict(), teacher.architecture, file, dtype=torch.float32)
    usual = (folder / "transformer" / "config.json").stat().st_mode
    (weights,) = (folder / "transformer").glob("*.safetensors")
    assert weights.stat().st_mode == file.stat().st_mode == usual
    assert {path.name for path in (folder / "transformer").iterdir()} == {"config.json", weights.name}


def test_the_teachers_other_components_are_the_same_files(tiny_wan: TinyWan, tmp_path: Path):
    teacher = open_teacher(str(tiny_wan("t2v-a14b")))
    student = open_teacher(str(export(student_of(teacher), teacher, tmp_path / "student")))
    shared = ("vae", "text_encoder", "tokenizer")
    assert student.fingerprint(*shared) == teacher.fingerprint(*shared)


def test_large_files_are_linked_and_small_ones_copied(
    tiny_wan: TinyWan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    teacher = open_teacher(str(tiny_wan("t2v-a14b")))
    monkeypatch.setattr(export_module, "_LINK_FROM_BYTES", 50_000)
    student = export(student_of(teacher), teacher, tmp_path / "student")
    for name, linked in (("vae/diffusion_pytorch_model.safetensors", True), ("vae/config.json", False)):
        assert os.path.samefile(student / name, teacher.path / name) == linked


def test_a_file_system_without_links_gets_copies(tiny_wan: TinyWan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    teacher = open_teacher(str(tiny_wan("t2v-a14b")))
    monkeypatch.setattr(export_module, "_LINK_FROM_BYTES", 0)
    monkeypatch.setattr(os, "link", refuse)
    student = export(student_of(teacher), teacher, tmp_path / "student")
    assert open_teacher(str(student)).fingerprint("vae") == teacher.fingerprint("vae")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_wans_float32_parts_stay_float32_in_any_dtype(tiny_wan: TinyWan, tmp_path: Path, dtype: torch.dtype):
    teacher = open_teacher(str(tiny_wan("t2v-a14b")))
    source = student_of(teacher)
    student = export(source, teacher, tmp_path / "student", dtype=dtype)
    loaded = WanTransformer3DModel.from_pretrained(student / "transformer", torch_dtype=dtype).state_dict()
    stored = load_file(student / "transformer/diffusion_pytorch_model.safetensors")
    trained = source.transformer.state_dict()
    assert stored.keys() == trained.keys()
    for name, tensor in stored.items():
        assert tensor.dtype == loaded[name].dtype, name
        assert torch.equal(tensor, trained[name].to(tensor.dtype))
    float32 = sum(tensor.numel() for tensor in stored.values() if tensor.dtype == torch.float32)
    shape = teacher.architecture
    assert float32 == (shape.parameters if dtype == torch.float32 else shape.float32_parameters)
    assert f"torch.{str(dtype).removeprefix('torch.')}" in readme_call(student)


def test_weights_that_are_given_replace_the_modules(tiny_wan: TinyWan, tmp_path: Path):
    teacher = open_teacher(str(tiny_wan("t2v-a14b")))
    trained = student_of(teacher, num_layers=2)
    average = {name: tensor + 1 for name, tensor in trained.state_dict().items()}
    student = export(trained, teacher, tmp_path / "student", weights={**average, "projections.0.weight": torch.ones(1)})
    stored = load_file(student / "transformer/diffusion_pytorch_model.safetensors")
    assert all(torch.equal(tensor, average[f"transformer.{name}"]) for name, tensor in stored.items())


class TestReplacing:
    def test_a_student_that_is_there_is_replaced_and_nothing_is_left_beside(self, tiny_wan: TinyWan, tmp_path: Path):
        teacher = open_teacher(str(tiny_wan("t2v-a14b")))
        export(student_of(teacher), teacher, tmp_path / "student")
        (tmp_path / "student/stale.txt").touch()
        export(student_of(teacher, num_layers=1), teacher, tmp_path / "student")
        assert open_teacher(str(tmp_path / "student")).architecture.num_layers == 1
        assert [path.name for path in tmp_path.iterdir()] == ["student"]
        assert not (tmp_path / "student/stale.txt").exists()

    def test_a_full_disk_leaves_the_former_student_as_it_was(
        self, tiny_wan: TinyWan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        teacher = open_teacher(str(tiny_wan("t2v-a14b")))
        export(student_of(teacher), teacher, tmp_path / "student")
        before = open_teacher(str(tmp_path / "student")).fingerprint()
        monkeypatch.setattr(WanTransformer3DModel, "save_pretrained", full)
        with pytest.raises(TrainingFailed, match=r"student could not be written .*No space left on device"):
            export(student_of(teacher, num_layers=1), teacher, tmp_path / "student")
        assert open_teacher(str(tmp_path / "student")).fingerprint() == before
        assert [path.name for path in tmp_path.iterdir()] == ["student"]

    def test_what_killed_exports_left_is_cleared_away(self, tmp_path: Path):
        for name in ("student", ".student.12.partial", ".student.13.former", ".student.safetensors.14.partial"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "weights").write_text(name)

        clear_killed(tmp_path / "student")

        assert sorted(path.name for path in tmp_path.iterdir()) == [".student.safetensors.14.partial", "student"]
        assert (tmp_path / "student" / "weights").read_text() == "student"

    def test_a_student_that_a_killed_export_moved_aside_is_put_back(self, tmp_path: Path):
        (tmp_path / ".student.13.former").mkdir()
        (tmp_path / ".student.13.former" / "weights").write_text("former")

        clear_killed(tmp_path / "student")

        assert [path.name for path in tmp_path.iterdir()] == ["student"]
        assert (tmp_path / "student" / "weights").read_text() == "former"

    def test_a_failure_between_the_two_renames_puts_the_former_student_back(
        self, tiny_wan: TinyWan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        def fail(*_: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        teacher = open_teacher(str(tiny_wan("t2v-a14b")))
        export(student_of(teacher), teacher, tmp_path / "student")
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail)
            with pytest.raises(TrainingFailed):
                export(student_of(teacher, num_layers=1), teacher, tmp_path / "student")
        assert open_teacher(str(tmp_path / "student")).architecture.num_layers == 3
        assert [path.name for path in tmp_path.iterdir()] == ["student"]


def test_the_settings_say_how_to_call_the_student(tiny_wan: TinyWan, tmp_path: Path):
    teacher = open_teacher(str(tiny_wan("t2v-a14b")))
    student = export(student_of(teacher), teacher, tmp_path / "student", resolution=(64, 32), details={"step": 7})
    settings = read_settings(student)
    assert settings is not None
    assert (settings.steps, settings.width, settings.height, settings.flow_shift) == (3, 64, 32, 2.5)
    assert (settings.guidance_scale, settings.num_frames, settings.token_length) == (1.0, 1, teacher.token_length)
    record = json.loads((student / "wandistill.json").read_text())
    assert record["schema"] == 1 and record["details"] == {"step": 7}
    assert record["parameters"] == teacher.architecture.parameters


def test_a_prompt_with_quotes_does_not_break_the_readmes_call(tiny_wan: TinyWan, tmp_path: Path):
    teacher = open_teacher(str(tiny_wan("t2v-a14b")))
    prompt = 'a "red" circle \\ {curly} é'
    student = export(student_of(teacher), teacher, tmp_path / "student", example_prompt=prompt)
    texts = [node.value for node in ast.walk(ast.parse(readme_call(student))) if isinstance(node, ast.Constant)]
    assert prompt in texts


def test_a_teachers_folder_has_no_settings_and_damaged_ones_are_named(tiny_wan_copy: TinyWan):
    folder = tiny_wan_copy("t2v-1.3b")
    assert read_settings(folder) is None
    (folder / "wandistill.json").write_text('{"sampling": {"steps": 3}}')
    with pytest.raises(ConfigError, match=r"wandistill\.json is damaged"):
        read_settings(folder)


class TestComfyUI:
    def test_the_converter_of_diffusers_turns_every_name_back(self, tiny_wan: TinyWan):
        names = list(student_of(open_teacher(str(tiny_wan("t2v-a14b")))).transformer.state_dict())
        originals = [original_name(name) for name in names]
        assert len(set(originals)) == len(names)
        for name, original in zip(names, originals, strict=True):
            for old, new in CONVERTER.items():
                original = original.replace(old, new)
            assert original == name

    def test_comfyui_detects_the_students_shape(self, tiny_wan: TinyWan, tmp_path: Path):
        teacher = open_teacher(str(tiny_wan("t2v-a14b")))
        student = student_of(teacher, num_layers=2)
        file = tmp_path / "made/student.safetensors"
        export_comfyui(student.state_dict(), teacher.architecture, file, dtype=torch.bfloat16)
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        # As comfy/model_detection.py reads it: one known prefix, shapes, and the metadata over both.
        prefix = "model.diffusion_model."
        stored = {
            name.removeprefix(prefix): tensor for name, tensor in load_file(file).items() if name.startswith(prefix)
        }
        assert len(stored) == len(student.transformer.state_dict())
        found = {
            "dim": stored["head.modulation"].shape[-1],
            "out_dim": stored["head.head.weight"].shape[0] // 4,
            "in_dim": stored["patch_embedding.weight"].shape[1],
            "ffn_dim": stored["blocks.0.ffn.0.weight"].shape[0],
            "num_layers": len({name.split(".")[1] for name in stored if name.startswith("blocks.")}),
            **json.loads(metadata["config"])["transformer"],
        }
        shape = teacher.architecture
        assert found == {
            "dim": shape.hidden_size,
            "out_dim": shape.out_channels,
            "in_dim": shape.in_channels,
            "ffn_dim": shape.ffn_dim,
            "num_layers": 2,
            "num_heads": shape.num_attention_heads,
            "freq_dim": shape.freq_dim,
            "text_dim": shape.text_dim,
        }
        assert stored["blocks.1.cross_attn.norm_k.weight"].dtype == torch.bfloat16
        assert stored["blocks.1.norm3.weight"].dtype == torch.float32

    def test_a_tensor_of_another_model_is_refused(self):
        with pytest.raises(KeyError, match="image_embedder"):
            original_name("condition_embedder.image_embedder.norm1.weight")
