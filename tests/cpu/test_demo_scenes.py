"""The drawn scenes and their judge."""

import pytest
import torch

from wandistill.demo.captions import heldout_prompts, parse_caption, scene_number, teacher_holds_out
from wandistill.demo.judge import load_judge, save_judge, score, verdicts
from wandistill.demo.scenes import IMAGE_SIZE, draw, sample_numbers, scene_numbers


def drawn(captions: list[str], frames: int = 1, seed: int = 0) -> torch.Tensor:
    return draw(scene_numbers(captions), torch.Generator().manual_seed(seed), frames)


def test_scenes_are_drawn_as_videos_between_minus_one_and_one():
    video = drawn(heldout_prompts(3), frames=5)
    assert video.shape == (3, 3, 5, IMAGE_SIZE, IMAGE_SIZE)
    assert video.min() >= -1 and video.max() <= 1
    assert (video[:, :, 0] != video[:, :, -1]).any(), "objects drift"


def test_the_same_generator_draws_the_same_scenes():
    captions = heldout_prompts(4)
    assert torch.equal(drawn(captions), drawn(captions))
    assert not torch.equal(drawn(captions), drawn(captions, seed=1))


@pytest.mark.parametrize(
    ("relation", "axis", "before"),
    [("left of", 1, True), ("right of", 1, False), ("above", 0, True), ("below", 0, False)],
)
def test_the_first_object_lies_where_the_caption_says(relation: str, axis: int, before: bool):
    caption = f"a large red circle {relation} a large blue square on a black background"
    for image in drawn([caption] * 8)[:, :, 0]:
        red, blue = image[0] > 0.5, image[2] > 0.5
        first, second = red.nonzero().float().mean(0)[axis], blue.nonzero().float().mean(0)[axis]
        assert (first < second) == before


def test_training_scenes_are_never_held_out_ones():
    generator = torch.Generator().manual_seed(0)
    assert not any(teacher_holds_out(n) for n in sample_numbers(4_000, generator).tolist())
    tested = sample_numbers(4_000, generator, held_out=True).tolist()
    assert 0.55 < sum(map(teacher_holds_out, tested)) / len(tested) < 0.65


@pytest.mark.parametrize("time", [0.0, 4.0])
def test_the_judge_is_right_on_drawn_held_out_scenes(time: float):
    captions = heldout_prompts(300)
    times = torch.full((300, 1), time)
    images = draw(scene_numbers(captions), torch.Generator().manual_seed(0), times=times)[:, :, 0]
    assert score(images, captions)["right"] >= 0.99


def test_the_judge_fails_on_wrong_captions():
    captions = heldout_prompts(128)
    shares = score(drawn(captions)[:, :, 0], captions[1:] + captions[:1])
    assert shares["right"] <= 0.02
    assert shares["objects"] <= 0.1


@pytest.mark.parametrize(
    ("question", "wrong"),
    [
        ("objects", "a large red circle left of a small green square on a gray background"),
        ("objects", "a large red circle on a gray background"),
        ("relation", "a large red circle right of a small blue square on a gray background"),
        ("relation", "a small blue square left of a large red circle on a gray background"),
        ("background", "a large red circle left of a small blue square on a white background"),
        ("size", "a small red circle left of a small blue square on a gray background"),
    ],
)
def test_the_judge_says_what_is_wrong(question: str, wrong: str):
    image = drawn(["a large red circle left of a small blue square on a gray background"])[:, :, 0]
    assert score(image, [wrong])[question] == 0
    # Sizes are a side question.
    assert score(image, [wrong])["right"] == (question == "size")


def test_noise_and_empty_backgrounds_are_never_right():
    captions = heldout_prompts(64)
    noise = torch.rand(64, 3, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(0)) * 2 - 1
    assert score(noise, captions)["right"] == 0
    assert score(torch.zeros(64, 3, IMAGE_SIZE, IMAGE_SIZE), captions)["right"] == 0


def test_the_judge_gives_a_verdict_per_picture():
    captions = heldout_prompts(4)
    found = verdicts(drawn(captions)[:, :, 0], captions)
    assert set(found) == {"right", "objects", "relation", "background", "size"}
    assert found["right"].shape == (4,) and found["right"].dtype == torch.bool


def test_the_judge_refuses_captions_that_are_no_scene_and_pictures_of_another_size():
    image = torch.zeros(1, 3, IMAGE_SIZE, IMAGE_SIZE)
    with pytest.raises(ValueError, match="'a cat on a mat'"):
        score(image, ["a cat on a mat"])
    with pytest.raises(ValueError, match="one picture per caption"):
        score(image, heldout_prompts(2))
    with pytest.raises(ValueError, match="one picture per caption"):
        score(torch.zeros(1, 3, 32, 32), heldout_prompts(1))


def test_a_saved_judge_comes_back_equal(tmp_path):
    save_judge(load_judge(), tmp_path / "judge.safetensors")
    again = load_judge(path=tmp_path / "judge.safetensors").state_dict()
    assert all(torch.equal(value, again[key]) for key, value in load_judge().state_dict().items())


def test_numbers_stand_for_their_captions():
    captions = heldout_prompts(5)
    assert scene_numbers(captions).tolist() == [scene_number(c) for c in captions]
    assert all(parse_caption(c).caption == c for c in captions)
