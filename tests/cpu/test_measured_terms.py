"""The terms of a rank's GPU memory: they add up to what the allocator says, whenever it is asked."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from counted_tensors import instead_of_a_gpu
from engine_setup import answers, asks, place, setting
from ranks import Ranks
from runs import SHORT, flags
from torch import Tensor

from wandistill.demo.captions import training_prompts
from wandistill.metrics.names import MEASURED_TERMS
from wandistill.models import held
from wandistill.models.held import held_bytes, hold
from wandistill.models.student import build_student
from wandistill.models.wan import open_teacher
from wandistill.student_config import student_spec
from wandistill.teacher.layout import Precision, TeacherLayout
from wandistill.teacher.sharded import ShardSlots
from wandistill.train.distributed import World
from wandistill.train.measured_terms import MeasuredTerms
from wandistill.train.student import TrainedStudent

CPU = torch.device("cpu")
KIB = 1024


@pytest.fixture(autouse=True)
def nothing_held(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(held, "_held", {})
    yield


def block(kib: int) -> Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


class Allocator:
    """A made-up allocator of a device, and the terms that are measured with it; sizes in KiB."""

    def __init__(self) -> None:
        self.size = 0
        self.gradients = 0
        self.terms = MeasuredTerms(CPU, lambda: self.size * KIB)
        self.terms.gradients = lambda: self.gradients * KIB

    def weights(self, kib: int) -> Tensor:
        made = block(kib)
        self.size += kib
        hold("student", [made])
        return made

    def told(self, before: dict[str, int] | None = None) -> dict[str, float]:
        """Terms of some size, and what is unattributed, in KiB."""
        samples = self.terms.samples(self.size * KIB, self.terms.counted() if before is None else before)
        ((_, unattributed),) = samples["wandistill_rank_gpu_memory_unattributed_bytes"]
        terms = {labels["term"]: size for labels, size in samples["wandistill_rank_gpu_memory_measured_bytes"]}
        assert set(terms) == set(MEASURED_TERMS)
        assert sum(terms.values()) + unattributed == self.size * KIB
        assert min(*terms.values(), unattributed) >= 0
        return {name: size / KIB for name, size in {**terms, "unattributed": unattributed}.items() if size}


def test_activations_are_the_growth_since_the_step_began_without_that_of_gradients():
    device = Allocator()
    weights = device.weights(100)
    device.terms.begin()
    assert device.told() == {"student": 100}
    device.size += 40
    assert device.told() == {"student": 100, "activations": 40}
    device.size += 100 - 30
    device.gradients = 100
    assert device.told() == {"student": 100, "gradients": 100, "activations": 10}
    device.size -= 110
    device.gradients = 0
    device.terms.begin()
    assert device.told() == {"student": 100}
    del weights
    device.size -= 100
    assert device.told() == {}


def test_what_a_step_leaves_behind_is_unattributed_from_the_next_one_on():
    device = Allocator()
    weights = device.weights(100)
    for step in range(3):
        device.terms.begin()
        device.size += 50
        assert device.told() == {"student": 100, "activations": 50, **({"unattributed": 3 * step} if step else {})}
        device.size -= 47
    device.terms.begin()
    assert device.told() == {"student": 100, "unattributed": 9}
    assert len(weights) == 100 * KIB


@dataclass
class Answer:
    """What a step may leave for the next one."""

    velocity: Tensor
    features: dict[int, list[Tensor]]


def test_what_a_step_leaves_for_the_next_one_counts_as_its_activations_once():
    device = Allocator()
    velocity, feature = block(8), block(4)
    device.size += 12
    device.terms.begin((None, [Answer(velocity, {3: [feature, feature[:7]]}), "text"]))
    assert device.told() == {"activations": 12}
    device.terms.begin()
    assert device.told() == {"unattributed": 12}


def test_gradients_and_weights_that_come_or_go_during_a_look_make_no_term_negative():
    device = Allocator()
    device.gradients, device.size = 50, 50
    weights = device.weights(20)
    device.terms.begin()
    before = device.terms.counted()
    device.gradients = device.size = 0
    del weights
    assert device.told(before) == {}
    device.size = 30
    device.gradients = 30
    assert device.told(before={}) == {"activations": 30}


@pytest.mark.parametrize("seed", range(5))
def test_terms_add_up_and_none_is_negative_whatever_happens_between_two_looks(seed):
    rng = random.Random(seed)
    device = Allocator()
    weights: list[Tensor] = []
    activations = 0
    for _ in range(400):
        before = device.terms.counted()
        for _ in range(rng.randrange(3)):
            act = rng.choice(["weights", "free", "gradient", "zero", "work", "done", "leak", "begin"])
            size = rng.randrange(1, 9)
            if act == "weights":
                weights.append(device.weights(size))
            elif act == "free" and weights:
                device.size -= len(weights.pop(rng.randrange(len(weights)))) // KIB
            elif act == "gradient":
                device.gradients += size
                device.size += size
            elif act == "zero":
                device.size -= device.gradients
                device.gradients = 0
            elif act == "work":
                activations += size
                device.size += size
            elif act == "done":
                device.size -= activations
                activations = 0
            elif act == "leak":
                device.size += size
            elif act == "begin":
                device.terms.begin()
        device.told(before)


def test_a_tensor_that_is_noted_twice_or_viewed_counts_once_and_as_the_allocator_rounds_it():
    small = torch.empty(3)
    whole = block(4)
    hold("teacher", [small, whole, whole[:5], torch.nn.Parameter(small)])
    hold("teacher", [whole, torch.empty(1 << 30, device="meta")])
    assert held_bytes(CPU) == {"teacher": 512 + 4 * KIB}
    del small
    view = whole[1:]
    del whole
    assert held_bytes(CPU) == {"teacher": 4 * KIB}, "a view keeps the memory"
    assert held_bytes(torch.device("cuda", 0)) == {}
    del view
    assert held_bytes(CPU) == {}
    hold("slots", [])
    assert held._held == {CPU: {}}


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", ["gpu", "stream", "offload", "custom"])
def test_a_placement_notes_what_it_holds_until_it_is_closed(name, dtype, tiny_wan, tmp_path):
    folder = open_teacher(str(tiny_wan("t2v-a14b")))
    (tmp_path / "map.yaml").write_text("0-2: 0\n")
    of = setting(
        folder,
        tmp_path / "out",
        getattr(torch, dtype),
        teacher_device_map=str(tmp_path / "map.yaml"),
        teacher_dtype=dtype,
    )
    layout = TeacherLayout.of(folder.experts, folder.transformer_config, Precision.of(of.dtype, CPU))
    wide = layout.wide.size if layout.wide else 0
    blocks = len(folder.experts) * layout.blocks * layout.block.size
    outer = len(folder.experts) * layout.outer.size
    expected = {
        "gpu": {"teacher": blocks, "slots": wide + layout.outer.size},
        "stream": {"slots": 2 * layout.block.size + wide + layout.outer.size},
        "offload": {"slots": layout.block.size + wide + layout.outer.size},
        "custom": {"teacher": blocks + outer, "slots": wide},
    }[name]
    teacher = place(name, of)
    answers(teacher, asks(folder))
    found = held_bytes(CPU)
    if (name, dtype) == ("gpu", "float32"):  # whole models, loaded by their own library
        weights = sum(of.folder.architecture.parameters * 4 for _ in folder.experts)
        assert set(found) == {"teacher"} and weights < found["teacher"] < 1.5 * weights
    else:
        # The embedding and the head of a stage are records of their own, not rounded to pages.
        pages = 4096 * len(folder.experts) if name == "custom" else 0
        assert found == pytest.approx({term: size for term, size in expected.items() if size}, abs=pages)
    teacher.close()
    del teacher
    assert held_bytes(CPU) == {}


def test_slots_of_a_shard_are_noted():
    slots = ShardSlots(None, [], 4096, 2, CPU)  # type: ignore[arg-type]
    assert held_bytes(CPU) == {"slots": 8192}
    slots.close()
    assert held_bytes(CPU) == {}


def test_encoders_are_noted_while_they_are_loaded(tiny_wan):
    folder = open_teacher(str(tiny_wan("t2v-a14b")))
    encoder, vae = folder.load_text_encoder(torch.float32, "cpu"), folder.load_vae("cpu")
    weights = sum(p.nbytes for module in (encoder, vae) for p in module.parameters())
    assert weights <= held_bytes(CPU)["encoders"] < weights + 512 * 400
    del encoder, vae
    assert held_bytes(CPU) == {}


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_student_notes_weights_average_and_moments_and_tells_its_gradients(optimizer, tiny_wan, tmp_path):
    folder = open_teacher(str(tiny_wan("t2v-a14b")))
    of = setting(folder, tmp_path, optimizer=optimizer, ema_decay=0.9)
    student = TrainedStudent(
        build_student(folder, student_spec("half", folder.architecture), "low"), of.config, of.world
    )
    parameters = list(student.module.parameters())
    weights = sum(held.block_bytes(p.detach()) for p in parameters)
    found = held_bytes(CPU)
    assert weights <= found["student"] and "optimizer" not in found
    assert found["average"] == sum(-(-p.numel() * 4 // 512) * 512 for p in parameters)
    gradient_bytes = student.watch_gradients()
    assert gradient_bytes() == 0
    (ask,) = asks(folder, folder.experts[:1])
    velocity, _ = student(ask.x, ask.t, ask.prompt.positive)
    student.backward(velocity.square().mean())
    assert gradient_bytes() == weights
    # What is being freed is in no term any more: else they would be more than what is allocated.
    free, told = student._stepper.zero_grad, []
    student._stepper.zero_grad = lambda: [told.append(gradient_bytes()), free()]
    student.step(0, 1.0)
    assert [*told, gradient_bytes()] == [0, 0]
    moments = [m for state in student.optimizer.state.values() for m in state.values() if isinstance(m, Tensor)]
    plain = [part for moment in moments for part in held.plain_tensors(moment)]
    assert held_bytes(CPU)["optimizer"] == sum(map(held.block_bytes, plain)) > 0


def test_gradients_are_counted_as_they_come_and_may_be_asked_for_from_another_thread_at_any_time(tiny_wan, tmp_path):
    folder = open_teacher(str(tiny_wan("t2v-a14b")))
    of = setting(folder, tmp_path)
    student = TrainedStudent(
        build_student(folder, student_spec("half", folder.architecture), "low"), of.config, of.world
    )
    gradient_bytes = student.watch_gradients()
    (ask,) = asks(folder, folder.experts[:1])
    told, done = set(), threading.Event()

    def look() -> None:
        while not done.is_set():
            told.add(gradient_bytes())
            time.sleep(0.0005)

    other = threading.Thread(target=look)
    other.start()
    try:
        for step in range(20):
            student.backward(student(ask.x, ask.t, ask.prompt.positive)[0].square().mean())
            student.step(step, 1.0)
    finally:
        done.set()
        other.join()
    assert len(told) > 2


def test_ddp_s_buckets_are_gradients_all_the_time_and_those_of_earlier_micro_batches_come_to_them(tiny_wan, tmp_path):
    folder = open_teacher(str(tiny_wan("t2v-a14b")))
    of = setting(folder, tmp_path)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        # As one of two ranks, of which the group here has only this one.
        world = World(0, 2, 0, 2, CPU)
        spec = student_spec("half", folder.architecture)
        student = TrainedStudent(build_student(folder, spec, "low"), of.config, world)
        weights = sum(held.block_bytes(p.detach()) for p in student.module.parameters())
        gradient_bytes = student.watch_gradients()
        told = [gradient_bytes()]
        (ask,) = asks(folder, folder.experts[:1])
        for last in (False, True):
            with student.accumulate(last=last):
                student.backward(student(ask.x, ask.t, ask.prompt.positive)[0].square().mean())
            told.append(gradient_bytes())
        student.step(0, 1.0)
        assert [*told, gradient_bytes()] == [weights, 2 * weights, weights, weights]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {"teacher_device_strategy": "stream", "gradient_accumulation_steps": 2}),
        (2, {"teacher_device_strategy": "balanced", "feature_weight": 0.1, "student_parallel": "fsdp"}),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(map(str, value.values())),
)
def test_a_run_s_terms_add_up_and_little_is_unattributed(ranks, settings, tmp_path):
    """With the tensors that are alive in place of a GPU's allocator."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(training_prompts(8)))
    wanted = {**SHORT, **settings, "data_path": prompts, "rollout_steps": 1, "batch_size": 2, "max_steps": 5}
    before = partial(instead_of_a_gpu, str(tmp_path))
    Ranks(ranks, flags({**wanted, "output_dir": tmp_path / "out"}), tmp_path / "log", before).finish()
    for rank in range(ranks):
        looks = [json.loads(line) for line in (tmp_path / f"seen-{rank}.jsonl").read_text().splitlines()]
        assert [look["where"] for look in looks] == ["begin", "step"] * 5
        for number, look in enumerate(looks):
            ((_, unattributed),) = look["samples"]["wandistill_rank_gpu_memory_unattributed_bytes"]
            terms = {own["term"]: size for own, size in look["samples"]["wandistill_rank_gpu_memory_measured_bytes"]}
            assert sum(terms.values()) + unattributed == look["allocated"]
            assert min(*terms.values(), unattributed) >= 0
            assert unattributed < 0.05 * look["allocated"], (number, unattributed, terms)
            assert terms["gradients"] == pytest.approx(terms["student"] if look["where"] == "step" else 0, rel=0.01)
            assert terms["optimizer"] == pytest.approx(2 * terms["student"] if number > 1 else 0, rel=0.03)
