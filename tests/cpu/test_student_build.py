"""Students built from a teacher's files: which weights, from which blocks and experts, in which shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from wandistill.errors import ConfigError
from wandistill.models import student as student_module
from wandistill.models.student import (
    ProbeBatch,
    Student,
    build_student,
    choose_init,
    empty_student,
    importance_of,
    velocity_error,
)
from wandistill.models.wan import WanFolder, open_teacher
from wandistill.models.weights import TransformerFiles
from wandistill.models.width import measure_importance
from wandistill.student_config import StudentSpec, student_spec
from wandistill.teacher.base import Expert

TinyWan = Callable[[str], Path]


@pytest.fixture
def folder(tiny_wan: TinyWan) -> WanFolder:
    """A two-expert teacher of 3 blocks, 2 heads of 12, ffn 40, in shards."""
    return open_teacher(str(tiny_wan("t2v-a14b")))


def spec(folder: WanFolder, **config: object) -> StudentSpec:
    return student_spec(config, folder.architecture)


def inputs(folder: WanFolder, batch: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, folder.latent_channels, 1, 4, 4, generator=generator)
    prompt = torch.randn(batch, 5, folder.architecture.text_dim, generator=generator)
    return x, torch.linspace(0.1, 1, batch), prompt


def probes(folder: WanFolder) -> list[ProbeBatch]:
    """Inputs over the whole of t with the answers of the expert that is asked there."""
    x, t, prompt = inputs(folder, 8)
    models = {expert: folder.load_transformer(expert, torch.float32, "cpu") for expert in folder.experts}
    answers = [
        models[folder.expert_for(float(t[i]))](x[i : i + 1], t[i : i + 1] * 1000, prompt[i : i + 1], return_dict=False)[
            0
        ]
        for i in range(len(t))
    ]
    return [ProbeBatch(x, t, prompt, torch.cat(answers))]


@pytest.mark.parametrize("kind", ["t2v-1.3b", "t2v-14b", "t2v-a14b", "ti2v-5b"])
def test_a_student_that_keeps_everything_is_its_teacher_bit_for_bit(tiny_wan: TinyWan, kind: str):
    folder = open_teacher(str(tiny_wan(kind)))
    student = build_student(folder, spec(folder), "low")
    teacher = folder.load_transformer(folder.experts[-1], torch.float32, "cpu")
    x, t, prompt = inputs(folder)
    timestep = t * 1000
    if folder.expand_timesteps:
        timestep = timestep.unsqueeze(1).expand(-1, folder.architecture.tokens((1, 4, 4)))
    velocity, _ = student(x, t, prompt)
    assert torch.equal(velocity, teacher(x, timestep, prompt, return_dict=False)[0])


def test_blocks_come_from_the_teachers_blocks_that_the_config_names(folder: WanFolder):
    student = build_student(folder, spec(folder, blocks=[0, 2]), "low")
    teacher = folder.load_transformer(Expert.LOW, torch.float32, "cpu")
    for own, theirs in ((0, 0), (1, 2)):
        expected = teacher.blocks[theirs].state_dict()
        assert all(
            torch.equal(tensor, expected[name]) for name, tensor in student.transformer.blocks[own].state_dict().items()
        )


@pytest.mark.parametrize(
    ("init", "mix"),
    [
        ("low", lambda high, low: low),
        ("high", lambda high, low: high),
        ("average", lambda high, low: (high + low) / 2),
    ],
)
def test_every_weight_comes_from_the_expert_that_init_names(folder: WanFolder, init: str, mix):
    student = build_student(folder, spec(folder, num_layers=2), init)
    high = folder.load_transformer(Expert.HIGH, torch.float32, "cpu").state_dict()
    low = folder.load_transformer(Expert.LOW, torch.float32, "cpu").state_dict()
    names = [name for name in student.transformer.state_dict() if not name.startswith("blocks.1.")]
    assert len(names) > 30
    for name in names:
        assert torch.equal(student.transformer.state_dict()[name], mix(high[name], low[name])), name


def test_a_teacher_with_one_expert_gives_the_same_student_whatever_init(tiny_wan: TinyWan):
    folder = open_teacher(str(tiny_wan("t2v-14b")))
    students = [build_student(folder, spec(folder, num_layers=2), init) for init in ("low", "average", "high")]
    first = students[0].state_dict()
    assert all(torch.equal(tensor, first[name]) for other in students for name, tensor in other.state_dict().items())


def test_random_weights_are_the_seeds_and_not_the_teachers(folder: WanFolder):
    first, again, other = (build_student(folder, spec(folder), "random", seed=seed) for seed in (0, 0, 1))
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    teacher = folder.load_transformer(Expert.LOW, torch.float32, "cpu").state_dict()
    name = "blocks.0.attn1.to_q.weight"
    assert not torch.equal(first.transformer.state_dict()[name], other.transformer.state_dict()[name])
    assert not torch.equal(first.transformer.state_dict()[name], teacher[name])


def test_building_leaves_the_callers_random_state_alone(folder: WanFolder):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    build_student(folder, spec(folder, num_attention_heads=1, ffn_dim=20), "random", feature_pairs=[(0, 0)])
    assert torch.equal(torch.rand(3), expected)


def test_only_needed_tensors_are_read_each_once_from_each_expert(folder: WanFolder, monkeypatch: pytest.MonkeyPatch):
    read: list[tuple[str, str]] = []
    original = TransformerFiles.read

    def spy(self: TransformerFiles, name: str) -> Tensor:
        read.append((self.folder.name, name))
        return original(self, name)

    monkeypatch.setattr(TransformerFiles, "read", spy)
    build_student(folder, spec(folder, blocks=[0, 2]), "average")
    assert len(read) == len(set(read))
    assert {source for source, _ in read} == {"transformer", "transformer_2"}
    assert not any(name.startswith("blocks.1.") for _, name in read)


def test_half_weights_on_disk_become_float32(folder: WanFolder, tiny_wan_copy: TinyWan):
    path = tiny_wan_copy("t2v-1.3b")
    stored = open_teacher(str(path))
    stored.load_transformer(Expert.HIGH, torch.bfloat16, "cpu").save_pretrained(path / "transformer")
    with safe_open(path / "transformer/diffusion_pytorch_model.safetensors", framework="pt") as file:
        half = file.get_tensor("blocks.0.attn1.to_q.weight")
    assert half.dtype == torch.bfloat16
    student = build_student(open_teacher(str(path)), spec(folder), "low")
    assert {tensor.dtype for tensor in student.parameters()} == {torch.float32}
    assert torch.equal(student.transformer.blocks[0].attn1.to_q.weight, half.float())


def test_the_student_trains_every_parameter_and_keeps_its_rotary_tables(folder: WanFolder):
    student = build_student(folder, spec(folder, num_layers=2), "low")
    assert all(parameter.requires_grad for parameter in student.parameters())
    velocity, _ = student(*inputs(folder))
    velocity.square().mean().backward()
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert all(buffer.device.type == "cpu" for buffer in student.buffers())


def test_an_empty_student_takes_the_weights_of_a_full_one(folder: WanFolder):
    shape = spec(folder, num_attention_heads=1, ffn_dim=24)
    full = build_student(folder, shape, "random", feature_pairs=[(1, 2)])
    empty = empty_student(folder, shape, feature_pairs=[(1, 2)])
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.load_state_dict(full.state_dict(), assign=True)
    assert torch.equal(empty(*inputs(folder))[0], full(*inputs(folder))[0])


def test_gradient_checkpointing_changes_no_gradient(folder: WanFolder):
    gradients = []
    for checkpointing in (False, True):
        student = build_student(folder, spec(folder, num_layers=2), "low")
        student.gradient_checkpointing = checkpointing
        velocity, features = student(*inputs(folder), features=(0,))
        (velocity.square().mean() + features[0].square().mean()).backward()
        gradients.append({name: parameter.grad for name, parameter in student.named_parameters()})
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


class TestFeatures:
    def test_features_come_in_the_order_asked_for_and_unprojected_at_equal_width(self, folder: WanFolder):
        student = build_student(folder, spec(folder), "low", feature_pairs=[(0, 0), (2, 2)])
        assert not student.projections
        velocity, (last, first) = student(*inputs(folder), features=(2, 0))
        assert torch.equal(velocity, student(*inputs(folder))[0])
        assert last.shape == first.shape == (3, 4, folder.architecture.hidden_size)
        assert torch.equal(first, student(*inputs(folder), features=(0,))[1][0])

    def test_features_of_a_narrower_student_are_projected_to_the_teachers_width(self, folder: WanFolder):
        shape = spec(folder, num_attention_heads=1, blocks=[0, 2])
        student = build_student(folder, shape, "random", feature_pairs=[(0, 0), (1, 2)])
        assert {name: tuple(layer.weight.shape) for name, layer in student.projections.items()} == {
            "0": (24, 12),
            "1": (24, 12),
        }
        _, features = student(*inputs(folder), features=(0, 1))
        assert [feature.shape[-1] for feature in features] == [24, 24]
        assert any(name.startswith("projections.1.") for name, _ in student.named_parameters())

    def test_projections_are_the_same_bits_on_every_build(self, folder: WanFolder):
        shape = spec(folder, num_attention_heads=1)
        first, again = (build_student(folder, shape, "random", feature_pairs=[(0, 0)], seed=3) for _ in range(2))
        assert torch.equal(first.projections["0"].weight, again.projections["0"].weight)


class TestChoosingTheInitialisation:
    def test_the_expert_that_answers_is_the_best_source(self, folder: WanFolder):
        every = probes(folder)[0]
        for init, own in (("low", every.t < 0.875), ("high", every.t >= 0.875)):
            batch = ProbeBatch(*(tensor[own] for tensor in every))
            best, errors = choose_init(folder, spec(folder), [batch])
            assert best == init
            assert errors[init] < 1e-6 < min(error for name, error in errors.items() if name != init)
            assert set(errors) == {"low", "average", "high"}

    def test_the_error_is_that_of_the_student_which_is_then_built(self, folder: WanFolder):
        shape = spec(folder, num_layers=2)
        _, errors = choose_init(folder, shape, probes(folder))
        with torch.no_grad():
            built = velocity_error(build_student(folder, shape, "average"), probes(folder), "cpu")
        assert errors["average"] == built

    def test_a_teacher_with_one_expert_leaves_no_choice(self, tiny_wan: TinyWan):
        folder = open_teacher(str(tiny_wan("t2v-1.3b")))
        best, errors = choose_init(folder, spec(folder, num_layers=2), probes(folder))
        assert best == "low" and list(errors) == ["low"]

    def test_a_narrower_student_is_measured_with_each_experts_own_importance(self, folder: WanFolder):
        shape = spec(folder, num_attention_heads=1)
        batches = probes(folder)
        importances = {
            init: importance_of(folder, shape, init, batches, dtype=torch.float32, device=torch.device("cpu"))
            for init in student_module.MEASURED_INITS
        }
        _, errors = choose_init(folder, shape, batches, importances=importances)
        assert all(0 < error < 10 for error in errors.values())


def test_importance_is_measured_on_the_samples_of_each_experts_own_range(folder: WanFolder):
    shape = spec(folder, num_attention_heads=1)
    low_only = ProbeBatch(*(tensor[:2] for tensor in probes(folder)[0]))
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    assert importance_of(folder, shape, "low", [low_only], **options) is not None
    with pytest.raises(ConfigError, match=r"range of transformer,"):
        importance_of(folder, shape, "average", [low_only], **options)


def test_importance_is_that_of_the_whole_expert_though_one_block_is_in_memory_at_a_time(folder: WanFolder):
    blocks, (x, t, prompt) = (0, 2), inputs(folder)
    spy = patch.object(student_module, "measure_importance", wraps=measure_importance)
    with spy as measured:
        shape = spec(folder, num_layers=2, num_attention_heads=1, blocks=list(blocks))
        low = ProbeBatch(x, t / 2, prompt, x)
        found = importance_of(folder, shape, "low", [low], dtype=torch.float32, device=torch.device("cpu"))
    empty = measured.call_args.args[0]
    assert all(parameter.is_meta for parameter in empty.blocks.parameters())
    whole = folder.load_transformer(folder.experts[-1], torch.float32, "cpu")
    expected = measure_importance(whole, [(low.x, low.t, low.prompt)], blocks)
    assert found is not None
    torch.testing.assert_close(found.outer, expected.outer, rtol=0, atol=0)
    torch.testing.assert_close(found.blocks, expected.blocks, rtol=0, atol=0)


def test_a_student_as_wide_as_its_teacher_needs_no_importance(folder: WanFolder):
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    assert importance_of(folder, spec(folder, num_layers=2), "low", [], **options) is None


@pytest.mark.parametrize(("init", "config"), [("auto", {}), ("best", {}), ("low", {"num_attention_heads": 1})])
def test_what_has_to_be_measured_first_is_an_error_of_the_program(folder: WanFolder, init: str, config: dict[str, int]):
    with pytest.raises(ValueError):
        build_student(folder, spec(folder, **config), init)


def test_a_tensor_that_the_files_lack_is_named_with_its_folder(folder: WanFolder):
    files = TransformerFiles(folder.path / "transformer_2")
    with pytest.raises(ConfigError, match=r"transformer_2 holds no tensor blocks\.9\."):
        files.read("blocks.9.attn1.to_q.weight")


def test_wans_float32_parts_are_told_apart_by_name(folder: WanFolder):
    student: Student = build_student(folder, spec(folder), "low")
    kept = {n for n, _ in student.named_parameters() if student.float32_names & set(n.split("."))}
    shape = folder.architecture
    assert sum(dict(student.named_parameters())[name].numel() for name in kept) == shape.float32_parameters
