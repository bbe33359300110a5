"""What `helm install` tells: the plan, how to watch, where the student will be."""

import shutil

import pytest
import yaml

from tests import generate_chart as chart
from wandistill.kube import fields, values
from wandistill.kube.job import render
from wandistill.kube.pools import jobs
from wandistill.kube.sizes import pool_sizes
from wandistill.kube.tables import step_text
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


def test_another_placement_than_auto_s_has_no_hours_and_computed_values_have(notes):
    disk = {"pools": {"main": {"placement": "disk"}}}
    assert "hours    not in the chart's tables for this placement" in notes(GPU, disk)
    numbers = computed(values.resolve(GPU, disk))
    assert f"for 20000 steps of {numbers['main']['stepSeconds']} s" in notes(GPU, disk, {"computed": numbers})
    assert "hours    a step takes about" in notes(GPU, {"training": {"max_steps": 0}})


def test_it_tells_what_comes_before_and_who_decides(notes):
    many = {"prepare": {"enabled": True}, "job": {"queue": "gpus"}}
    shared = {"create": {"accessModes": ["ReadWriteMany"]}}
    text = notes(GPU, many, {"output": shared, "teacher": {"cache": shared}})
    assert "-prepare fetches the teacher and encodes the prompts first" in text
    assert "Suspended until Kueue admits it from the queue gpus" in text


def test_teacher_and_students_have_memories_of_their_own(notes):
    own = values.load(chart.PRESETS / "teacher-and-students.yaml")
    text = notes(own, fields.merge(chart.SAMPLE, chart.PROMPTS))
    assert "placement gpu0" in text and "(the Master's: " in text


def test_the_exporter_s_release_tells_of_the_exporter_alone(notes):
    text = notes(values.load(chart.PRESETS / "monitoring.yaml"), {"image": {"control": {"repository": "r/c"}}})
    assert text.strip().startswith("The exporter counts failures") and "Job " not in text
