"""What lasts in the memory of devices, by the terms of the metrics: whoever makes it notes it here.

It is noted once, by its storage, and counts until that is freed, whoever frees it: nothing has to be taken back. What
comes and goes within a step (activations, gradients) is not noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# torch's allocator on a GPU gives multiples of this many bytes (kMinBlockSize in c10/core/AllocatorConfig.h).
_LEAST_BLOCK = 512


class _Holding(NamedTuple):
    storage: StorageWeakRef
    term: str
    size: int


# By device and by the storage's address, which no other gets while there is a weak reference to it.
_held: dict[torch.device, dict[int, _Holding]] = {}
# Asked for thousands of storages at a look, so without the two lookups of StorageWeakRef.expired.
_expired = torch.UntypedStorage._expired


def hold(term: str, tensors: Iterable[Tensor]) -> None:
    """Notes that `tensors` last, as a term of `metrics.names.MEASURED_TERMS`; what is noted twice counts once."""
    for holdings in _held.values():
        for address in [address for address in holdings if _expired(address)]:
            del holdings[address]
    for tensor in tensors:
        for plain in plain_tensors(tensor):
            if not plain.is_meta:
                storage = StorageWeakRef(plain.untyped_storage())
                holding = _Holding(storage, term, block_bytes(plain))
                _held.setdefault(plain.device, {})[storage.cdata] = holding


def held_bytes(device: torch.device) -> dict[str, int]:
    """Bytes on `device` of what was noted and is still there, by term; may be asked from any thread."""
    found: dict[str, int] = {}
    # Listed in one go, during which no other thread runs.
    for address, (_, term, size) in list(_held.get(device, {}).items()):
        if not _expired(address):
            found[term] = found.get(term, 0) + size
    return found


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """What has the memory of a tensor: of a sharded one this rank's part, of an 8-bit moment its parts."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor):  # not the mesh of a sharded one
                yield from plain_tensors(part)
    else:
        yield tensor


def block_bytes(tensor: Tensor) -> int:
    """What torch's allocator gives for the storage of a plain tensor."""
    return -(-tensor.untyped_storage().nbytes() // _LEAST_BLOCK) * _LEAST_BLOCK
