"""The plan's terms as metrics: few names, and nothing lost."""

from __future__ import annotations

import pytest

from wandistill.catalog import find_gpu, find_model
from wandistill.metrics.names import TERMS
from wandistill.metrics.predicted import predicted_samples, term_of
from wandistill.planner.plan import plan
from wandistill.planner.request import Machines, PlanRequest
from wandistill.student_config import student_spec
from wandistill.units import parse_bytes


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_terms_add_up_to_the_peak_and_teacher_and_student_are_told_apart(parallel):
    teacher = find_model("wan2.2-t2v-a14b")
    machines = Machines(find_gpu("a100-80gb"), 4, 1, parse_bytes("512GiB"), cores=16)
    spec = student_spec("1b", teacher.architecture)
    rows = plan(PlanRequest(teacher, spec.architecture, "1b", machines, 832, 480, student_parallel=parallel)).rows
    assert sum(bool(row.ranks) for row in rows) > 5
    for row in rows:
        for planned in row.ranks:
            told = predicted_samples(planned)
            terms = {labels["term"]: size for labels, size in told["wandistill_rank_gpu_memory_predicted_bytes"]}
            assert sum(terms.values()) == planned.peak and set(terms) <= set(TERMS)
            assert told["wandistill_rank_gpu_memory_predicted_peak_bytes"] == [({}, planned.peak_allocated)]
            for term in planned.terms:
                if term.name.startswith(("teacher", "student", "optimizer", "fsdp", "expert")):
                    assert term_of(term.name) != "runtime", term.name
