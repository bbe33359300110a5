"""First weights out of a teacher's host copy: the bits of the files, which are not read again for what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_setup import enlarge, place, setting
from torch import Tensor

from wandistill.models import weights
from wandistill.models.student import build_student, empty_student
from wandistill.models.wan import WanFolder, open_teacher
from wandistill.models.weights import TransformerFiles
from wandistill.models.width import weight_importance
from wandistill.student_config import StudentSpec, student_spec
from wandistill.teacher.base import Teacher

COPIES = ("cpu", "offload", "stream")  # the placements with the whole teacher in host memory
INITS = ("low", "average", "high")

Stored = Callable[[torch.dtype], WanFolder]


@pytest.fixture
def stored(tiny_wan_copy: Callable[[str], Path]) -> Stored:
    """A teacher with two unlike experts whose files are of a dtype."""
    return lambda dtype: open_teacher(str(enlarge(tiny_wan_copy("t2v-a14b"), dtype=dtype)))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors that were read from transformer files for a student, as EXPERT/NAME."""
    names: list[str] = []
    original = weights.safe_open

    class Noted:
        def __init__(self, file: Any, folder: str) -> None:
            self._file, self._folder = file, folder

        def get_tensor(self, name: str) -> Tensor:
            names.append(f"{self._folder}/{name}")
            return self._file.get_tensor(name)

    @contextmanager
    def opened(path: Path, framework: str) -> Iterator[Noted]:
        with original(path, framework=framework) as file:
            yield Noted(file, path.parent.name)

    monkeypatch.setattr(weights, "safe_open", opened)
    return names


def spec(folder: WanFolder) -> StudentSpec:
    return student_spec({"blocks": [0, 2]}, folder.architecture)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]) for name, tensor in ours.items()
    )


def start(folder: WanFolder, init: str, placed: Teacher | None = None, **more: Any) -> dict[str, Tensor]:
    return build_student(folder, spec(folder), init, placed=placed, **more).state_dict()


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize(
    ("files", "dtype", "kernels"),
    [
        (torch.float32, torch.float32, False),
        (torch.bfloat16, torch.bfloat16, True),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.float16, torch.float16, False),
        (torch.bfloat16, torch.float32, False),
    ],
    ids=["float32", "bfloat16", "bfloat16 that is computed as float32", "float16", "bfloat16 that is held as float32"],
)
def test_the_bits_are_those_of_the_files_and_the_files_are_not_read_again(
    stored: Stored,
    read: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    files: torch.dtype,
    dtype: torch.dtype,
    kernels: bool,
) -> None:
    monkeypatch.setattr("wandistill.teacher.layout.cpu_computes", lambda of: kernels or of == torch.float32)
    folder = stored(files)
    expected = {init: start(folder, init) for init in INITS}
    read.clear()
    teacher = place(name, setting(folder, tmp_path, dtype))
    for init in INITS:
        assert same(start(folder, init, teacher), expected[init]), init
    assert read == []
    teacher.close()


@pytest.mark.parametrize("name", COPIES)
def test_the_student_keeps_nothing_of_the_copy(stored: Stored, tmp_path: Path, name: str) -> None:
    folder = stored(torch.float32)
    expected = start(folder, "low")
    teacher = place(name, setting(folder, tmp_path))
    found = start(folder, "low", teacher)
    for expert in folder.experts:
        for tensor in empty_student(folder, student_spec({}, folder.architecture)).transformer.state_dict():
            held = teacher.weight(expert, tensor)
            assert held is not None
            held.zero_()
    assert same(found, expected)
    teacher.close()


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize(
    ("files", "dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.bfloat16, torch.int8),
        (torch.float32, torch.int8),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_what_the_copy_rounds_or_holds_in_8_bits_is_read_from_the_files(
    stored: Stored, read: list[str], tmp_path: Path, name: str, files: torch.dtype, dtype: torch.dtype
) -> None:
    folder = stored(files)
    expected = start(folder, "average")
    of_files = set(read)
    read.clear()
    teacher = place(name, setting(folder, tmp_path, dtype))
    assert same(start(folder, "average", teacher), expected)
    teacher.close()

    kept = empty_student(folder, spec(folder)).float32_names

    def rounded(name: str) -> bool:
        """Wan's float32 parts never are. 8-bit storage holds what is no Linear weight of a block in bfloat16."""
        _, tensor = name.split("/")
        if not kept.isdisjoint(tensor.split(".")):
            return False
        linear = tensor.startswith("blocks.") and tensor.endswith(".weight") and ".norm" not in tensor
        return files == torch.float32 or dtype.itemsize == 2 or linear

    assert len(read) == len(set(read))
    assert set(read) == {name for name in of_files if rounded(name)}
    assert 0 < len(read) < len(of_files)


@pytest.mark.parametrize("name", ["gpu", "disk"])
def test_a_placement_without_the_whole_teacher_in_host_memory_leaves_it_to_the_files(
    stored: Stored, read: list[str], tmp_path: Path, name: str
) -> None:
    folder = stored(torch.float32)
    expected = start(folder, "average")
    of_files = list(read)
    read.clear()
    teacher = place(name, setting(folder, tmp_path))
    assert same(start(folder, "average", teacher), expected)
    assert read == of_files
    teacher.close()


def test_a_narrower_student_is_cut_out_of_the_copy(stored: Stored, read: list[str], tmp_path: Path) -> None:
    folder = stored(torch.bfloat16)
    narrow = student_spec({"blocks": [0, 2], "num_attention_heads": 1, "ffn_dim": 10}, folder.architecture)
    files = [TransformerFiles(folder.path / expert.value) for expert in folder.experts]
    importance = weight_importance(files, narrow.blocks)
    expected = build_student(folder, narrow, "average", importance=importance).state_dict()
    read.clear()
    teacher = place("stream", setting(folder, tmp_path, torch.bfloat16))
    found = build_student(folder, narrow, "average", importance=importance, placed=teacher).state_dict()
    assert same(found, expected) and read == []
    teacher.close()
