"""What `open_teacher` reads from each published layout, and what it never does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from wandistill.errors import ConfigError
from wandistill.models.wan import open_teacher
from wandistill.teacher.base import Expert

ONE, TWO = (Expert.HIGH,), (Expert.HIGH, Expert.LOW)


@pytest.mark.parametrize(
    ("kind", "experts", "boundary", "expand_timesteps", "flow_shift", "channels", "spatial_factor"),
    [
        ("t2v-1.3b", ONE, None, False, 3.0, 16, 8),
        ("t2v-14b", ONE, None, False, 3.0, 16, 8),
        ("t2v-a14b", TWO, 0.875, False, 3.0, 16, 8),
        ("ti2v-5b", ONE, None, True, 5.0, 48, 16),
    ],
)
def test_each_layout_is_read(tiny_wan, kind, experts, boundary, expand_timesteps, flow_shift, channels, spatial_factor):
    folder = open_teacher(str(tiny_wan(kind)))
    assert folder.experts == experts
    assert folder.boundary == boundary
    assert folder.expand_timesteps is expand_timesteps
    assert folder.flow_shift == flow_shift
    assert folder.latent_channels == channels == folder.architecture.in_channels
    assert (folder.spatial_factor, folder.temporal_factor) == (spatial_factor, 4)
    assert len(folder.latents_mean) == len(folder.latents_std) == channels
    assert folder.token_length == 512


def test_the_embedded_teacher_has_two_experts_and_its_own_token_length():
    folder = open_teacher("embedded")
    assert folder.name == "embedded"
    assert folder.experts == TWO
    assert folder.boundary == 0.875
    assert folder.token_length == 16


def test_a_boundary_ratio_without_a_second_expert_is_ignored_with_a_note(tiny_wan):
    folder = open_teacher(str(tiny_wan("t2v-14b")))
    assert folder.expert_for(0.1) is Expert.HIGH
    (note,) = folder.notes
    assert "boundary_ratio 0.875" in note and "ignored" in note
    assert open_teacher(str(tiny_wan("t2v-1.3b"))).notes == []


def test_a_transformer_2_that_is_not_listed_is_ignored_with_a_note(tiny_wan_copy):
    path = tiny_wan_copy("t2v-a14b")
    index = json.loads((path / "model_index.json").read_text())
    (path / "model_index.json").write_text(json.dumps({**index, "transformer_2": [None, None], "boundary_ratio": None}))
    folder = open_teacher(str(path))
    assert folder.experts == ONE
    assert [str(path / "transformer_2") in note for note in folder.notes] == [True]


@pytest.mark.parametrize(
    ("t", "expert"),
    [(1.0, Expert.HIGH), (0.875, Expert.HIGH), (0.8749999, Expert.LOW), (0.5, Expert.LOW), (0.0, Expert.LOW)],
)
def test_the_boundary_itself_belongs_to_the_high_noise_expert(tiny_wan, t, expert):
    assert open_teacher(str(tiny_wan("t2v-a14b"))).expert_for(t) is expert


@pytest.mark.parametrize(
    ("kind", "size", "shape"),
    [
        ("t2v-14b", (832, 480, 1), (16, 1, 60, 104)),
        ("t2v-14b", (832, 480, 81), (16, 21, 60, 104)),
        ("ti2v-5b", (1280, 704, 1), (48, 1, 44, 80)),
        ("ti2v-5b", (64, 32, 5), (48, 2, 2, 4)),
    ],
)
def test_the_latent_shape_follows_the_vae(tiny_wan, kind, size, shape):
    assert open_teacher(str(tiny_wan(kind))).latent_shape(*size) == shape


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("t2v-14b", (840, 480, 1), "840x480.* its width must be a multiple of 16 .* Take 832 or 848"),
        ("ti2v-5b", (1280, 720, 1), "its height must be a multiple of 32 .* Take 704 or 736"),
        ("t2v-14b", (8, 480, 1), "width must be .* Take 16"),
        ("t2v-14b", (-16, 480, 1), "width must be .* Take 16"),
        ("t2v-14b", (832, 480, 4), "4 frames do not fit .* such as 5"),
        ("t2v-14b", (832, 480, 0), "0 frames do not fit"),
    ],
)
def test_a_size_that_vae_and_patches_cannot_divide_is_an_error(tiny_wan, kind, size, message):
    with pytest.raises(ConfigError, match=message):
        open_teacher(str(tiny_wan(kind))).latent_shape(*size)


def test_opening_a_folder_imports_neither_diffusers_nor_transformers(tiny_wan):
    code = (
        "import sys; from wandistill.models.wan import open_teacher; open_teacher(sys.argv[1]).fingerprint();"
        "print([name for name in ('diffusers', 'transformers', 'accelerate') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tiny_wan("t2v-a14b"))], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


class TestFingerprint:
    def test_it_is_the_same_for_a_copy_under_another_name(self, tiny_wan, tiny_wan_copy):
        original, copy = open_teacher(str(tiny_wan("t2v-a14b"))), open_teacher(str(tiny_wan_copy("t2v-a14b")))
        assert original.fingerprint() == copy.fingerprint()
        assert original.fingerprint("text_encoder") == copy.fingerprint("text_encoder")

    def test_it_does_not_depend_on_the_shards(self, tiny_wan, tmp_path):
        from safetensors.torch import load_file, save_file

        folder = open_teacher(str(tiny_wan("t2v-14b")))
        single = tmp_path / "single"
        single.mkdir()
        shards = [load_file(file) for file in sorted((folder.path / "transformer").glob("*.safetensors"))]
        save_file(
            {name: tensor for shard in shards for name, tensor in shard.items()},
            single / "diffusion_pytorch_model.safetensors",
        )
        merged = tmp_path / "merged"
        merged.mkdir()
        for part in folder.path.iterdir():
            if part.name != "transformer":
                (merged / part.name).symlink_to(part)
        (merged / "transformer").symlink_to(single)
        (single / "config.json").write_bytes((folder.path / "transformer" / "config.json").read_bytes())
        assert open_teacher(str(merged)).fingerprint("transformer") == folder.fingerprint("transformer")

    @pytest.mark.parametrize("component", ["transformer", "transformer_2", "text_encoder", "vae"])
    def test_it_changes_with_a_byte_of_a_components_weights(self, tiny_wan_copy, component):
        path = tiny_wan_copy("t2v-a14b")
        before = {name: open_teacher(str(path)).fingerprint(name) for name in (component, "scheduler", "tokenizer")}
        file = sorted((path / component).glob("*.safetensors"))[0]
        damaged = bytearray(file.read_bytes())
        damaged[-1] ^= 1
        file.write_bytes(damaged)
        after = {name: open_teacher(str(path)).fingerprint(name) for name in before}
        assert [name for name in before if before[name] != after[name]] == [component]

    @pytest.mark.parametrize(
        ("file", "component", "changes"),
        [
            ("transformer/config.json", "transformer", {"eps": 1e-5}),
            ("scheduler/scheduler_config.json", "scheduler", {"flow_shift": 12.0}),
            ("tokenizer/tokenizer_config.json", "tokenizer", {"model_max_length": 256}),
        ],
    )
    def test_it_changes_with_a_config(self, tiny_wan_copy, file, component, changes):
        path = tiny_wan_copy("t2v-1.3b")
        before = open_teacher(str(path)).fingerprint(component)
        _update(path / file, changes)
        assert open_teacher(str(path)).fingerprint(component) != before

    def test_it_does_not_change_with_the_library_that_wrote_the_config(self, tiny_wan_copy):
        path = tiny_wan_copy("t2v-1.3b")
        before = open_teacher(str(path)).fingerprint()
        _update(path / "transformer" / "config.json", {"_diffusers_version": "9.9", "_name_or_path": "elsewhere"})
        _update(path / "text_encoder" / "config.json", {"transformers_version": "9.9"})
        assert open_teacher(str(path)).fingerprint() == before

    def test_it_reads_a_small_part_of_large_tensors(self, tmp_path):
        from wandistill.models.wan_weights import StoredTensor, sampled_content

        file = tmp_path / "large"
        file.write_bytes(bytes(2_000_000))
        tensors = {"weight": StoredTensor(file, "U8", (2_000_000,), 0, 2_000_000)}
        assert sum(len(chunk) for chunk in sampled_content(tensors)) < 20_000
        before = list(sampled_content(tensors))
        with file.open("r+b") as handle:
            handle.seek(1_999_999)
            handle.write(b"1")
        assert list(sampled_content(tensors)) != before


def _update(file: Path, changes: dict) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
