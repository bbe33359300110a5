"""The captions of the embedded teacher's scenes, and what is shipped beside them."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from wandistill.demo import embedded_teacher_path, judge_path
from wandistill.demo.captions import (
    SCENE_COUNT,
    SINGLE_COUNT,
    Scene,
    SceneObject,
    all_scenes,
    heldout_prompts,
    parse_caption,
    scene_number,
    teacher_holds_out,
    training_prompts,
)
from wandistill.demo.model_card import model_card


def is_pair(caption: str) -> bool:
    return scene_number(caption) >= SINGLE_COUNT


def test_a_caption_and_its_scene_turn_into_each_other():
    scene = Scene(SceneObject("large", "red", "circle"), "gray", "left of", SceneObject("small", "blue", "square"))
    caption = "a large red circle left of a small blue square on a gray background"
    assert scene.caption == caption
    assert parse_caption(caption) == scene
    assert parse_caption("  A large RED circle left of a small blue square  on a gray background ") == scene


def test_every_scene_has_its_own_caption():
    scenes = all_scenes()
    assert len({scene.caption for scene in scenes}) == len(scenes) == SCENE_COUNT == 18_270
    assert [scene_number(scene.caption) for scene in scenes[::97]] == list(range(0, SCENE_COUNT, 97))


@pytest.mark.parametrize(
    "caption",
    [
        "a dog",
        "",
        "a red circle on a gray background",
        "a small red circle above a large red square on a white background",
        "a small red circle above a large blue square",
    ],
)
def test_a_caption_that_is_no_scene_is_an_error_that_names_it(caption: str):
    with pytest.raises(ValueError, match="is no caption of the embedded teacher's scenes") as error:
        parse_caption(caption)
    assert repr(caption) in str(error.value)


def test_the_teacher_holds_out_1131_pairs_and_no_single_object():
    held = [n for n in range(SCENE_COUNT) if teacher_holds_out(n)]
    assert len(held) == 1_131
    assert min(held) >= SINGLE_COUNT
    # The shipped weights were trained with this very split.
    assert held[:6] == [n for n in range(SINGLE_COUNT, SCENE_COUNT) if (n * 2654435761 % 2**32 >> 16) % 16 == 0][:6]


def test_held_out_captions_never_occur_in_training_prompts():
    everything_trained_on = {*training_prompts(30_000), *training_prompts(1_000, seed=1)}
    everything_held_out = {*heldout_prompts(2_000), *heldout_prompts(1_000, seed=1)}
    assert not everything_trained_on & everything_held_out
    assert len(everything_trained_on | everything_held_out) == SCENE_COUNT
    assert not any(teacher_holds_out(scene_number(caption)) for caption in everything_trained_on)


@pytest.mark.parametrize("prompts", [training_prompts, heldout_prompts])
def test_prompts_are_60_percent_pairs_and_come_again_only_when_all_had_their_turn(prompts):
    drawn = prompts(1_000)
    assert sum(map(is_pair, drawn)) == 600
    counts = Counter(drawn)
    assert max(count for caption, count in counts.items() if is_pair(caption)) == 1
    of_singles = [count for caption, count in counts.items() if not is_pair(caption)]
    assert max(of_singles) - min(of_singles) <= 1
    assert prompts(0) == [] and len(prompts(1)) == 1


def test_prompts_depend_on_the_seed_alone():
    assert training_prompts(50, seed=3) == training_prompts(50, seed=3) != training_prompts(50, seed=4)
    assert heldout_prompts(50) == heldout_prompts(50, seed=0)


def test_the_captions_need_no_torch():
    code = "import sys; sys.modules['torch'] = None; import wandistill.demo.captions, wandistill.demo.model_card"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_the_shipped_weights_are_small():
    weights = list(embedded_teacher_path().rglob("*.safetensors"))
    assert len(weights) == 4
    assert sum(file.stat().st_size for file in weights) <= 32e6
    assert judge_path().stat().st_size <= 3e6


def test_the_shipped_model_card_gives_the_figures_of_the_run_that_made_the_weights():
    record = json.loads((embedded_teacher_path() / "training.json").read_text())
    assert (embedded_teacher_path() / "README.md").read_text() == model_card(record)
    assert record["tiny"] is False
    assert record["weight_bytes"] == sum(f.stat().st_size for f in embedded_teacher_path().rglob("*.safetensors"))
