"""With on_oom replan a pod has the memory and /dev/shm of every placement that its launcher may change to."""

import pytest

from wandistill.config import FIELDS
from wandistill.errors import ConfigError
from wandistill.kube import values
from wandistill.kube.job import render
from wandistill.kube.pools import jobs, question
from wandistill.kube.sizing import row_sizes, sizes
from wandistill.launch.causes import Kind
from wandistill.launch.remedy import replacement
from wandistill.planner.placements import Placement
from wandistill.planner.plan import plan
from wandistill.units import MIB

REPLAN = {"training": {"on_oom": "replan"}}


def configured(model, gpu, gpus, placement, batch):
    return {
        "image": {"train": {"repository": "r/x"}},
        "output": {"existingClaim": "runs"},
        "teacher": {"model": model, "cache": {"existingClaim": "models"}},
        "student": {"config": "1b"},
        "data": {"prompts": ["a cat"]},
        "training": {"optimizer": "adamw8bit", "mixed_precision": "bf16", "batch_size": batch},
        "pools": {"main": {"gpusPerNode": gpus, "gpu": gpu, "placement": placement}},
    }


RUNS = [
    configured("wan2.1-t2v-14b", "a100-80gb", 1, "gpu", 2),
    configured("wan2.1-t2v-1.3b", "rtx-4090", 1, "gpu", 2),
    configured("wan2.2-t2v-a14b", "a100-80gb", 4, "sharded", 4),
    configured("wan2.2-t2v-a14b", "rtx-3090", 4, "stream", 2),
]


def sized(*layers):
    resolved = values.resolve(*layers)
    (job,) = jobs(resolved)
    asked = question(resolved, job)
    return sizes(asked), asked.request()


def fallbacks(request, memory, shm):
    """The requests of the placements that a launcher takes one after another when a GPU's memory runs out."""
    request = request.change_machines(host_memory=memory * MIB, shm=shm * MIB)
    tried = []
    for _ in range(FIELDS["max_replans"].default):
        remedy = replacement(request, Kind.CUDA, tried)
        if remedy is None:
            return
        tried.append(remedy.changes)
        known = {name: value for name, value in remedy.changes.items() if name != "max_memory"}
        if "resident_blocks" in known:
            known["resident_blocks"] = int(known["resident_blocks"])
        request = request.change(placement=known.pop("teacher_device_strategy"), **known)
        yield request


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['teacher']['model']} {run['pools']['main']['placement']}")
def test_every_fallback_fits_the_pod(run):
    own, request = sized(run, REPLAN)
    found = list(fallbacks(request, own.memory, own.shm))
    assert found, "the launcher has somewhere to go"
    for fallback in found:
        needed = row_sizes(fallback, plan(fallback).row(Placement(fallback.placement)))
        assert needed.memory <= own.memory and needed.shm <= own.shm, needed


def test_a_pod_without_replan_has_its_own_placement_s_memory_alone():
    run = RUNS[0]
    alone, _ = sized(run)
    own, _ = sized(run, REPLAN)
    stream, _ = sized(run, {"pools": {"main": {"placement": "stream"}}})
    assert alone.memory < stream.memory <= own.memory and alone.shm < stream.shm <= own.shm


def test_teacher_and_students_have_nowhere_to_go():
    pools = {
        "main": None,
        "teacher": {"gpusPerNode": 1, "gpu": "a100-80gb"},
        "students": {"gpusPerNode": 2, "gpu": "l4"},
    }
    resolved = values.resolve(RUNS[3], REPLAN, {"topology": "teacher-and-students", "pools": pools})
    with pytest.raises(ConfigError, match="on_oom is replan, but topology teacher-and-students has one placement"):
        render(resolved, "my-run")
