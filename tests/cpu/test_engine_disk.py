"""Records read from safetensors: the right numbers, the bytes of the blocks in use and no more, bounded memory."""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from engine_setup import answers, asks, enlarge, place, resident, same, setting

from wandistill.errors import ConfigError, TrainingFailed
from wandistill.models.wan import WanFolder, open_teacher
from wandistill.teacher import record_reader
from wandistill.teacher.base import Expert
from wandistill.teacher.layout import Precision, Record, TeacherLayout
from wandistill.teacher.record_reader import RecordReader, read_rate

CPU = torch.device("cpu")
SIZES = {"num_layers": 4, "num_attention_heads": 4, "attention_head_dim": 96, "ffn_dim": 1536}


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory, tiny_wan: Callable[[str], Path]) -> WanFolder:
    """Two experts of four blocks of 9 MiB, bfloat16, a block spread over shards."""
    folder = Path(shutil.copytree(tiny_wan("t2v-a14b"), tmp_path_factory.mktemp("larger") / "teacher"))
    return open_teacher(str(enlarge(folder, shard="5MB", dtype=torch.bfloat16, **SIZES)))


def layout_of(folder: WanFolder, dtype: torch.dtype) -> TeacherLayout:
    return TeacherLayout.of(folder.experts, folder.transformer_config, Precision.of(dtype, CPU))


def reader_of(folder: WanFolder, layout: TeacherLayout, *, direct: bool) -> RecordReader:
    return RecordReader({expert: folder.path / expert.value for expert in folder.experts}, layout, direct=direct)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "through the page cache"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_records_hold_what_diffusers_loads(larger: WanFolder, dtype: torch.dtype, direct: bool) -> None:
    layout = layout_of(larger, dtype)
    reader = reader_of(larger, layout, direct=direct)
    for expert in larger.experts:
        loaded = dict(larger.load_transformer(expert, dtype, CPU).named_parameters())
        for record in (record for record in layout.records if record.expert is expert):
            prefix = f"blocks.{record.block}." if record.block >= 0 else ""
            buffer = torch.full((layout.layout_of(record).size,), 255, dtype=torch.uint8)
            reader.read(record, buffer)
            for name, tensor in layout.layout_of(record).views(buffer).items():
                # The outer part is stored as it is computed with: widened, but rounded as the dtype says.
                assert torch.equal(tensor.float(), loaded[prefix + name].float()), (expert, prefix + name)
    reader.close()


def test_a_block_is_one_range_with_the_float32_parts_at_its_end(larger: WanFolder) -> None:
    layout = layout_of(larger, torch.bfloat16)
    fields = sorted(layout.block.fields.values(), key=lambda field: field.begin)
    assert layout.block.size % 4096 == 0
    assert all(field.begin % 256 == 0 for field in fields)
    assert all(a.end <= b.begin for a, b in pairwise(fields))
    dtypes = [field.dtype for field in fields]
    assert dtypes == sorted(dtypes, key=lambda dtype: dtype == torch.float32)
    assert {field.name for field in fields if field.dtype == torch.float32} == {
        "scale_shift_table",
        "norm2.weight",
        "norm2.bias",
    }
    assert layout.block.size <= 1.01 * (2 * larger.architecture.block_parameters) + 4096


def bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def needs_disk(folder: Path) -> None:
    file = next(folder.glob("*/*.safetensors"))
    os.sync()
    before = bytes_read()
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("the temporary directory's file system has no direct reads")
    os.preadv(descriptor, [mmap.mmap(-1, 4096)], 0)
    os.close(descriptor)
    if bytes_read() == before:
        pytest.skip("the temporary directory is in memory: no bytes are read from a disk")


def test_a_step_reads_the_blocks_of_the_expert_in_use_once(larger: WanFolder, tmp_path: Path) -> None:
    needs_disk(larger.path)
    teacher = place("disk", setting(larger, tmp_path, torch.bfloat16, teacher_micro_batch=1))
    blocks = 2 * larger.architecture.block_parameters * larger.architecture.num_layers
    for expert in (Expert.HIGH, Expert.LOW, Expert.LOW):
        before = bytes_read()
        answers(teacher, asks(larger, [expert] * 3))
        assert bytes_read() - before == pytest.approx(blocks, rel=0.05)
    teacher.close()


def test_disk_equals_resident_with_the_smallest_buffer_and_frees_it(larger: WanFolder, tmp_path: Path) -> None:
    layout = layout_of(larger, torch.float32)
    reader = reader_of(larger, layout, direct=True)
    least = 2 * layout.block.size + reader.staging_bytes
    reader.close()
    of = setting(larger, tmp_path, disk_buffer=str(least))
    requests = asks(larger, features=(3,))
    expected = answers(resident(of), requests)

    with pytest.raises(ConfigError, match=f"--disk_buffer {least - 1}: holds 1 blocks .* at least {least} bytes"):
        place("disk", setting(larger, tmp_path, disk_buffer=str(least - 1)))

    before = threading.active_count()
    teacher = place("disk", of)
    assert same(answers(teacher, requests), expected)
    assert same(answers(teacher, requests), expected)
    teacher.close()
    assert threading.active_count() == before


def test_weights_that_vanish_under_a_run_end_it_with_the_files_name(
    tiny_wan_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = open_teacher(str(tiny_wan_copy("t2v-14b")))
    teacher = place("disk", setting(folder, tmp_path))
    for shard in (folder.path / "transformer").glob("*.safetensors"):
        os.truncate(shard, 4096)
    with pytest.raises(TrainingFailed, match=r"diffusion_pytorch_model-.*safetensors ends before byte"):
        answers(teacher, asks(folder))
    teacher.close()


def test_weights_of_another_model_are_refused(tiny_wan_copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = open_teacher(str(tiny_wan_copy("t2v-1.3b")))
    wider = {**folder.transformer_config, "ffn_dim": 48}
    layout = TeacherLayout.of(folder.experts, wider, Precision.of(torch.float32, CPU))
    with pytest.raises(ConfigError, match=r"blocks\.0\.ffn\.net\.0\.proj\.weight has shape \[40, 24\]"):
        reader_of(folder, layout, direct=False)
    shorter = {**folder.transformer_config, "num_layers": 2}
    layout = TeacherLayout.of(folder.experts, shorter, Precision.of(torch.float32, CPU))
    with pytest.raises(ConfigError, match=r"tensors that its config\.json does not describe, such as blocks\.2\."):
        reader_of(folder, layout, direct=False)
    longer = {**folder.transformer_config, "num_layers": 4}
    layout = TeacherLayout.of(folder.experts, longer, Precision.of(torch.float32, CPU))
    with pytest.raises(ConfigError, match=r"holds no tensor blocks\.3\."):
        reader_of(folder, layout, direct=False)


def test_tensors_that_begin_at_odd_bytes_are_read(tiny_wan_copy: Callable[[str], Path]) -> None:
    """safetensors' own writer aligns the data to 8 bytes, the format does not ask for it."""
    path = tiny_wan_copy("t2v-1.3b")
    folder = open_teacher(str(path))
    layout = layout_of(folder, torch.bfloat16)
    record = Record(Expert.HIGH, 1)
    expected, got = (torch.zeros(layout.block.size, dtype=torch.uint8) for _ in range(2))
    reader = reader_of(folder, layout, direct=True)
    reader.read(record, expected)
    reader.close()

    (file,) = (path / "transformer").glob("*.safetensors")
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    file.write_bytes((length + 3).to_bytes(8, "little") + content[8 : 8 + length] + b"   " + content[8 + length :])
    reader = reader_of(folder, layout, direct=True)
    reader.read(record, got)
    reader.close()
    assert torch.equal(got, expected)


def test_the_disk_s_rate_is_that_of_reads_past_the_page_cache_for_no_longer_than_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights"
    with file.open("wb") as sparse:
        sparse.truncate(1 << 30)
    reads = []

    def read(self: object, buffer: object, start: int, end: int) -> None:
        reads.append(end - start)
        time.sleep(0.02)

    monkeypatch.setattr(record_reader._File, "read", read)
    monkeypatch.setattr(record_reader._File, "_open", lambda self, flags: True)
    monkeypatch.setattr(record_reader._File, "close", lambda self: None)
    rate = read_rate(file, seconds=0.2)
    # Four threads, each a read every 20 ms or, beside other work, later.
    assert rate is not None and 0.2 < rate / (4 * reads[0] / 0.02) < 1.1
    assert 8 < len(reads) < 60 < (1 << 30) // reads[0]
    monkeypatch.undo()
    assert read_rate(tmp_path / "missing", seconds=0.05) is None
