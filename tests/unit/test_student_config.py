"""The student configs: names, own keys, Wan-Lite's keys, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from wandistill.architecture import WanArchitecture
from wandistill.errors import ConfigError
from wandistill.student_config import NAMES, student_spec
from wandistill.student_keys import KNOWN_KEYS, spaced_blocks

WAN_14B = WanArchitecture()
WAN_1_3B = WanArchitecture(num_layers=30, num_attention_heads=12, ffn_dim=8960)
WAN_5B = WanArchitecture(num_layers=30, num_attention_heads=24, ffn_dim=14336, in_channels=48, out_channels=48)
EMBEDDED = WanArchitecture(8, 6, 32, 768, text_dim=128, freq_dim=128)
CATALOGUE = {"14B": WAN_14B, "1.3B": WAN_1_3B, "5B": WAN_5B, "embedded": EMBEDDED}

# config/student_config.json of the seed project, as it is.
SEED_CONFIG = {
    "model_type": "WanLiteStudent",
    "hidden_size": 1024,
    "depth": 16,
    "num_heads": 16,
    "num_channels": 4,
    "image_size": 1024,
    "patch_size": 16,
    "text_max_length": 77,
    "text_encoder_output_dim": 4096,
    "projection_factor": 1.0,
}


@pytest.mark.parametrize(
    ("name", "model", "layers", "heads", "parameters"),
    [
        ("half", "14B", 20, 40, 7_260_605_504),
        ("half", "5B", 15, 24, 2_544_937_152),
        ("half", "1.3B", 15, 12, 722_386_240),
        ("half", "embedded", 4, 6, 2_749_696),
        ("quarter", "14B", 10, 40, 3_746_662_464),
        ("quarter", "5B", 7, 24, 1_235_683_520),
        ("quarter", "1.3B", 7, 12, 350_860_608),
        ("quarter", "embedded", 2, 6, 1_560_448),
    ],
)
def test_half_and_quarter_keep_that_share_of_the_blocks_at_full_width(name, model, layers, heads, parameters):
    architecture = student_spec(name, CATALOGUE[model]).architecture
    assert (architecture.num_layers, architecture.num_attention_heads) == (layers, heads)
    assert architecture.ffn_dim == CATALOGUE[model].ffn_dim
    assert architecture.parameters == parameters


@pytest.mark.parametrize("model", ["14B", "5B", "1.3B"])
def test_1b_is_a_billion_parameters_within_two_percent(model):
    spec = student_spec("1b", CATALOGUE[model])
    assert spec.architecture.parameters == pytest.approx(1e9, rel=0.02)
    assert spec.architecture.attention_head_dim == CATALOGUE[model].attention_head_dim


def test_1b_keeps_the_full_width_where_most_blocks_remain():
    assert not student_spec("1b", WAN_1_3B).narrower_than(WAN_1_3B)


def test_1b_shrinks_depth_and_width_alike_where_the_teacher_is_much_larger():
    own = student_spec("1b", WAN_14B).architecture
    assert own.num_layers / 40 == pytest.approx(own.num_attention_heads / 40, abs=0.05)


def test_1b_of_a_smaller_teacher_is_refused_with_the_names_that_fit():
    with pytest.raises(ConfigError, match=r"5\.1 M; choose half \(2\.7 M\), quarter \(1\.6 M\)"):
        student_spec("1b", EMBEDDED)


@pytest.mark.parametrize(
    ("count", "available", "blocks"),
    [(4, 8, (0, 2, 5, 7)), (2, 8, (0, 7)), (8, 8, tuple(range(8))), (1, 8, (0,)), (3, 40, (0, 20, 39))],
)
def test_blocks_are_evenly_spaced_with_both_ends(count, available, blocks):
    assert spaced_blocks(count, available) == blocks


@pytest.mark.parametrize("available", [2, 7, 30, 40])
def test_every_spacing_takes_each_block_at_most_once(available):
    for count in range(1, available + 1):
        blocks = spaced_blocks(count, available)
        assert len(set(blocks)) == count and set(blocks) <= set(range(available))


def test_blocks_of_a_config_are_taken_as_they_are():
    spec = student_spec({"blocks": [0, 2, 4, 6]}, EMBEDDED)
    assert spec.blocks == (0, 2, 4, 6)
    assert spec.architecture.num_layers == 4


def test_an_empty_config_is_a_student_as_large_as_the_teacher():
    assert student_spec({}, EMBEDDED).architecture == EMBEDDED


@pytest.mark.parametrize(
    ("config", "heads", "ffn"),
    [
        ({"num_attention_heads": 3}, 3, 384),
        ({"num_attention_heads": 5}, 5, 640),
        ({"ffn_dim": 100}, 6, 100),
        ({"num_attention_heads": 3, "ffn_dim": 768}, 3, 768),
        ({"hidden_size": 96}, 3, 384),
        ({"hidden_dim": 96}, 3, 384),
        ({"num_heads": 3}, 3, 384),
        ({"hidden_size": 96, "num_heads": 3}, 3, 384),
        ({"hidden_size": 96, "mlp_ratio": 2}, 3, 192),
        ({"hidden_size": 96, "mlp_ratio": 2.0, "ffn_dim": 192}, 3, 192),
    ],
)
def test_width_follows_from_heads_or_hidden_size(config, heads, ffn):
    spec = student_spec(config, EMBEDDED)
    assert (spec.heads, spec.architecture.ffn_dim) == (heads, ffn)
    assert not spec.notes


def test_the_seed_projects_own_config_is_a_student_of_the_14b():
    spec = student_spec(SEED_CONFIG, WAN_14B)
    assert (spec.architecture.num_layers, spec.architecture.hidden_size) == (16, 1024)
    assert spec.image_size == 1024
    notes = " ".join(spec.notes)
    for untaken in ("num_heads 16", "num_channels 4", "patch_size 16", "text_max_length 77"):
        assert untaken in notes
    assert "4096" not in notes.split(":")[1].split("not taken")[0]  # what agrees with the teacher is not remarked on


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_layer": 4}, r"'num_layer' is not a key; known are name, num_layers, .*Did you mean 'num_layers'\?"),
        ({"num_layers": 9}, r"num_layers 9 is more than the teacher's 8 blocks"),
        ({"num_layers": 0}, r"num_layers 0 must be a whole number of at least 1"),
        ({"num_layers": "four"}, r"num_layers 'four' must be a whole number"),
        ({"num_layers": True}, r"num_layers True must be a whole number"),
        ({"num_layers": 4, "depth": 5}, r"num_layers 4 and depth 5 .*contradict"),
        ({"num_layers": 3, "blocks": [0, 1]}, r"num_layers 3 contradicts blocks \[0, 1\]"),
        ({"blocks": [0, 8]}, r"blocks \[0, 8\]: the teacher's 8 blocks are 0 to 7"),
        ({"blocks": [-1, 3]}, r"the teacher's 8 blocks are 0 to 7"),
        ({"blocks": [0, 2, 2]}, r"blocks \[0, 2, 2\] must increase"),
        ({"blocks": [4, 2]}, r"blocks \[4, 2\] must increase"),
        ({"blocks": []}, r"must be a list of block indices"),
        ({"blocks": "0,2"}, r"must be a list of block indices"),
        ({"blocks": [0.5]}, r"must be a list of block indices"),
        ({"num_attention_heads": 7}, r"7 heads \(hidden size 224\) are more than the teacher's 6 \(hidden size 192\)"),
        ({"hidden_size": 256}, r"8 heads \(hidden size 256\) are more than"),
        ({"hidden_size": 100}, r"hidden_size 100 is not a whole number of heads of 32 .*nearest is 96"),
        ({"hidden_size": 96, "num_attention_heads": 4}, r"hidden_size 96 contradicts num_attention_heads 4"),
        ({"num_heads": 2, "num_attention_heads": 4}, r"num_attention_heads 4 and num_heads 2 .*contradict"),
        ({"attention_head_dim": 64}, r"attention_head_dim 64 differs from the teacher's 32"),
        ({"ffn_dim": 769}, r"ffn_dim 769 is more than the teacher's 768"),
        ({"mlp_ratio": 5}, r"ffn_dim 960 is more than the teacher's 768"),
        ({"mlp_ratio": 2, "ffn_dim": 100}, r"mlp_ratio 2 .*contradicts ffn_dim 100"),
        ({"mlp_ratio": 0}, r"mlp_ratio 0 must be a number above 0"),
        ({"text_dim": 4096}, r"text_dim 4096 differs from the teacher's 128"),
        ({"patch_size": [1, 4, 4]}, r"patch_size \[1, 4, 4\] differs from the teacher's \[1, 2, 2\]"),
        ({"init": "best"}, r"init 'best' is not one of low, average, high, auto, random"),
    ],
)
def test_a_student_that_cannot_be_cut_from_the_teacher_is_refused(config, message):
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)):
        student_spec(config, EMBEDDED)


def test_an_unknown_keys_error_lists_all_known_ones():
    with pytest.raises(ConfigError) as error:
        student_spec({"colour": 1}, EMBEDDED)
    assert all(key in str(error.value) for key in KNOWN_KEYS)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("s.json", json.dumps({"blocks": [0, 2, 4, 6], "init": "average", "name": "even"})),
        ("s.yaml", "blocks: [0, 2, 4, 6]\ninit: average\nname: even\n"),
    ],
)
def test_a_config_is_read_from_json_and_yaml(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text)
    spec = student_spec(str(tmp_path / name), EMBEDDED)
    assert (spec.name, spec.blocks, spec.init) == ("even", (0, 2, 4, 6), "average")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is neither a file nor one of the names half, quarter, 1b"),
        (b"{", "cannot be read as JSON or YAML"),
        (b"\xff\xfe\x00", "cannot be read as JSON or YAML"),
        (b"[1, 2]", "holds a list"),
    ],
)
def test_a_file_that_is_no_config_is_refused_by_name(tmp_path: Path, content: bytes | None, message: str):
    file = tmp_path / "student.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        student_spec(str(file), EMBEDDED)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("model", CATALOGUE)
@pytest.mark.parametrize("value", [*NAMES, {"num_layers": 3, "ffn_dim": 700, "init": "high", "image_size": 64}])
def test_a_spec_written_as_a_config_gives_the_same_student(value: Any, model: str):
    if value == "1b" and model == "embedded":
        pytest.skip("the embedded teacher has fewer parameters")
    spec = student_spec(value, CATALOGUE[model])
    again = student_spec(spec.to_config(), CATALOGUE[model])
    assert again == spec
