"""The planner replayed against what GPUs measured (tests/gpu/measured.yaml, written by tests/gpu/measure_plan.py).

Every row holds what the run's probe found, so the planner of today answers the question of then.
"""

from __future__ import annotations

from typing import Any

import yaml

from tests.gpu import table
from wandistill.architecture import WanArchitecture
from wandistill.catalog import Model, find_model
from wandistill.config import from_mapping
from wandistill.planner.decide import decide
from wandistill.planner.from_config import request_of_config
from wandistill.planner.measured import BlockProbe, BlockProbes, RankProbe, measured_machines, measured_rates
from wandistill.planner.outcome import RankUse, side_by_side
from wandistill.planner.parameters import TextEncoder, Vae
from wandistill.student_config import student_spec
from wandistill.units import GIB, MIB

FLOOR = 256 * MIB
# Figure -> most that the prediction may lie below and above what was measured, as shares of it.
TOLERANCES = {"allocated": (0.01, 0.03), "process": (0.05, 0.05), "host": (0.05, 0.05)}
STEP_TOLERANCE = 0.15


def replayed(row: dict[str, Any]) -> dict[str, Any]:
    """What the planner says now, in the form of run.json's `memory`."""
    asked = row["predicted"]
    stored = asked["model"]
    model = Model(
        **{
            **stored,
            "architecture": WanArchitecture.from_config(stored["architecture"]),
            "text_encoder": TextEncoder.from_config(stored["text_encoder"]),
            "vae": Vae.from_config(stored["vae"]),
        }
    )
    config = from_mapping(asked["config"])
    probes = [RankProbe.from_json(entry) for entry in asked["probe"]["ranks"]]
    blocks = [BlockProbes.from_json(entry) for entry in asked["probe"]["ranks"]]
    machines = measured_machines(probes)
    spec = student_spec(config.student_config, model.architecture)
    request = request_of_config(config, model, spec, machines)
    decision = decide(request, measured_rates(request, probes, blocks), force=True)
    nothing = [RankUse(rank, probe.node, 1, 1, {}) for rank, probe in enumerate(probes)]
    return side_by_side(decision, nothing, None)


def faults(planned: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """Where a prediction lies outside the tolerances."""
    found = []
    for plan, use in zip(planned["gpu"], measured["gpu"], strict=False):
        for what in ("allocated", "process"):
            found += _fault(
                f"rank {use['rank']} {what}",
                plan[f"predicted_{what}_bytes"],
                use[f"measured_{what}_bytes"],
                *TOLERANCES[what],
            )
    for plan, use in zip(planned["host"], measured["host"], strict=True):
        found += _fault(f"node {use['node']}", plan["predicted_bytes"], use["measured_bytes"], *TOLERANCES["host"])
    plan_seconds, seconds = planned["step_seconds"]["predicted"], measured["step_seconds"]["measured"]
    if abs(plan_seconds / seconds - 1) > STEP_TOLERANCE:
        found.append(f"a step: {plan_seconds:.3f} s planned, {seconds:.3f} s measured")
    return found


def _fault(what: str, planned: int, measured: int, below: float, above: float) -> list[str]:
    within = -max(below * measured, FLOOR) <= planned - measured <= max(above * measured, FLOOR)
    return [] if within else [f"{what}: {planned:,} B planned, {measured:,} B measured"]


def test_the_planner_agrees_with_every_measured_configuration() -> None:
    rows = table.read("plans")
    wrong = {}
    for number, row in enumerate(rows):
        if row["measured"] is not None and (found := faults(replayed(row), row["measured"])):
            wrong[f"{number}: {row['shape']}, {row['ranks']} ranks, {row['settings']}"] = found
    assert wrong == {}


def made_up_row() -> dict[str, Any]:
    """A row as the script writes it, of a machine that is not there."""
    import dataclasses

    from wandistill.planner.measured import GpuProbe

    gpu = GpuProbe("NVIDIA H100 80GB HBM3", (9, 0), 79 * GIB, 78 * GIB, 0, True, True, 55e9, 360e9, 6e14, 3e14, 3e12)
    probe = RankProbe(0, gpu, 200 * GIB, None, GIB, 16, 8e11, 8e11, 64 * GIB, 60 * GIB, 10**12, 4e9)
    model = find_model("wan2.1-t2v-14b")
    config = {"teacher_path": "x", "student_config": "1b", "resolution": "832x480", "teacher_dtype": "bfloat16"}
    config |= {"teacher_device_strategy": "gpu", "batch_size": 1, "gradient_checkpointing": True}
    config |= {"flow_shift": 3.0, "mixed_precision": "bf16"}
    spec = student_spec("1b", model.architecture)
    request = request_of_config(from_mapping(config), model, spec, measured_machines([probe]))
    block = BlockProbe(request.teacher_pass(2, 2), 0.01)
    entry = {"rank": 0, **probe.to_json(), **BlockProbes(block, None).to_json()}
    content = {"config": config, "model": dataclasses.asdict(model), "probe": {"ranks": [entry]}}
    return {"shape": model.name, "ranks": 1, "drawn": False, "settings": {}, "predicted": content, "measured": None}


def test_a_row_is_replayed_from_what_was_written_and_a_wrong_prediction_is_named() -> None:
    row = yaml.safe_load(yaml.safe_dump(made_up_row() | {"settings": []}))
    planned = replayed(row)
    allocated, host = planned["gpu"][0]["predicted_allocated_bytes"], planned["host"][0]["predicted_bytes"]
    assert 26 * GIB < allocated < 79 * GIB and host > 2 * GIB
    seconds = planned["step_seconds"]["predicted"]

    def measured(**shares: float) -> dict[str, Any]:
        gpu = {
            "rank": 0,
            "measured_allocated_bytes": int(allocated * shares.get("allocated", 1)),
            "measured_process_bytes": int(planned["gpu"][0]["predicted_process_bytes"] * shares.get("process", 1)),
        }
        step = {"measured": seconds * shares.get("step", 1)}
        return {
            "gpu": [gpu],
            "host": [{"node": 0, "measured_bytes": int(host * shares.get("host", 1))}],
            "step_seconds": step,
        }

    assert faults(planned, measured()) == []
    assert faults(planned, measured(allocated=0.98)) == []
    assert "rank 0 allocated" in faults(planned, measured(allocated=1.02))[0], "2 % below what was measured"
    assert "rank 0 allocated" in faults(planned, measured(allocated=0.96))[0]
    assert "rank 0 process" in faults(planned, measured(process=0.9))[0]
    assert "node 0" in faults(planned, measured(host=0.7))[0]
    assert "a step" in faults(planned, measured(step=1.3))[0]
