"""The chart's tables: the planner's answers for every combination that a preset may be turned into.

A file for each teacher (and one more for the embedded teacher without GPU). Templates look up and never calculate:
`rows` gives for a student, profile, resolution, ranks, dtype and placement one cell for each batch size with and
without gradient checkpointing: `verdict,gigabytes,size`, where a verdict is a letter for each GPU. `auto` gives the
placement that auto takes. A step is the teacher's part of it, in `teacher` for each placement, and what no placement
changes, in `train`: every student waits alike for the teacher, but under sequential, which fills what a student leaves.
Texts that recur are in lists beside, so that the release's Secret stays small.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import wandistill
from wandistill.catalog import Gpu, gpus, models
from wandistill.kube.sizing import FALLBACKS, Question, fallback_memory, one_node, row_sizes, split
from wandistill.kube.times import NODES, answer_times, teacher_times, train_times
from wandistill.planner.memory import cublas_workspaces
from wandistill.planner.placements import Placement
from wandistill.planner.plan import Row, evaluate
from wandistill.planner.request import PlanRequest
from wandistill.planner.student_memory import student_memory
from wandistill.planner.timing import StepTime, step_time
from wandistill.student_config import NAMES, student_spec
from wandistill.units import GIB

NONE = "none"
RANKS = ("1", "2", "4", "8")
PLACEMENTS = tuple(placement for placement in Placement if placement is not Placement.CUSTOM)
# A verdict: within the margin, fits, fits only if the teacher's rank trains no student (gpu0), does not fit.
WITHIN, TIGHT, SERVES, SERVES_TIGHT, NO = "f", "t", "s", "u", "n"
LETTERS = {placement.value: letter for placement, letter in zip(PLACEMENTS, "abcdeghik", strict=True)}
# Modules of the planner that only ask or report, and what the tables come from beside the others.
_OF_NO_EFFECT = ("advice", "command", "decide", "from_config", "measured", "outcome", "report", "search")
_SOURCES = (
    "architecture.py",
    "catalog.py",
    "catalog.yaml",
    "device_map.py",
    "student_config.py",
    "student_keys.py",
    "kube/sizing.py",
    "kube/tables.py",
    "kube/times.py",
)
# dtypes that take the same bytes have the same rows.
DTYPES = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "bfloat16",
    "int8": "int8",
    "float8": "int8",
}
SERVES_ONLY = "gpu0-serves"
# The memory of every placement that the launcher may take in place of another.
REPLAN = "replan"
TEACHER_POD, STUDENTS_POD = "gpu0-teacher", "gpu0-students"
_ON_EACH_CARD = (Placement.SEQUENTIAL.value, Placement.STREAM.value)


@dataclass(frozen=True)
class Extent:
    """What the table of a teacher spans."""

    batches: tuple[int, ...]
    profiles: tuple[tuple[str, str], ...]  # optimizer and mixed precision
    resolutions: tuple[str, ...]
    students: tuple[str, ...] = NAMES


_WAN = Extent((1, 2, 4, 8), (("adamw8bit", "bf16"), ("adamw", "bf16")), ("832x480",))
_EMBEDDED = Extent((1, 2, 4, 8, 16, 32, 64), (("adamw", "no"),), ("64x64",), ("half", "quarter"))


def table_names() -> list[str]:
    """Names of all tables."""
    return [*models(), f"embedded-{NONE}"]


def extent(teacher: str) -> Extent:
    """What the tables of a teacher span."""
    return _EMBEDDED if teacher == "embedded" else _WAN


def build(name: str) -> dict[str, Any]:
    """The table `name`."""
    teacher = name.removesuffix(f"-{NONE}")
    span = extent(teacher)
    cards: Sequence[Gpu | None] = [None] if name.endswith(f"-{NONE}") else list(gpus().values())
    model = models()[teacher]
    students = {student: student_spec(student, model.architecture) for student in span.students}
    slots = [(batch, again) for batch in span.batches for again in (False, True)]
    verdicts, numbers, autos, seconds = _Index(), _Index(), _Index(), _Index()

    def ask(
        student: str, optimizer: str, mixed: str, resolution: str, ranks: str, batch: int, again: bool
    ) -> PlanRequest:
        width, height = map(int, resolution.split("x"))
        return PlanRequest(
            model=model,
            student=students[student].architecture,
            student_name=student,
            machines=one_node(cards[0], int(ranks)),
            width=width,
            height=height,
            batch_size=batch,
            gradient_checkpointing=again,
            optimizer=optimizer,
            mixed_precision=mixed,
        )

    rows: dict[str, str] = {}
    auto: dict[str, str] = {}
    waits: dict[str, list[str]] = {}
    for student, (optimizer, mixed), resolution, ranks, dtype in product(
        span.students, span.profiles, span.resolutions, (*RANKS, "1+"), sorted(set(DTYPES.values()))
    ):
        before = f"{student}/{optimizer}-{mixed}/{resolution}"
        columns: dict[str, list[str]] = {}
        chosen: tuple[list[str], list[str]] = ([], [])  # on one node, on several
        for slot, (batch, again) in enumerate(slots):
            run = ask(student, optimizer, mixed, resolution, ranks.rstrip("+"), batch, again).change(
                teacher_dtype=dtype
            )
            question = Question(run, 2 if ranks.endswith("+") else 1)
            answers = _Answers(question, cards)
            for placement, cell in answers.cells.items():
                text = f"{verdicts.of(cell.letters)},{cell.needed},{numbers.of(f'{cell.memory} {cell.shm}')}"
                columns.setdefault(placement, []).append(text)
            for placement in answers.timed() if ranks != "1+" else ():
                own = f"{student}/{optimizer}-{mixed}/" if placement == Placement.SEQUENTIAL.value else ""
                column = waits.setdefault(f"{own}{resolution}/{ranks}/{dtype}/{placement}", [])
                if len(column) == slot:
                    column.append(seconds.of(answers.teacher_times(placement)))
            for index, spans in enumerate((True, False)):
                chosen[index].append(autos.of(answers.choices(spans_job=spans)))
        rows |= {f"{before}/{ranks}/{dtype}/{placement}": " ".join(column) for placement, column in columns.items()}
        if ranks != "1+":
            auto[f"{before}/{ranks}/{dtype}"] = " ".join(chosen[0])
        if ranks != "1":
            auto[f"{before}/{ranks.rstrip('+')}+/{dtype}"] = " ".join(chosen[1])
    train: dict[str, str] = {}
    for student, (optimizer, mixed), resolution, ranks, (more, nodes) in product(
        span.students, span.profiles, span.resolutions, RANKS, NODES.items()
    ):
        runs = [ask(student, optimizer, mixed, resolution, ranks, batch, again) for batch, again in slots]
        column = [seconds.of(train_times(run, cards, nodes)) for run in runs]
        train[f"{student}/{optimizer}-{mixed}/{resolution}/{ranks}{more}"] = " ".join(column)
    return {
        "gpus": {card.name if card else NONE: index for index, card in enumerate(cards)},
        "slots": {f"{batch}{'c' if again else ''}": index for index, (batch, again) in enumerate(slots)},
        "verdicts": verdicts.texts,
        "sizes": numbers.texts,
        "autos": autos.texts,
        "auto": auto,
        "rows": rows,
        "teacher": {key: " ".join(column) for key, column in waits.items()},
        "train": train,
        "seconds": seconds.texts,
    }


@dataclass(frozen=True)
class Cell:
    """A placement in one combination, on all GPUs."""

    letters: str
    needed: str  # GiB of the fullest rank
    memory: int
    shm: int


class _Answers:
    """One question on every GPU.

    A GPU's terms differ between cards by its workspaces alone, a constant; but sequential fills each card anew, and
    stream may take a communicator on cards that reach each other.
    """

    def __init__(self, question: Question, cards: Sequence[Gpu | None]) -> None:
        self.cards = cards
        self.request = question.request()
        self.student = student_memory(self.request)
        self.rows: dict[str, list[Row | None]] = {}
        self.cells: dict[str, Cell] = {}
        for placement in PLACEMENTS:
            if placement is not Placement.GPU0:
                self._add(placement.value, self._on_cards(placement))
        for trains in ("yes", "no"):
            self._add(f"gpu0-{trains}", self._on_cards(Placement.GPU0, teacher_rank_trains=trains))
        self._join_gpu0()
        if self.request.on_gpu:
            rows = [self.rows.get(placement.value, [])[-1:] for placement in FALLBACKS]
            memory, shm = fallback_memory(self.request, [row for found in rows for row in found])
            self.cells[REPLAN] = Cell(WITHIN * len(cards), "", memory, shm)
        # Of the two only the teacher's pod computes the teacher.
        placed = ((TEACHER_POD, Placement.GPU0), (STUDENTS_POD, Placement.GPU))
        for (name, own), part in zip(placed, split(question.run, cards[0]), strict=True):
            sized = part.sizes()
            letters = "".join(self._letter(part.device.peak, card, own.value) for card in cards)
            self.cells[name] = Cell(letters, _gigabytes(part.device.peak), sized.memory, sized.shm)

    def choices(self, *, spans_job: bool) -> str:
        """What auto takes: a letter for each GPU."""
        return "".join(self._choice(index, spans_job) for index in range(len(self.cards)))

    def timed(self) -> list[str]:
        """Cells that have the teacher's part of a step: all but those that are sizes alone."""
        return [name for name in self.cells if name not in (STUDENTS_POD, REPLAN)]

    def teacher_times(self, name: str) -> str:
        """Seconds of the teacher's part of a step for the cell `name`, on each GPU."""
        if name == TEACHER_POD:
            return answer_times(self.request, self.cards)
        if name in (Placement.GPU0.value, SERVES_ONLY):
            serves = name == SERVES_ONLY
            rows = self.rows["gpu0-no" if serves else "gpu0-yes"]
            return teacher_times(self.request, Placement.GPU0, rows, self.cards, serves_only=serves)
        return teacher_times(self.request, Placement(name), self.rows[name], self.cards)

    def _choice(self, index: int, spans_job: bool) -> str:
        free = [
            placement
            for placement in PLACEMENTS
            if placement.value in self.cells
            and self.cells[placement.value].letters[index] in (WITHIN, SERVES)
            and (spans_job or placement is not Placement.GPU0)
        ]
        if not free:
            return NO
        times = {each: self._time(each, index) for each in ([Placement.GPU] if Placement.GPU in free else free)}
        best = max(times, key=lambda each: times[each].samples_per_second)
        return LETTERS[best.value]

    def _time(self, placement: Placement, index: int) -> StepTime:
        name, serves = placement.value, False
        if placement is Placement.GPU0:
            serves = self.cells["gpu0"].letters[index] == SERVES
            name = f"gpu0-{'no' if serves else 'yes'}"
        row = self.rows[name][index]
        assert row is not None
        request = row.settled(self.request).change_machines(gpu=self.cards[index])
        return step_time(request, placement, row.places, serves_only=serves)

    def _on_cards(self, placement: Placement, **settings: str) -> list[Row | None]:
        request = self.request.change(**settings)
        if placement.value in _ON_EACH_CARD:
            return [evaluate(request.change_machines(gpu=card), self.student, placement) for card in self.cards]
        row = evaluate(request, self.student, placement)
        return [row] * len(self.cards)

    def _add(self, name: str, rows: list[Row | None]) -> None:
        there = [row for row in rows if row is not None and row.node is not None]
        if not there and name != Placement.SEQUENTIAL.value:
            return
        self.rows[name] = rows
        if not there:
            if self.request.machines.ranks > 1:
                self.cells[name] = Cell(NO * len(rows), "", 0, 0)
            return
        letters = "".join(
            NO if row is None or row.node is None else self._letter(row.peak, card, name)
            for row, card in zip(rows, self.cards, strict=True)
        )
        sized = row_sizes(self.request, there[-1])
        # Where it does not fit stream keeps no block.
        refused = [row.peak for row, letter in zip(rows, letters, strict=True) if row and row.node and letter == NO]
        needed = "" if name == Placement.SEQUENTIAL.value else _gigabytes(max(refused or [there[0].peak]))
        self.cells[name] = Cell(letters, needed, sized.memory, sized.shm)

    def _letter(self, peak: int, card: Gpu | None, name: str) -> str:
        if card is None:
            return WITHIN
        own = peak
        if name not in _ON_EACH_CARD:
            own += _workspaces(card, name) - _workspaces(self.cards[0], name)
        if own <= int(card.usable * (1 - self.request.memory_margin)):
            return WITHIN
        return TIGHT if own <= card.usable else NO

    def _join_gpu0(self) -> None:
        trains, serves = self.cells.pop("gpu0-yes", None), self.cells.pop("gpu0-no", None)
        if trains is None or serves is None:
            return
        letters = "".join(_either(*pair) for pair in zip(trains.letters, serves.letters, strict=True))
        self.cells["gpu0"] = Cell(letters, serves.needed, trains.memory, trains.shm)
        self.cells[SERVES_ONLY] = serves


def _either(trains: str, serves: str) -> str:
    """The verdict of gpu0, whose teacher's rank trains a student if that leaves the margin free."""
    if trains == WITHIN:
        return WITHIN
    if serves == WITHIN:
        return SERVES
    if trains == TIGHT:
        return TIGHT
    return SERVES_TIGHT if serves == TIGHT else NO


class _Index:
    """Texts that recur, by their number."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def of(self, text: str) -> str:
        """The number of `text`."""
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return str(self._numbers[text])


def _workspaces(card: Gpu | None, name: str) -> int:
    assert card is not None
    return sum(cublas_workspaces(card, Placement(name.partition("-")[0])))


def _gigabytes(size: int) -> str:
    return f"{size / GIB:.1f}"


def source_digest() -> str:
    """A digest of the code and the catalogue that the tables are made from."""
    root = Path(wandistill.__file__).parent
    planner = [file for file in sorted((root / "planner").glob("*.py")) if file.stem not in _OF_NO_EFFECT]
    files = [*planner, *(root / name for name in _SOURCES)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
