"""Which errors of a rank mean that memory ran out, and which only look so. Works on types and texts, without torch.

torch, NCCL and the C library say it in many ways, and an error may be wrapped in others, so the whole chain is read.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from wandistill.errors import OutOfMemory, WandistillError
from wandistill.units import format_bytes


class Kind(str, Enum):
    """What ran out."""

    CUDA = "cuda"  # a GPU's memory
    HOST = "host"  # this process may take no more host memory
    CGROUP = "cgroup"  # the limit of the container
    SHM = "shm"  # /dev/shm
    PINNED = "pinned"  # host memory that a GPU may reach


@dataclass(frozen=True)
class Cause:
    """An error that means that memory ran out."""

    kind: Kind
    message: str


# Words of torch's CUDA allocator, and of CUDA's own errors as torch, cuBLAS, cuDNN and NCCL pass them on; lower case.
_CUDA = ("cuda out of memory", "cublas_status_alloc_failed", "cudnn_status_alloc_failed")
_CUDA_ERRORS = (
    "cuda error: out of memory",
    "cuda failure 2 'out of memory'",
    "cuda failure 'out of memory'",
    "cudaerrormemoryallocation",
)
_PINNED = ("cudahostalloc", "cudahostregister", "pin_memory", "pinned memory")
_HOST = ("defaultcpuallocator", "not enough memory: you tried to allocate", "cannot allocate memory", "std::bad_alloc")
_SHM = ("/dev/shm", "shared memory", "torch_shm", "shmem")
_FULL = ("no space left on device", "bus error")
# A GPU with this much left did not run out: the error is what a failed registration of host memory left behind, which
# the next kernel reports as its own.
_PLENTY_SHARE, _PLENTY = 0.1, 2 << 30


def cause_of(error: BaseException, free: int | None = None, total: int | None = None) -> Cause | None:
    """Why `error` means that memory ran out; None if it does not.

    Args:
        free: bytes that the GPU has free, and `total` bytes that it has, where they are known.
    """
    for one in _chain(error):
        if isinstance(one, WandistillError) and not isinstance(one, OutOfMemory):  # it has its own reason and advice
            return None
        found = _cause(one)
        if found is None:
            continue
        if found.kind is Kind.CUDA and _sticky(one, free, total):
            continue
        return found
    return None


def _chain(error: BaseException) -> list[BaseException]:
    """An error and what it came of."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return found


def _cause(error: BaseException) -> Cause | None:
    first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    text = str(error).lower()

    def said(words: tuple[str, ...]) -> bool:
        return any(word in text for word in words)

    if isinstance(error, OutOfMemory):
        return Cause(Kind.HOST, first)
    if isinstance(error, OSError):
        name = str(error.filename or "")
        if error.errno == errno.ENOSPC and (Path("/dev/shm") in Path(name).parents or said(_SHM)):
            return Cause(Kind.SHM, first)
        return Cause(Kind.HOST, first) if error.errno == errno.ENOMEM else None
    if isinstance(error, MemoryError):
        return Cause(Kind.HOST, first)
    if not isinstance(error, RuntimeError):
        return None
    if said(_PINNED) and (said(_CUDA) or said(_CUDA_ERRORS) or "out of memory" in text):
        return Cause(Kind.PINNED, first)
    if type(error).__name__ == "OutOfMemoryError" or said(_CUDA) or said(_CUDA_ERRORS):
        return Cause(Kind.CUDA, first)
    if said(_SHM) and said(_FULL):
        return Cause(Kind.SHM, first)
    return Cause(Kind.HOST, first) if said(_HOST) else None


def _sticky(error: BaseException, free: int | None, total: int | None) -> bool:
    """Whether an error of CUDA, not of torch's allocator, speaks of memory that is there in plenty."""
    if free is None or total is None or type(error).__name__ == "OutOfMemoryError":
        return False
    return free > max(_PLENTY, int(_PLENTY_SHARE * total))


def sticky_note(free: int, total: int) -> str:
    """What to tell of an error that only looks like a lack of memory."""
    return (
        f"CUDA reports a lack of memory with {format_bytes(free)} of {format_bytes(total)} free: it is what a failed "
        "registration of host memory left behind, not the GPU's memory."
    )
