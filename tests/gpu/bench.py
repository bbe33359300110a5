"""`python -m tests.gpu.bench`: every placement of a 14B-shaped teacher beside resident and the peers.

A world of ranks measures its host link first, then the resident teacher, then each case on the same tensors, and puts
a row for each case and shape into section `bench` of tests/gpu/measured.yaml: seconds of a step among others that
follow each other (median, least, most), the ratio to the resident teacher, the seconds over what the link allows, the
memory of each GPU and of the host, clock and power of each GPU, the bytes moved, and whether the answers are the
resident teacher's to the bit. These are forwards of the teacher alone; a few cases are whole training steps, whose
ratio is to the seconds that the resident teacher and the student take, measured apart (`bench_trainer`).

    --case stream fsdp2      these alone; without it all but those that take long
    --ranks 1 2              worlds; one GPU for each rank
    --work DIR               keeps the random teacher (28.6 GB) there, for the next command
    --timeline               adds how busy links and cores are, by torch's profiler
    --device cpu --tiny      proves the program itself, on gloo ranks and with small shapes

What the machine has no GPU or memory for is left out, and said.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

# Its helpers are in tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.gpu import bench_trainer, table
from tests.gpu.bench_cases import CASES, NAMES, RESIDENT, TINY, TRAINER_CASES, WIDE, Case, TrainerCase
from tests.gpu.bench_measure import Forward, Shape, Usage, ask_of, asked, host_link, settle, slowest, steady
from tests.gpu.bench_peers import PEERS
from tests.gpu.bench_timeline import timeline
from tests.gpu.measure_plan import random_teacher
from tests.worlds import run_world
from wandistill.config import from_mapping
from wandistill.device_map import unit_bytes
from wandistill.launch import records
from wandistill.launch.memory import available_bytes
from wandistill.models.wan import open_teacher
from wandistill.teacher import DTYPES, Setting, place
from wandistill.train import distributed
from wandistill.train.command import set_gpu_environment
from wandistill.train.distributed import World
from wandistill.train.probe import probe_machine

TEACHER = "wan2.1-t2v-14b"
# Of a GPU, for activations.
_ROOM = 0.15


class Bench:
    """One world's measurements."""

    def __init__(self, args: argparse.Namespace, world: World) -> None:
        self._args, self._world = args, world
        self._folder = open_teacher(str(args.as_rank))
        self._on = table.machine(args.commit) if world.is_main else {}
        dtype = "float32" if args.tiny else "bfloat16"
        self._teacher_dtype = dtype
        self._weights = sum(unit_bytes(self._folder.architecture, dtype, 1))
        probe = probe_machine(world, args.as_rank, args.as_rank)
        self._links = {"host": host_link(world), "peer": probe.gpu.peer_link if probe.gpu else None}
        self._machine = {
            "host_link": self._links["host"],
            "peer_link": self._links["peer"],
            "disk_rate": world.broadcast(probe.disk_rate),
            "cores": probe.cores,
        }
        # Of the resident teacher, by whether it is compiled.
        self._expected: dict[tuple[bool, Shape], torch.Tensor] = {}
        self._resident: dict[tuple[bool, Shape], float] = {}

    def run(self) -> None:
        """All cases of this world."""
        wanted = self._args.case or [name for name in NAMES if not any(c.name == name and c.extra for c in CASES)]
        cases = [case for case in CASES if case.name in wanted and self._world.size in case.ranks]
        trainers = [case for case in TRAINER_CASES if case.name in wanted and self._world.size in case.ranks]
        shapes = {shape: None for case in cases for shape in case.shapes[self._world.size]}
        if trainers:
            shapes[WIDE] = None
        if RESIDENT.name in wanted:
            shapes |= dict.fromkeys(RESIDENT.shapes[self._world.size])
        if not shapes:
            return self._say(f"{self._world.size} rank(s): none of the cases is measured in such a world.")
        if self._fits(RESIDENT):
            self._measure(replace(RESIDENT, shapes={self._world.size: tuple(shapes)}))
        # The peers leave page-locked memory behind.
        own, peers = ([case for case in cases if bool(case.placement) is ours] for ours in (True, False))
        for case in own:
            if self._fits(case):
                self._measure(case)
        for trainer in trainers:
            if self._fits(trainer):
                self._train(trainer)
        for case in peers:
            if self._fits(case):
                self._measure(case)

    def _measure(self, case: Case) -> None:
        """A case on all of its shapes, placed once."""
        world = self._world
        usage = Usage(world)
        with self._placed(case, self._setting(case.placement or "gpu", **case.settings)) as forward:
            usage.placed()
            for shape in case.shapes[world.size]:
                ask = ask_of(self._setting("gpu"), self._sized(shape))
                measured = steady(forward, ask, world, warm_up=case.warm_up, repeats=case.repeats)
                row = {**slowest(measured.seconds, world), **usage.row(), **measured.card.row(world)}
                if case.placement == RESIDENT.placement:
                    self._expected[case.compiled, shape] = measured.velocity
                    self._resident[case.compiled, shape] = statistics.median(measured.seconds)
                else:
                    row["bit_identical"] = self._same(measured.velocity, case, shape)
                moved = measured.moved or int(case.moved.get(world.size, 0.0) * self._weights)
                row |= self._ratios(case, shape, row["seconds"], moved)
                if self._args.timeline and world.device.type == "cuda":
                    row["timeline"] = timeline(lambda a=ask: steady(forward, a, world, warm_up=1, repeats=1))
                self._tell(case.name, shape, row)

    def _same(self, velocity: torch.Tensor, case: Case, shape: Shape) -> bool | None:
        """Whether every rank's answer is the resident teacher's in the same mode; None if that was not measured."""
        expected = self._expected.get((case.compiled, shape))
        return None if expected is None else not self._world.any(not torch.equal(velocity, expected))

    def _ratios(self, case: Case, shape: Shape, seconds: float, moved: int) -> dict[str, Any]:
        """How the seconds are to the resident teacher's on the slowest rank, and to what the link allows.

        The link is hidden by compute in the case's own mode.
        """
        plain, compiled = (max(self._world.gather(self._resident.get((mode, shape), 0.0))) for mode in (False, True))
        resident = compiled if case.compiled and compiled else plain
        found: dict[str, Any] = {"ratio_to_resident": round(plain / seconds, 4) if plain else None}
        if compiled:
            found["ratio_to_compiled"] = round(compiled / seconds, 4)
        link = self._links.get(case.link)
        found["moved_bytes"] = moved
        found["link_seconds"] = round(moved / link, 6) if link else None
        found["ratio_to_floor"] = round(seconds / max(moved / link, resident), 4) if link else None
        return found

    @contextmanager
    def _placed(self, case: Case, setting: Setting) -> Iterator[Forward]:
        if not case.placement:
            with PEERS[case.name](setting) as forward:
                yield forward
            return
        teacher = place(setting)
        try:
            yield asked(teacher)
        finally:
            teacher.close()

    def _train(self, case: TrainerCase) -> None:
        """A case of whole training steps."""
        setting = self._setting(case.placement, **case.settings)
        if (False, WIDE) not in self._resident:
            return self._say(f"{case.name}: left out, since the resident teacher was not measured.")
        teacher = max(self._world.gather(self._resident[False, WIDE]))
        self._tell(case.name, WIDE, bench_trainer.measure(setting, self._sized(WIDE), teacher))

    def _setting(self, placement: str, **flags: Any) -> Setting:
        size, tiny = self._sized(WIDE), self._args.tiny
        config = from_mapping(
            {
                "teacher_path": str(self._args.as_rank),
                "output_dir": str(self._args.as_rank / "run"),
                "device": self._world.device.type,
                "teacher_dtype": self._teacher_dtype,
                "teacher_device_strategy": placement,
                "student_config": "half" if tiny else "1b",
                "mixed_precision": "no" if tiny else "bf16",
                "gradient_checkpointing": True,
                "guidance_scale": 1.0,
                "resolution": size.resolution,
                "batch_size": size.batch,
                **flags,
            }
        )
        return Setting(config, self._folder, DTYPES[self._teacher_dtype], self._world)

    def _sized(self, shape: Shape) -> Shape:
        return TINY[shape] if self._args.tiny else shape

    def _fits(self, case: Case | TrainerCase) -> bool:
        """Whether the machine has the memory; says what it lacks."""
        world, reason = self._world, ""
        # Until then torch keeps what the case before gave back.
        settle(world)
        if world.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            need = int(case.gpu * self._weights + _ROOM * total)
            if need > free:
                reason = f"it takes {need / 1e9:.1f} GB of each GPU, of which {free / 1e9:.1f} GB are free"
        need, there = int(case.host.get(world.size, 0.0) * self._weights), available_bytes()
        if need > there:
            reason = f"it takes {need / 1e9:.1f} GB of host memory, of which {there / 1e9:.1f} GB are available"
        reasons = [one for one in world.gather(reason) if one]
        if reasons:
            self._say(f"{case.name}, {world.size} rank(s): left out: {reasons[0]}.")
        return not reasons

    def _tell(self, name: str, shape: Shape, row: dict[str, Any]) -> None:
        """Puts a row into the table in place of the one of the same case, world and shape."""
        if not self._world.is_main:
            return
        sized = self._sized(shape)
        latents = self._folder.latent_shape(*(int(side) for side in sized.resolution.split("x")))
        tokens = self._folder.architecture.tokens(latents[1:]) * sized.batch
        key = {"case": name, "ranks": self._world.size, "resolution": sized.resolution, "batch": sized.batch}
        full = {**key, "tokens": tokens, **row, "weight_bytes": self._weights, "machine": self._machine, "on": self._on}
        kept = [one for one in table.read("bench", self._args.output) if any(one[part] != key[part] for part in key)]
        table.write("bench", [*kept, full], self._args.output)
        told = (
            "ratio_to_resident",
            "ratio_to_compiled",
            "ratio_to_floor",
            "ratio_to_expected",
            "bit_identical",
            "load_seconds",
        )
        figures = ", ".join(f"{part} {row[part]}" for part in told if row.get(part) is not None)
        self._say(f"{name}, {self._world.size} rank(s), {tokens} tokens: {row['seconds']:.4f} s, {figures}")

    def _say(self, text: str) -> None:
        if self._world.is_main:
            print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=NAMES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--output", type=Path, default=table.MEASURED)
    parser.add_argument("--commit", help="of the code, outside a git repository")
    parser.add_argument("--as_rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    # As a run has it; the ranks inherit it.
    set_gpu_environment()
    if args.as_rank:
        world = distributed.start(from_mapping({"device": args.device}))
        Bench(args, world).run()
        distributed.stop()
        records.end_process(0)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="wandistill-bench-") as made:
        folder = (args.work or Path(made)) / ("tiny" if args.tiny else TEACHER)
        if not (folder / "model_index.json").exists():
            random_teacher(folder, TEACHER, tiny=args.tiny)
        for ranks in args.ranks:
            gpus = torch.cuda.device_count() if args.device == "cuda" else ranks
            if ranks > gpus:
                print(f"{ranks} rank(s): left out: this machine has {gpus} GPU(s).")
                continue
            code = run_world("tests.gpu.bench", ranks, ["--as_rank", str(folder), *sys.argv[1:]])
            failed = failed or code
    return failed


if __name__ == "__main__":
    sys.exit(main())
