"""What `helm install` tells: the plan, how to watch, where the student will be."""

import re
import shutil

import pytest
import yaml

from tests import generate_chart as chart
from wandistill.kube import fields, values
from wandistill.kube.job import render
from wandistill.kube.pools import jobs
from wandistill.kube.sizes import pool_sizes
from wandistill.kube.tables import PLACEMENTS
from wandistill.kube.times import step_text
from wandistill.kube.values_command import computed


@pytest.fixture(scope="module")
def notes(helm, tmp_path_factory):
    """NOTES.txt of values. helm shows it only when it installs, so a copy of the chart has it as a template."""
    copy = tmp_path_factory.mktemp("notes") / "wandistill"
    shutil.copytree(chart.CHART, copy)
    text = (copy / "templates/NOTES.txt").read_text(encoding="utf-8")
    (copy / "templates/_notes.tpl").write_text(f'{{{{- define "notes" -}}}}\n{text}{{{{- end -}}}}\n')
    (copy / "templates/notes.yaml").write_text('kind: Notes\ntext: {{ include "notes" . | toJson }}\n')

    def told(*layers):
        done = helm.template(list(layers), "my-run", "--show-only", "templates/notes.yaml", chart=str(copy))
        assert done.returncode == 0, done.stderr
        return yaml.safe_load(done.stdout)["text"]

    return told


GPU = fields.merge(values.load(chart.PRESETS / "4x24gb.yaml"), fields.merge(chart.SAMPLE, chart.PROMPTS))


def test_it_tells_placement_memory_and_hours_as_planned_how_to_watch_and_where_the_student_will_be(notes):
    text = notes(GPU)
    resolved = values.resolve(GPU)
    (job,) = [made for made in render(resolved, "my-run") if made["kind"] == "PyTorchJob"]
    name = job["metadata"]["name"]
    sized = pool_sizes(resolved, jobs(resolved)[0])
    step = step_text(sized.step_seconds)
    hours = 20000 * float(step) / 3600
    assert f"Job {name}: 1 pod(s) of 4 rank(s)" in text
    assert f"teacher wan2.2-t2v-a14b in bfloat16, placement {sized.placement}; student 1b" in text
    assert f"{sized.pod.memory} a pod, {sized.pod.shm} of it for /dev/shm; " in text
    assert "GiB of the fullest GPU" in text
    assert f"hours    about {hours:.1f} for 20000 steps of {step} s" in text
    assert f"wandistill status {name} -n default" in text and f"logs -f {name}-master-0" in text
    assert f"student  {name}/student on the claim my-run-output" in text
    assert "helm test my-run" in text and "prepare " not in text


def test_computed_values_bring_their_hours_and_epochs_leave_the_number_of_steps_open(notes):
    more = {"training": {"gradient_accumulation_steps": 4}}
    numbers = computed(values.resolve(GPU, more))
    assert f"for 20000 steps of {numbers['main']['stepSeconds']} s" in notes(GPU, more, {"computed": numbers})
    numbers["main"]["stepSeconds"] = ""
    assert "hours    computed.main.stepSeconds is empty" in notes(GPU, more, {"computed": numbers})
    assert "hours    a step takes about" in notes(GPU, {"training": {"max_steps": 0}})


SPLIT = fields.merge(
    values.load(chart.PRESETS / "teacher-and-students.yaml"), fields.merge(chart.SAMPLE, chart.PROMPTS)
)
LARGE = {"gpu": "a100-80gb"}
TIMED = {
    **{
        f"{placement.value} on a node": (GPU, {"gpu": "b200-180gb", "placement": placement.value})
        for placement in PLACEMENTS
    },
    **{
        f"{placement} on two nodes": (GPU, LARGE | {"nodes": 2, "placement": placement})
        for placement in ("stream", "sharded", "balanced", "sequential", "cpu")
    },
    "gpu0 whose teacher's rank only serves": (GPU, {"gpu": "a100-40gb", "dtype": "int8", "placement": "gpu0"}),
    "a rank alone on each of two nodes": (GPU, LARGE | {"nodes": 2, "gpusPerNode": 1, "placement": "stream"}),
    "a rank alone on each of eight nodes": (GPU, LARGE | {"nodes": 8, "gpusPerNode": 1}),
    "float32": (GPU, {"gpu": "h200-141gb", "dtype": "float32", "placement": "offload"}),
    "int8": (GPU, {"dtype": "int8", "placement": "stream"}),
    "ranks without GPUs": (
        fields.merge(values.load(chart.PRESETS / "cpu-demo.yaml"), chart.SAMPLE),
        {"processesPerNode": 4, "placement": "balanced"},
    ),
}


@pytest.mark.parametrize(("preset", "pool"), TIMED.values(), ids=TIMED)
def test_a_placement_of_one_s_own_has_the_planner_s_hours(notes, preset, pool):
    (name,) = preset["pools"]
    shared = {"create": {"accessModes": ["ReadWriteMany"]}}
    claims = {"output": shared, "teacher": {"cache": shared}} if pool.get("gpu") else {"output": shared}
    layers = [preset, claims, {"pools": {name: pool}}]
    resolved = values.resolve(*layers)
    assert_seconds(notes(*layers), pool_sizes(resolved, jobs(resolved)[0]).step_seconds)


@pytest.mark.parametrize("teacher", ["a100-80gb", "b200-180gb"])
@pytest.mark.parametrize("nodes", [1, 7])
def test_teacher_and_students_take_as_long_as_the_slower_of_the_two(notes, teacher, nodes):
    layers = [SPLIT, {"pools": {"teacher": {"gpu": teacher}, "students": {"nodes": nodes}}}]
    resolved = values.resolve(*layers)
    assert_seconds(notes(*layers), pool_sizes(resolved, jobs(resolved)[0]).step_seconds)


def assert_seconds(text, planned):
    """The step that NOTES tells is the planned one, to the two digits that it has."""
    (told,) = re.findall(r"for \d+ steps of (\S+) s", text)
    assert float(told) == pytest.approx(planned, rel=0.055)
    assert float(told) == float(f"{float(told):.2g}")


def test_it_tells_what_comes_before_and_who_decides(notes):
    many = {"prepare": {"enabled": True}, "job": {"queue": "gpus"}}
    shared = {"create": {"accessModes": ["ReadWriteMany"]}}
    text = notes(GPU, many, {"output": shared, "teacher": {"cache": shared}})
    assert "-prepare fetches the teacher and encodes the prompts first" in text
    assert "Suspended until Kueue admits it from the queue gpus" in text


def test_teacher_and_students_have_memories_of_their_own(notes):
    text = notes(SPLIT)
    assert "placement gpu0" in text and "(the Master's: " in text


def test_the_exporter_s_release_tells_of_the_exporter_alone(notes):
    text = notes(values.load(chart.PRESETS / "monitoring.yaml"), {"image": {"control": {"repository": "r/c"}}})
    assert text.strip().startswith("The exporter counts failures") and "Job " not in text
