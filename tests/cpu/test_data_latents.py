"""Rollouts depend on seed, prompt and number alone, follow the teacher's experts, and are never another teacher's."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from data_helpers import CountingTeacher, draw_rollouts, run_threads, settings, world
from torch import Tensor

from wandistill.data import latents as module
from wandistill.data.building import rounds
from wandistill.data.latents import CachedTargets, LatentCache, RolloutKeys, rollout_noise, rollout_work
from wandistill.errors import TrainingFailed
from wandistill.models.sampling import flow_times
from wandistill.models.wan import WanFolder, open_teacher
from wandistill.teacher.base import Expert, TeacherOutput
from wandistill.train.distributed import World

PROMPTS = ["a red circle", "a cat", "blue", "a square on a gray background", "a blue square"]


@pytest.fixture
def folder(tiny_wan: Callable[[str], Path]) -> WanFolder:
    return open_teacher(str(tiny_wan("t2v-a14b")))


def draw(
    folder: WanFolder, cache_dir: Path, prompts: Sequence[str] = PROMPTS, teacher: Any = None, **changes: Any
) -> LatentCache:
    return draw_rollouts(
        world(), folder, CountingTeacher() if teacher is None else teacher, prompts, settings(**changes), cache_dir
    )


def test_a_rollout_is_the_teachers_own_drawing(folder: WanFolder, tmp_path: Path) -> None:
    """The same tensors as Euler's method with CFG, written out."""
    from wandistill.models.wan_text import encode_prompts
    from wandistill.teacher.resident import ResidentTeacher

    models = {expert: folder.load_transformer(expert, torch.float32, "cpu") for expert in folder.experts}
    teacher = ResidentTeacher(models, torch.device("cpu"))
    drawn = draw(folder, tmp_path, PROMPTS[:2], teacher).batch([1])
    tokenizer, encoder = folder.load_tokenizer(), folder.load_text_encoder(torch.float32, "cpu")
    prompts, _ = encode_prompts(folder, tokenizer, encoder, [PROMPTS[1], ""])
    x = rollout_noise(5, PROMPTS[1], 0, folder.latent_shape(32, 32)).unsqueeze(0)
    experts = set()
    with torch.no_grad():
        for t, after in pairwise(flow_times(4, 3.0)):
            expert, guidance = (Expert.HIGH, 4.0) if t >= 0.875 else (Expert.LOW, 3.0)
            experts.add(expert)
            time = torch.full((2,), 1000 * t)
            conditional, free = models[expert](torch.cat([x, x]), time, prompts, return_dict=False)[0].split(1)
            x = x + (after - t) * (free + guidance * (conditional - free))
    assert experts == set(folder.experts), "both experts take part"
    torch.testing.assert_close(drawn, x, rtol=1e-4, atol=1e-5)


def test_guidance_and_expert_follow_the_boundary(folder: WanFolder, tmp_path: Path) -> None:
    teacher = CountingTeacher()
    draw(folder, tmp_path, teacher=teacher, steps=10)
    assert len(teacher.requests) == 10
    for t, expert, guidance, batch in teacher.requests:
        assert (expert, guidance) == ((Expert.HIGH, 4.0) if t >= 0.875 else (Expert.LOW, 3.0))
        assert batch == len(PROMPTS)
    assert [t for t, *_ in teacher.requests] == pytest.approx(flow_times(10, 3.0)[:-1])


def test_noise_is_a_function_of_seed_prompt_and_number() -> None:
    shape = (16, 1, 4, 4)
    noise = rollout_noise(0, "a cat", 0, shape)
    assert torch.equal(noise, rollout_noise(0, "a cat", 0, shape))
    for other in [(1, "a cat", 0), (0, "a dog", 0), (0, "a cat", 1)]:
        assert not torch.equal(noise, rollout_noise(*other, shape))
    many = torch.stack([rollout_noise(0, str(index), 0, shape) for index in range(200)])
    assert abs(many.mean()) < 0.01
    assert abs(many.std() - 1) < 0.01


def test_a_prompts_rollout_does_not_depend_on_its_place_or_company(folder: WanFolder, tmp_path: Path) -> None:
    first = draw(folder, tmp_path / "a").batch(range(5))
    backwards = draw(folder, tmp_path / "b", PROMPTS[::-1]).batch(range(5)).flip(0)
    alone = draw(folder, tmp_path / "c", [PROMPTS[2]]).batch([0])
    torch.testing.assert_close(first, backwards, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first[2:3], alone, rtol=1e-5, atol=1e-6)


def test_a_repeated_prompt_gets_another_rollout(folder: WanFolder, tmp_path: Path) -> None:
    keys = RolloutKeys(["a", "b", "a"], 2)
    assert list(keys) == ["0\na", "1\na", "0\nb", "1\nb", "2\na", "3\na"]
    assert keys[2:4] == ["0\nb", "1\nb"]
    cache = draw(folder, tmp_path, ["a cat", "a cat"])
    first, second = cache.batch([0, 1])
    assert not torch.allclose(first, second)


def test_more_prompts_or_rollouts_extend_the_cache(folder: WanFolder, tmp_path: Path) -> None:
    first = draw(folder, tmp_path).batch(range(5))
    teacher = CountingTeacher()
    more = draw(folder, tmp_path, [*PROMPTS, "a new one"], teacher)
    assert torch.equal(more.batch(range(5)), first)
    assert len(teacher.requests) == 4, "one batch of the missing one"
    twice = draw(folder, tmp_path, rollouts=2)
    assert len(twice) == 10
    assert torch.equal(twice.batch(range(0, 10, 2)), first)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 5},
        {"shift": 5.0},
        {"guidance": 5.0},
        {"guidance_low": 1.0},
        {"seed": 6},
        {"resolution": (32, 48)},
        {"teacher_dtype": "bfloat16"},
        {"negative_prompt": "ugly"},
        {"keep_states": True},
    ],
    ids=str,
)
def test_rollouts_of_other_settings_are_not_reused(folder: WanFolder, tmp_path: Path, changes: dict[str, Any]) -> None:
    def missing(chosen: Any) -> int:
        work = rollout_work(folder, PROMPTS, chosen, INGREDIENTS, tmp_path)
        return len(work.store.missing(work.keys)[0])

    from wandistill.data.embeddings import embedding_ingredients

    INGREDIENTS = embedding_ingredients(folder, torch.float32)
    draw(folder, tmp_path)
    assert missing(settings()) == 0
    assert missing(settings(**changes)) == len(PROMPTS)


def test_rollouts_of_another_teacher_are_not_reused(
    folder: WanFolder, tiny_wan_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    draw(folder, tmp_path)
    from safetensors.torch import load_file, save_file

    copy = tiny_wan_copy("t2v-a14b")
    shard = sorted((copy / "transformer_2").glob("*.safetensors"))[0]
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard, metadata={"format": "pt"})
    teacher = CountingTeacher()
    draw(open_teacher(str(copy)), tmp_path, teacher=teacher)
    assert teacher.requests


def test_the_low_guidance_of_a_teacher_with_one_expert_is_no_ingredient(
    tiny_wan: Callable[[str], Path], tmp_path: Path
) -> None:
    single = open_teacher(str(tiny_wan("t2v-1.3b")))
    folders = {rollout_work(single, PROMPTS, settings(guidance_low=g), {}, tmp_path).store.folder for g in (1.0, 2.0)}
    assert len(folders) == 1


def test_kept_states_are_those_of_the_rollout(folder: WanFolder, tmp_path: Path) -> None:
    cache = draw(folder, tmp_path, keep_states=True)
    assert isinstance(cache, CachedTargets)
    times = [*flow_times(4, 3.0)[:-1], 0.0]
    items = list(range(5))
    x, t, _ = cache.states(items, [0] * 5)
    assert torch.equal(x, torch.stack([rollout_noise(5, prompt, 0, x.shape[1:]) for prompt in PROMPTS]))
    assert t.tolist() == pytest.approx([1.0] * 5)
    for step in range(4):
        x, t, v = cache.states(items, [step + 4 * 7] * 5)  # draws count modulo the steps
        after = cache.batch(items) if step == 3 else cache.states(items, [step + 1] * 5)[0]
        assert t.tolist() == pytest.approx([times[step]] * 5)
        torch.testing.assert_close(x + (times[step + 1] - times[step]) * v, after)
    mixed_x, mixed_t, _ = cache.states([3, 1], [2, 0])
    assert mixed_t.tolist() == pytest.approx([times[2], 1.0])
    assert torch.equal(mixed_x[1], rollout_noise(5, PROMPTS[1], 0, x.shape[1:]))
    plain = draw(folder, tmp_path).batch(items)
    assert torch.equal(plain, cache.batch(items)), "keeping states changes nothing"


def test_one_and_three_ranks_draw_the_same_with_equally_many_requests(folder: WanFolder, tmp_path: Path) -> None:
    prompts = [f"a cat and {index} circles" for index in range(68)]  # two batches: 64 and a filled-up one
    alone = draw(folder, tmp_path / "1", prompts).batch(range(68))
    shutil.copytree(tmp_path / "1" / "embeddings", tmp_path / "3" / "embeddings")

    def rank(here: World) -> tuple[int, Tensor]:
        teacher = CountingTeacher()
        latents = draw_rollouts(here, folder, teacher, prompts, settings(), tmp_path / "3")
        return len(teacher.requests), latents.batch(range(68))

    results = run_threads(3, rank)
    assert [count for count, _ in results] == [4, 4, 4], "the third rank has no batch of its own and repeats one"
    assert all(torch.equal(latents, alone) for _, latents in results)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 7, 8, 20])
def test_rounds_cover_every_item_once_in_equal_numbers(world_size: int, count: int) -> None:
    missing = [str(index) for index in range(count)]
    dealt = [list(rounds(missing, 4, rank, world_size)) for rank in range(world_size)]
    assert {len(batches) for batches in dealt} == {math.ceil(count / 4 / world_size)}
    assert all(len(keys) == 4 for batches in dealt for keys, _ in batches)
    kept = [key for batches in dealt for keys, real in batches for key in keys[:real]]
    assert sorted(kept) == sorted(missing)


def test_a_killed_build_goes_on_and_ends_with_the_same_bits(
    folder: WanFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_ROLLOUTS", 2)
    prompts = [f"{index} circles" for index in range(9)]
    whole = draw(folder, tmp_path / "straight", prompts).batch(range(9))

    class Killed(CountingTeacher):
        def result(self, ticket: Tensor) -> TeacherOutput:
            if len(self.requests) > 2 * 4:
                raise KeyboardInterrupt
            return super().result(ticket)

    from wandistill.errors import Interrupted

    with pytest.raises(Interrupted, match="the same command goes on from there"):
        draw(folder, tmp_path / "killed", prompts, Killed())
    teacher = CountingTeacher()
    resumed = draw(folder, tmp_path / "killed", prompts, teacher).batch(range(9))
    assert len(teacher.requests) == 3 * 4, "two of five batches were kept"
    assert torch.equal(resumed, whole)

    lost = sorted((tmp_path / "killed" / "rollouts").rglob("shard-*"))[-1]
    lost.write_bytes(lost.read_bytes()[:-1])
    assert torch.equal(draw(folder, tmp_path / "killed", prompts).batch(range(9)), whole)


def test_no_teacher_is_asked_for_when_nothing_is_missing(folder: WanFolder, tmp_path: Path) -> None:
    from wandistill.data.embeddings import EmbeddingCache, embedding_ingredients, embedding_work
    from wandistill.data.latents import build_rollouts

    draw(folder, tmp_path, keep_states=True)
    ingredients = embedding_ingredients(folder, torch.float32)
    chosen = settings(keep_states=True)
    work = rollout_work(folder, PROMPTS, chosen, ingredients, tmp_path)
    texts = embedding_work(folder, PROMPTS, tmp_path, torch.float32)
    embeddings = EmbeddingCache(texts.store, folder.token_length)

    def place() -> Any:
        raise AssertionError("a teacher of 14 B would be loaded for nothing")

    assert len(build_rollouts(work, folder, place, embeddings, chosen, world())) == len(PROMPTS)


def test_a_velocity_that_is_not_finite_stops_and_names_prompt_and_time(folder: WanFolder, tmp_path: Path) -> None:
    class Overflowing(CountingTeacher):
        def result(self, ticket: Tensor) -> TeacherOutput:
            if len(self.requests) == 3:
                ticket[1, 0, 0, 0, 0] = float("nan")
            return super().result(ticket)

    with pytest.raises(TrainingFailed) as caught:
        draw(folder, tmp_path, teacher=Overflowing())
    for said in ("not finite", f"t = {flow_times(4, 3.0)[2]:.4f}", "'a cat'", "--teacher_dtype"):
        assert said in str(caught.value)
    assert not list((tmp_path / "rollouts").rglob("shard-*"))


def test_a_shard_holds_one_latent_an_item(folder: WanFolder, tmp_path: Path) -> None:
    draw(folder, tmp_path)
    (shard,) = (tmp_path / "rollouts").rglob("shard-*")
    work = rollout_work(folder, PROMPTS, settings(), {}, tmp_path)
    assert 0 <= shard.stat().st_size - len(PROMPTS) * work.item_bytes([]) < 64 * len(PROMPTS) + 500


def test_states_take_the_bytes_that_are_estimated(folder: WanFolder, tmp_path: Path) -> None:
    chosen = settings(keep_states=True)
    draw(folder, tmp_path, keep_states=True)
    (shard,) = (tmp_path / "targets").rglob("shard-*")
    estimate = len(PROMPTS) * rollout_work(folder, PROMPTS, chosen, {}, tmp_path).item_bytes([])
    assert estimate == len(PROMPTS) * 4 * 16 * 4 * 4 * (1 + 2 * 4)
    assert 0 <= shard.stat().st_size - estimate < 64 * len(PROMPTS) + 1000
