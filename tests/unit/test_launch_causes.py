"""Which errors mean that memory ran out, however they are wrapped, and which only look so."""

from __future__ import annotations

import errno

import pytest

from wandistill.errors import DoesNotFit, PeerLost
from wandistill.launch.causes import Kind, cause_of

GIB = 2**30


class OutOfMemoryError(RuntimeError):
    """As torch calls its own."""


class AcceleratorError(RuntimeError):
    """As torch calls CUDA's errors."""


def wrapped(error: BaseException) -> BaseException:
    try:
        try:
            raise error
        except BaseException as inner:
            raise RuntimeError("Caught in backward of block 3") from inner
    except RuntimeError as outer:
        return outer


CASES = [
    (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8"), Kind.CUDA),
    (AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), Kind.CUDA),
    (RuntimeError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"), Kind.CUDA),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), Kind.CUDA),
    (AcceleratorError("CUDA error: out of memory\n in cudaHostRegister(ptr, size)"), Kind.PINNED),
    (MemoryError(), Kind.HOST),
    (
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        Kind.HOST,
    ),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), Kind.HOST),
    (OSError(errno.ENOSPC, "No space left on device", "/dev/shm/wandistill-x"), Kind.SHM),
    (RuntimeError("unable to write to file </torch_12_3>: No space left on device (28), shared memory"), Kind.SHM),
]


@pytest.mark.parametrize(("error", "kind"), CASES, ids=lambda value: str(value)[:40])
def test_a_lack_of_memory_is_recognised_also_where_it_is_wrapped(error, kind):
    assert cause_of(error).kind is kind
    assert cause_of(wrapped(error)).kind is kind


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape mismatch"),
        OSError(errno.ENOSPC, "No space left on device", "/data/checkpoints/step-10"),
        DoesNotFit("needs 30 GiB of memory, 20 GiB are there"),
        PeerLost("rank 1 is gone"),
        ValueError("CUDA out of memory is what this test says"),
    ],
    ids=str,
)
def test_other_errors_are_not(error):
    assert cause_of(error) is None


def test_what_a_failed_registration_left_behind_is_told_apart_by_the_memory_that_is_free():
    sticky = AcceleratorError("CUDA error: out of memory")
    assert cause_of(sticky, free=60 * GIB, total=80 * GIB) is None
    assert cause_of(sticky, free=GIB // 4, total=80 * GIB).kind is Kind.CUDA
    # The allocator knows what it asked for: a single large tensor may not fit into much.
    assert cause_of(OutOfMemoryError("CUDA out of memory. Tried to allocate 70 GiB"), 60 * GIB, 80 * GIB) is not None
