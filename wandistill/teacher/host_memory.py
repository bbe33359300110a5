"""Host memory for weights, and making it reachable for a GPU's copy engine."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch
from torch import Tensor

# Larger registrations were seen to fail; see `pin`.
_LARGEST_REGISTRATION = 64 << 30


# What `pin` registered, by address, in bytes.
_registered: dict[int, int] = {}


def pinned_bytes() -> int:
    """Host memory that this process has registered with its GPU."""
    return sum(_registered.values())


def own_memory(size: int) -> np.ndarray:
    """`size` bytes, uint8, from the beginning of a page, that go back to the kernel when they are let go.

    Private, so that the kernel counts them as this process's own, and not among what ranks share.
    """
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


class HostBuffers:
    """`count` buffers of `size` bytes of this process's own memory, pinned for `device` if that is a GPU and it can be.

    torch's pinned allocator rounds each up to a power of two; this takes what was asked for.
    """

    def __init__(self, size: int, count: int, device: torch.device) -> None:
        self._memory = torch.from_numpy(own_memory(size * count))
        self._device = device
        self._pinned = pin(self._memory, device)
        self.tensors = list(self._memory.split(size))  # uint8 [size] each

    def close(self) -> None:
        """Unpins them; the memory is free once no tensor is left."""
        if self._pinned:
            unpin(self._memory, self._device)
            self._pinned = False
        self.tensors.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)


def pin(memory: Tensor, device: torch.device) -> bool:
    """Registers host memory with `device`, so that its copies run at full speed and beside compute.

    In pieces of at most 64 GiB. Returns whether all of it is registered; else none is: a limit on locked memory, a
    file system whose pages cannot be pinned, or a device that is no GPU.
    """
    if device.type != "cuda":
        return False
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        for done, (address, size) in enumerate(_pieces(memory)):
            if runtime.cudaHostRegister(address, size, 0) != runtime.cudaError.success:
                for registered, _ in _pieces(memory)[:done]:
                    runtime.cudaHostUnregister(registered)
                _clear_cuda_error(device)
                return False
    _registered[memory.data_ptr()] = memory.numel()
    return True


def unpin(memory: Tensor, device: torch.device) -> None:
    """Takes back `pin`, which must have returned True. No copy from `memory` may be under way."""
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        for address, _ in _pieces(memory):
            runtime.cudaHostUnregister(address)
    _registered.pop(memory.data_ptr(), None)


def _pieces(memory: Tensor) -> list[tuple[int, int]]:
    """Address and bytes of the pieces that are registered apart."""
    address, size = memory.data_ptr(), memory.numel()
    return [
        (address + begin, min(_LARGEST_REGISTRATION, size - begin)) for begin in range(0, size, _LARGEST_REGISTRATION)
    ]


def _clear_cuda_error(device: torch.device) -> None:
    """Forgets the error that a failed registration leaves, which the next kernel would report as its own.

    torch does not expose cudaGetLastError, but calls it after each launch.
    """
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
