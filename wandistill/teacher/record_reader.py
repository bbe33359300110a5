"""A teacher's records, read straight from its safetensors: no model is made, no shard is held whole.

The tensors of a block may be spread over a shard and over shards. Their bytes are read in pieces of some MiB, in the
order of the file and neighbours together, by a few threads, and put where they belong in the record, converted where
the file has another dtype. Either past the page cache (O_DIRECT), for weights that are read in every step, or through
it, each piece dropped once it is used: so a read never takes memory beyond the pieces.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from wandistill.errors import ConfigError, TrainingFailed
from wandistill.models.wan_weights import StoredTensor, component_tensors
from wandistill.teacher.base import Expert
from wandistill.teacher.host_memory import own_memory
from wandistill.teacher.layout import Field, Record, RecordLayout, TeacherLayout
from wandistill.teacher.quantize import quantize_rows

# Offsets, lengths and memory of direct reads are multiples of this.
_PAGE = 4096
_CHUNK = 2 << 20  # most bytes of one read: a few at a time use a disk's full speed
_THREADS = 4  # reads at a time of all ranks of a node together, so that their pieces stay small beside the teacher
# Bytes between two tensors up to which reading them together costs less than a read of its own.
_GAP = 64 << 10
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class _Piece:
    """Rows of one tensor, or elements of a tensor that is not scaled by row."""

    field: Field
    dtype: torch.dtype  # in the file
    first: int  # row or element
    last: int
    begin: int  # byte in the file
    end: int


@dataclass
class _Run:
    """Neighbouring pieces of one file: one read."""

    file: Path
    begin: int
    end: int
    pieces: list[_Piece] = field(default_factory=list)


class RecordReader:
    """Reads records into memory.

    Args:
        folders: the transformer folder of each expert.
        layout: the records.
        direct: past the page cache where the file system can; else through it, and dropped from it.
        ranks: of this node that read at the same time; they share the threads.

    Raises:
        ConfigError: the weights do not belong to the config that the layout was made from.
    """

    def __init__(self, folders: Mapping[Expert, Path], layout: TeacherLayout, *, direct: bool, ranks: int = 1) -> None:
        self._layout = layout
        self._direct = direct
        self._tensors = {expert: _checked_tensors(folder, layout) for expert, folder in folders.items()}
        self._runs: dict[Record, list[_Run]] = {}
        self._files: dict[Path, _File] = {}
        longest = max(layout.block.size, layout.outer.size)
        self._chunk = min(_CHUNK, -(-longest // _PAGE) * _PAGE)
        self._threads = max(_THREADS // ranks, 1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="record-reader")
        self._staging: SimpleQueue[np.ndarray] = SimpleQueue()
        for _ in range(self._threads):
            # It begins at a page, as direct reads need; a read may overlap a page at either end.
            self._staging.put(own_memory(self._chunk + 2 * _PAGE))

    @property
    def staging_bytes(self) -> int:
        """Memory that reading takes beside the records."""
        return self._threads * (self._chunk + 2 * _PAGE)

    def read(self, record: Record, buffer: Tensor) -> None:
        """Puts `record` in `buffer`, uint8 [size of the record] on the CPU. One call at a time.

        Raises:
            TrainingFailed: a file cannot be read any more.
        """
        if record not in self._runs:
            self._runs[record] = self._plan(record)
        runs = self._runs[record]
        for run in runs:
            if run.file not in self._files:
                self._files[run.file] = _File(run.file, direct=self._direct)
        target = buffer.numpy()
        layout = self._layout.layout_of(record)
        done = [self._pool.submit(self._fetch, run, layout, target) for run in runs]
        wait(done)
        for future in done:
            future.result()

    def exact(self, record: Record) -> frozenset[str]:
        """The tensors of `record` by their names within it whose numbers `read` leaves as the files have them."""
        stored = self._tensors[record.expert]
        return frozenset(
            name
            for name, f in self._layout.layout_of(record).fields.items()
            if not name.endswith(".scale") and f.keeps(_DTYPES[stored[record.prefix + name].dtype])
        )

    def close(self) -> None:
        """Ends the threads and closes the files."""
        self._pool.shutdown()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _plan(self, record: Record) -> list[_Run]:
        """The reads that give `record`, in the order of the files."""
        stored = self._tensors[record.expert]
        fields = [f for name, f in self._layout.layout_of(record).fields.items() if not name.endswith(".scale")]
        sources = sorted(
            ((stored[record.prefix + f.name], f) for f in fields), key=lambda pair: (pair[0].file, pair[0].begin)
        )
        runs: list[_Run] = []
        for tensor, f in sources:
            dtype = _DTYPES[tensor.dtype]
            grain = dtype.itemsize * (f.shape[1] if f.scaled else 1)
            count = (tensor.end - tensor.begin) // grain
            first = 0
            while first < count:
                begin = tensor.begin + first * grain
                run = runs[-1] if runs else None
                if (
                    run is None
                    or run.file != tensor.file
                    or begin - run.end > _GAP
                    or begin + grain > run.begin + self._chunk
                ):
                    run = _Run(tensor.file, begin, begin)
                    runs.append(run)
                last = min(count, first + max((run.begin + self._chunk - begin) // grain, 1))
                run.end = tensor.begin + last * grain
                run.pieces.append(_Piece(f, dtype, first, last, begin, run.end))
                first = last
        return runs

    def _fetch(self, run: _Run, layout: RecordLayout, target: np.ndarray) -> None:
        staging = self._staging.get()
        try:
            start = run.begin - run.begin % _PAGE
            self._files[run.file].read(staging, start, run.end)
            for piece in run.pieces:
                _place(piece, staging[piece.begin - start : piece.end - start], layout, target)
        finally:
            self._staging.put(staging)


def read_rate(file: Path, *, seconds: float) -> float | None:
    """Bytes a second of reads as a `RecordReader` alone on its node does them, without what it does with the bytes.

    Args:
        file: read from its beginning.
        seconds: no read begins later than so long after the first of each thread, which do not count.

    Returns:
        None where the file system has no reads past the page cache, or the file cannot be read.
    """
    try:
        size = file.stat().st_size // _CHUNK * _CHUNK
        opened = _File(file, direct=True)
    except OSError:
        return None
    if not opened.direct:
        opened.close()
        return None
    staging: SimpleQueue[np.ndarray] = SimpleQueue()
    for _ in range(_THREADS):
        staging.put(own_memory(_CHUNK))

    def read(start: int) -> int:
        if time.perf_counter() > end:
            return 0
        buffer = staging.get()
        try:
            opened.read(buffer, start, start + _CHUNK)
        finally:
            staging.put(buffer)
        return _CHUNK

    try:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="read-rate") as pool:
            end = math.inf
            wait([pool.submit(read, start) for start in range(0, _THREADS * _CHUNK, _CHUNK)])
            began = time.perf_counter()
            end = began + seconds
            done = sum(pool.map(read, range(_THREADS * _CHUNK, size, _CHUNK)))
            return done / (time.perf_counter() - began) if done else None
    except TrainingFailed:
        return None
    finally:
        opened.close()


class _File:
    """A file of weights, open for reading from many threads."""

    def __init__(self, path: Path, *, direct: bool) -> None:
        self._path = path
        self.direct = direct and self._open(os.O_DIRECT)
        if not self.direct:
            self._open(0)

    def _open(self, flags: int) -> bool:
        """Opens the file; False if its file system refuses `flags`, at once or at the first read."""
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | flags)
        except OSError:
            if not flags:
                raise
            return False
        if flags:
            try:
                os.preadv(self._descriptor, [mmap.mmap(-1, _PAGE)], 0)
            except OSError:
                os.close(self._descriptor)
                return False
        return True

    def read(self, buffer: np.ndarray, start: int, end: int) -> None:
        """Reads at least the bytes from `start`, the beginning of a page, to `end` into `buffer`."""
        length = -(-(end - start) // _PAGE) * _PAGE
        done = 0
        while start + done < end:
            try:
                got = os.preadv(self._descriptor, [buffer.data[done:length]], start + done)
            except OSError as error:
                raise TrainingFailed(f"{self._path} cannot be read any more: {error.strerror}.") from error
            # A direct read that was cut short goes on at the beginning of a page.
            step = got if start + done + got >= end else got - got % _PAGE
            if step == 0:
                raise TrainingFailed(f"{self._path} ends before byte {end}: it was changed while the run read it.")
            done += step
        if not self.direct:
            os.posix_fadvise(self._descriptor, start, length, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._descriptor)


def _place(piece: _Piece, raw: np.ndarray, layout: RecordLayout, target: np.ndarray) -> None:
    """Puts the bytes of a piece where they belong in a record."""
    f = piece.field
    if piece.dtype == f.dtype == f.values:
        # numpy copies in this thread and without the interpreter's lock; torch would start threads of its own.
        begin = f.begin + piece.first * f.dtype.itemsize
        target[begin : begin + len(raw)] = raw
        return
    if raw.ctypes.data % piece.dtype.itemsize:
        raw = raw.copy()
    values = torch.from_numpy(raw).view(piece.dtype)
    record = torch.from_numpy(target)
    if f.scaled:
        rows, scales = quantize_rows(values.view(-1, f.shape[1]), f.dtype)
        layout.view(f, record)[piece.first : piece.last] = rows
        layout.view(layout.fields[f"{f.name}.scale"], record)[piece.first : piece.last] = scales
    else:
        layout.view(f, record).view(-1)[piece.first : piece.last] = values.to(f.values)


def _checked_tensors(folder: Path, layout: TeacherLayout) -> dict[str, StoredTensor]:
    """The tensors in a transformer folder, held against the layout."""
    stored = component_tensors(folder, "diffusion_pytorch_model")
    expected = {name: f.shape for name, f in layout.outer.fields.items()}
    for block in range(layout.blocks):
        for name, f in layout.block.fields.items():
            if not name.endswith(".scale"):
                expected[f"blocks.{block}.{name}"] = f.shape
    for name, shape in expected.items():
        if name not in stored:
            raise ConfigError(
                f"{folder} holds no tensor {name}, which its config.json describes: config and weights are of "
                "different models."
            )
        if stored[name].shape != shape:
            raise ConfigError(
                f"{folder}: tensor {name} has shape {list(stored[name].shape)}, but its config.json describes "
                f"{list(shape)}: config and weights are of different models."
            )
        if stored[name].dtype not in _DTYPES:
            raise ConfigError(
                f"{folder}: tensor {name} is stored as {stored[name].dtype}; a teacher's weights must be one of "
                f"{', '.join(_DTYPES)}."
            )
    unexpected = sorted(stored.keys() - expected.keys())
    if unexpected:
        raise ConfigError(
            f"{folder} has {len(unexpected)} tensors that its config.json does not describe, such as {unexpected[0]}: "
            "config and weights are of different models."
        )
    return stored
