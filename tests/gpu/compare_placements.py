"""Every placement against the resident teacher in bfloat16 on real GPUs: `python -m tests.gpu.compare_placements`.

For each world, teacher and placement it measures how far the targets and features are from the resident teacher's,
how far both are from float32, and each rank's peak memory beside what the planner promises. The rows go into section
`placements` of tests/gpu/measured.yaml, with hardware, driver, versions and commit, in place of those of the same world
and teacher.

    --ranks 1 2              worlds; one GPU for each rank
    --teachers embedded random-1.3b
    --device cpu --tiny      proves the program itself, on gloo ranks and with small shapes: memory is not measured
    --output FILE
    --commit COMMIT          of the code, outside a git repository

It ends with 1 where a placement is not equal, or takes more than 5 % over what it promises.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

# Its helpers are in tests and in tests/cpu.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))

from engine_setup import write_random
from placement_asks import answers, distance, steps
from placement_cases import COUPLED, Case
from placement_kinds import Ranks, placed
from tiny_wan import LAYOUTS, build_tiny_wan

from tests.gpu import table
from tests.worlds import run_world
from wandistill import catalog
from wandistill.config import from_mapping
from wandistill.device_map import DeviceMap, read_device_map
from wandistill.planner.memory import cublas_workspaces
from wandistill.planner.placements import Placement
from wandistill.planner.request import Machines, PlanRequest
from wandistill.planner.teacher_memory import forward_terms, spread, weight_terms
from wandistill.teacher import BUILDERS, Setting
from wandistill.teacher.base import TeacherOutput
from wandistill.teacher.layout import Precision
from wandistill.teacher.resident import ResidentTeacher
from wandistill.train import distributed
from wandistill.train.command import set_gpu_environment
from wandistill.train.distributed import World

# Bound of the distance to float32 over that of the resident teacher in bfloat16 (design: "equal").
MOST_DISTANCE = 1.1
MOST_MEMORY = 1.05
# A rank without any part of the teacher still gathers inputs and answers.
SLACK = 8 << 20


def random_teacher(folder: Path, *, tiny: bool) -> Path:
    """A random teacher of the shape of Wan2.1-T2V-1.3B, bfloat16; text encoder and VAE are tiny, and not used."""
    build_tiny_wan(LAYOUTS["t2v-1.3b"], folder)
    own = catalog.find_model("wan2.1-t2v-1.3b").architecture
    # The width of the prompts stays that of the tiny text encoder.
    fields = ("num_layers", "num_attention_heads", "attention_head_dim", "ffn_dim", "freq_dim")
    sizes = {name: getattr(own, name) for name in fields}
    return folder if tiny else write_random(folder, dtype=torch.bfloat16, **sizes)


def resident_answers(setting: Setting, dtype: torch.dtype) -> tuple[list[TeacherOutput], int]:
    """The resident teacher's answers on this rank, and its peak memory."""
    before = allocated(setting)
    folder, device = setting.folder, setting.world.device
    models = {expert: folder.load_transformer(expert, dtype, device) for expert in folder.experts}
    if Precision.of(dtype, device).compute == torch.float32:
        models = {expert: model.float() for expert, model in models.items()}  # computed so, rounded as `dtype` says
    teacher = ResidentTeacher(models, device, expand_timesteps=folder.expand_timesteps)
    found = answers(teacher, steps_on(setting))
    teacher.close()
    return found, peak(setting) - before


def steps_on(setting: Setting) -> list[list[Any]]:
    """The suite's requests, on the rank's device."""
    device = setting.world.device

    def move(ask: Any) -> Any:
        prompt = ask.prompt._replace(positive=ask.prompt.positive.to(device), negative=ask.prompt.negative.to(device))
        return replace(ask, x=ask.x.to(device), t=ask.t.to(device), prompt=prompt)

    return [[move(ask) for ask in step] for step in steps(setting)]


def allocated(setting: Setting) -> int:
    """Bytes that torch has allocated on the rank's GPU; from here on its peak counts anew."""
    if setting.world.device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak(setting: Setting) -> int:
    """Most bytes that were allocated since `allocated`."""
    return torch.cuda.max_memory_allocated() if setting.world.device.type == "cuda" else 0


def promised(placement: str, setting: Setting) -> int:
    """Bytes of torch's allocator that the planner promises for this rank: weights, slots and the largest step."""
    world, config = setting.world, setting.config
    gpu = next(gpu for gpu in catalog.gpus().values() if gpu.name.startswith("h100"))
    model = replace(catalog.model_from_folder(setting.folder.path), token_length=5)  # of the suite's prompts
    size = 2 * model.resolution_step
    request = PlanRequest(
        model=model,
        student=replace(model.architecture, num_layers=2),
        student_name="two blocks, as many as the suite asks features of",
        machines=Machines(gpu, world.local_size, world.size // world.local_size, 1 << 40, 16),
        width=size,
        height=size,
        batch_size=2,
        gradient_accumulation_steps=2,
        teacher_dtype="bfloat16",
        features=True,
        teacher_rank=config.teacher_rank,
        device_map=None,
    )
    where, places = Placement(placement), None
    if where is Placement.CUSTOM:
        places = read_device_map(Path(config.teacher_device_map), model.architecture.num_layers, world.size)
    elif placement in COUPLED and where is not Placement.SHARDED and world.size > 1:
        places = _spread(request, where, config.max_memory)
    if world.size == 1 and where in (Placement.GPU0, Placement.BALANCED, Placement.SEQUENTIAL, Placement.SHARDED):
        where = Placement.GPU
    terms = [
        *weight_terms(request, where, world.rank, places),
        *forward_terms(request, where, world.rank, places, request.teacher_rows, 2),
    ]
    # The suite's own multiplications have a workspace already; a pipeline computes on a stream of its own.
    beside = places is not None and any(place.rank == world.rank for place in places)
    workspace = cublas_workspaces(gpu, where)[2:] if beside else []
    return sum(term.size for term in terms if term.allocated) + sum(workspace)


def _spread(request: PlanRequest, placement: Placement, max_memory: str) -> DeviceMap:
    return spread(request, placement, int(max_memory) if max_memory else None)


def compare(teacher: str, world: World, folder: Path, output: Path) -> None:
    """What a rank does with a teacher; rank 0 appends the rows of all."""
    torch.backends.cuda.matmul.allow_tf32 = False
    here, ranks = Ranks(world, folder), world.size
    asked = [(name, "") for name in BUILDERS] + [("stream", "split")] * (ranks > 1)
    dtype = {"teacher_dtype": "bfloat16"}
    cases = [Case("targets", str(ranks), name, teacher, variant, dtype) for name, variant in asked]
    plain = here.setting(cases[0])
    exact, _ = resident_answers(plain, torch.float32)
    resident, resident_peak = resident_answers(plain, torch.bfloat16)
    own = distance(resident, exact)
    for case in cases:
        setting = here.setting(case)
        before = allocated(setting)
        with placed(case, setting) as at_its_place:
            found = answers(at_its_place, steps_on(setting))
            taken = peak(setting) - before
        apart, to_exact = distance(found, resident), distance(found, exact)
        finding = {"distance": apart, "to_float32": to_exact, "resident_to_float32": own, "peak": taken}
        everyone = world.gather(finding | {"promised": promised(case.placement, setting)})
        if world.is_main:
            row = {
                "teacher": teacher,
                "ranks": ranks,
                "placement": f"{case.placement} {case.variant}".rstrip(),
                "bit_equal": all(one["distance"] == 0 for one in everyone),
                "distance_to_resident": max(one["distance"] for one in everyone),
                "distance_to_float32": max(one["to_float32"] for one in everyone),
                "resident_distance_to_float32": max(one["resident_to_float32"] for one in everyone),
                "equal": all(one["to_float32"] <= MOST_DISTANCE * one["resident_to_float32"] for one in everyone),
            }
            if world.device.type == "cuda":
                row |= {
                    "peak_bytes": [one["peak"] for one in everyone],
                    "promised_bytes": [one["promised"] for one in everyone],
                    "resident_peak_bytes": resident_peak,
                    "within_promise": all(one["peak"] <= MOST_MEMORY * one["promised"] + SLACK for one in everyone),
                }
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def merge(file: Path, rows: list[dict[str, Any]], on: dict[str, Any]) -> None:
    """Writes `rows` into a file of measurements, in place of those of the same worlds and teachers."""
    renewed = {(row["teacher"], row["ranks"]) for row in rows}
    former = [row for row in table.read("placements", file) if (row["teacher"], row["ranks"]) not in renewed]
    table.write("placements", [*former, *({**row, "on": on} for row in rows)], file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--teachers", nargs="+", default=["embedded", "random-1.3b"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path, default=table.MEASURED)
    parser.add_argument("--commit")
    parser.add_argument("--as_rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    # As a run has it; the ranks inherit it.
    set_gpu_environment()
    if args.as_rank:
        work_as_rank(args)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="wandistill-compare-"))
    rows: list[dict[str, Any]] = []
    on = table.machine(args.commit)
    try:
        random_teacher(folder / "random-1.3b", tiny=args.tiny)
        for ranks in args.ranks:
            arguments = ["--as_rank", str(folder), "--device", args.device, "--teachers", *args.teachers]
            if code := run_world("tests.gpu.compare_placements", ranks, arguments):
                return code
            found = [json.loads(line) for line in (folder / f"{ranks}.jsonl").read_text().splitlines()]
            merge(args.output, found, on)
            rows += found
    finally:
        shutil.rmtree(folder)
    wrong = [row for row in rows if not (row["equal"] and row.get("within_promise", True))]
    for row in wrong:
        print(json.dumps(row), file=sys.stderr)
    print(f"{len(rows)} rows in {args.output}, {len(wrong)} not as promised")
    return 1 if wrong else 0


def work_as_rank(args: argparse.Namespace) -> None:
    """Compares all teachers on a rank that torchrun started; rank 0 leaves the rows in a file."""
    world = distributed.start(from_mapping({"device": args.device}))
    for teacher in args.teachers:
        compare(teacher, world, args.as_rank, args.as_rank / f"{world.size}.jsonl")
    distributed.stop()


if __name__ == "__main__":
    sys.exit(main())
