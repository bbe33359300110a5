"""One copy of a teacher's records in a node's memory, mapped by all its ranks.

The copy is a file in /dev/shm, or in `--share_dir`, or memory without a name (memfd) where only /dev/shm is small. The
ranks fill it together, each its records straight from the safetensors. Every record's room is reserved before it is
touched, so that a lack of it is an error here and no SIGBUS in the middle of a step; that runs ahead of the reading,
since a kernel that clears fresh memory may be no faster than a disk. The copy loses its name as soon as all have it
open, so a killed run leaves nothing behind. Peak memory is the copy and the readers' pieces.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from wandistill.errors import DoesNotFit, WandistillError
from wandistill.launch.memory import available_bytes
from wandistill.teacher.base import Expert
from wandistill.teacher.host_memory import pin, unpin
from wandistill.teacher.layout import Record, TeacherLayout
from wandistill.teacher.record_reader import RecordReader
from wandistill.units import format_bytes

if TYPE_CHECKING:
    from wandistill.config import TrainConfig
    from wandistill.train.distributed import World

_log = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
# Bytes reserved at a time: a signal makes the kernel begin a reservation in memory anew, and again if more come.
_RESERVATION = 64 << 20


@dataclass(frozen=True)
class SharePlace:
    """Where the shared copy goes, and what its file is called."""

    directory: Path | None  # of `--share_dir`; None: /dev/shm, or memory without a name
    run: str  # torchrun's name of the run
    owner: str  # the same for every try of one run on one machine, and for no other run
    node: str  # torchrun's number of the node

    @classmethod
    def of(cls, config: TrainConfig) -> SharePlace:
        """The place for a run; two runs never share an output directory, so that tells them apart."""
        identity = f"{socket.gethostname()}\0{Path(config.output_dir).absolute()}"
        return cls(
            Path(config.share_dir) if config.share_dir else None,
            re.sub(r"[^A-Za-z0-9.]+", ".", os.environ.get("TORCHELASTIC_RUN_ID", "none"))[:64],
            hashlib.sha256(identity.encode()).hexdigest()[:12],
            os.environ.get("GROUP_RANK", "0"),
        )

    @property
    def name(self) -> str:
        """The file's name."""
        return f"wandistill-{self.run}-{self.owner}-{self.node}-{os.getpid()}"

    def remove_leftovers(self) -> list[Path]:
        """Removes what earlier tries of this run left when they were killed between making the file and unlinking it:
        a container that restarts in place keeps /dev/shm, and is charged for it. Returns the files.

        A living try holds a lock on its file.
        """
        removed = []
        for file in (self.directory or _SHARED_MEMORY).glob(f"wandistill-*-{self.owner}-{self.node}-*"):
            # Gone meanwhile, or locked.
            with contextlib.suppress(FileNotFoundError, BlockingIOError), file.open("rb") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.unlink()
                removed.append(file)
        return removed


class HostCopy:
    """Records in memory that the ranks of a node share.

    Args:
        begins: where each record begins in `memory`.
        exact: the tensors of each record, by their names within it, that have the numbers of the files.
        pinned_for: the GPU that `memory` is registered with.
    """

    def __init__(
        self,
        memory: Tensor,
        begins: dict[Record, int],
        layout: TeacherLayout,
        exact: dict[Record, frozenset[str]],
        pinned_for: torch.device | None,
    ) -> None:
        self._memory = memory
        self._begins = begins
        self._layout = layout
        self._exact = exact
        self._pinned_for = pinned_for

    @property
    def pinned(self) -> bool:
        """Whether this rank's GPU copies from it at full speed; the same on all ranks of the run."""
        return self._pinned_for is not None

    def view(self, record: Record) -> Tensor:
        """The bytes of `record`, uint8."""
        begin = self._begins[record]
        return self._memory[begin : begin + self._layout.layout_of(record).size]

    def weight(self, expert: Expert, name: str) -> Tensor | None:
        """A tensor of the expert's files where it lies, or None; see `Teacher.weight`."""
        record, own = Record.of(expert, name)
        if own not in self._exact.get(record, ()):
            return None
        layout = self._layout.layout_of(record)
        return layout.view(layout.fields[own], self.view(record))

    def close(self) -> None:
        """Gives this rank's mapping back; the memory is free once no view is left on any rank."""
        if self._pinned_for is not None:
            unpin(self._memory, self._pinned_for)
            self._pinned_for = None
        self._memory = torch.empty(0, dtype=torch.uint8)


def load_host_copy(
    records: Sequence[Record],
    layout: TeacherLayout,
    reader: RecordReader,
    world: World,
    place: SharePlace,
    device: torch.device,
) -> HostCopy:
    """Loads `records` once per node, to be computed with on `device`. All ranks of the run call this together.

    Raises:
        DoesNotFit: on every rank, where a node lacks the room; the message says what to change.
    """
    ends = list(accumulate(layout.layout_of(record).size for record in records))
    begins = {record: end - layout.layout_of(record).size for record, end in zip(records, ends, strict=True)}
    share = range(
        world.local_rank * len(records) // world.local_size, (world.local_rank + 1) * len(records) // world.local_size
    )
    spans = [(begins[records[index]], ends[index]) for index in share]
    descriptor, directory = _open_together(ends[-1], world, place)
    try:
        memory = torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, ends[-1]), np.uint8))

        def fill() -> None:
            pool = ThreadPoolExecutor(1, thread_name_prefix="reserve")
            try:
                reserved = [pool.submit(_reserve, descriptor, span, ends[-1], directory) for span in spans]
                for index, (begin, end), room in zip(share, spans, reserved, strict=True):
                    room.result()
                    reader.read(records[index], memory[begin:end])
            finally:
                pool.shutdown(cancel_futures=True)

        try:
            _together(world, fill)
        except WandistillError:
            del memory  # whoever keeps the error keeps this frame
            raise
    finally:
        os.close(descriptor)
    pinned = device.type == "cuda" and _pin_in_turn(memory, world, device)
    exact = {record: reader.exact(record) for record in records}
    return HostCopy(memory, begins, layout, exact, device if pinned else None)


def _open_together(size: int, world: World, place: SharePlace) -> tuple[int, Path | None]:
    """A descriptor of the node's copy, whose name is gone, and its directory (None: memory without a name)."""
    made: _Made | WandistillError | None = None
    try:
        if world.local_rank == 0:
            try:
                made = _make(size, place)
            except WandistillError as error:
                made = error
        answers = world.gather((place.node, made))
        _raise_first([answer for _, answer in answers])
        theirs = next(answer for node, answer in answers if node == place.node and answer is not None)
        opened: list[int] = []
        try:
            _together(world, lambda: opened.append(_open(theirs)))
        except WandistillError:
            for descriptor in opened:
                os.close(descriptor)
            raise
        return opened[0], theirs.directory
    finally:
        if isinstance(made, _Made):
            if made.directory is not None:
                Path(made.path).unlink()
            os.close(made.descriptor)


def _together(world: World, action: Callable[[], None]) -> None:
    """Does `action` on every rank; the first error of any rank is every rank's error."""
    found: WandistillError | None = None
    try:
        action()
    except WandistillError as error:
        found = error
    _raise_first(world.gather(found))


def _raise_first(answers: Iterable[object]) -> None:
    for answer in answers:
        if isinstance(answer, WandistillError):
            raise answer


@dataclass(frozen=True)
class _Made:
    """The copy's file as the rank that made it tells the others."""

    path: str
    directory: Path | None  # None: memory without a name
    descriptor: int  # of the maker


def _make(size: int, place: SharePlace) -> _Made:
    """Makes the copy's file, empty."""
    for file in place.remove_leftovers():
        _log.info(f"removed {file}, left by an earlier try of this run")
    room = available_bytes()
    if place.directory is None and size > room:
        raise DoesNotFit(
            f"The teacher's host copy needs {format_bytes(size)} of memory, and {format_bytes(room)} are available "
            "here: take --teacher_device_strategy disk, --teacher_dtype int8 (half of bfloat16), or more memory."
        )
    directory = place.directory or _SHARED_MEMORY
    free = _free_bytes(directory)
    if size > free:
        if place.directory is not None:
            raise _too_small(size, free, place.directory)
        # Memory without a name is not bounded by the size of /dev/shm, and the check above found room.
        descriptor = os.memfd_create(place.name)
        os.ftruncate(descriptor, size)
        return _Made(f"/proc/{os.getpid()}/fd/{descriptor}", None, descriptor)
    path = directory / place.name
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.ftruncate(descriptor, size)
    return _Made(str(path), directory, descriptor)


def _open(made: _Made) -> int:
    try:
        return os.open(made.path, os.O_RDWR)
    except OSError as error:
        raise DoesNotFit(
            f"The teacher's host copy, {made.path}, cannot be opened by another rank of its node ({error.strerror}): "
            "give a directory with room as --share_dir."
        ) from error


def _reserve(descriptor: int, span: tuple[int, int], size: int, directory: Path | None) -> None:
    """Takes the memory or disk space for the bytes of `span`."""
    try:
        for begin in range(span[0], span[1], _RESERVATION):
            os.posix_fallocate(descriptor, begin, min(_RESERVATION, span[1] - begin))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        status = os.fstatvfs(descriptor)
        raise _too_small(size, status.f_bavail * status.f_frsize, directory) from error


def _free_bytes(path: Path | str) -> int:
    try:
        status = os.statvfs(path)
    except OSError as error:
        raise DoesNotFit(f"--share_dir {path}: {error.strerror}; give a directory that is there.") from error
    return status.f_bavail * status.f_frsize


def _too_small(size: int, free: int, directory: Path | None) -> DoesNotFit:
    settings = (
        "enlarge /dev/shm (docker: --shm-size; Kubernetes: sizeLimit of the emptyDir with medium Memory), or give a "
        "directory with room as --share_dir"
        if directory in (_SHARED_MEMORY, None)
        else "give another directory as --share_dir, or leave it out to use /dev/shm"
    )
    return DoesNotFit(
        f"The teacher's host copy needs {size} bytes ({format_bytes(size)}), and {directory or 'memory'} has {free} "
        f"({format_bytes(free)}) free: {settings}."
    )


def _pin_in_turn(memory: Tensor, world: World, device: torch.device) -> bool:
    """Registers the copy with every rank's GPU, or with none; ranks that register at once can be refused."""
    pinned = False
    for turn in range(world.local_size):
        if turn == world.local_rank:
            pinned = pin(memory, device)
        world.barrier()
    everywhere = not world.any(not pinned)
    if pinned and not everywhere:
        unpin(memory, device)
    if not everywhere:
        _log.warning("note: the teacher's host copy cannot be pinned for the GPUs; it goes through small buffers.")
    return everywhere
