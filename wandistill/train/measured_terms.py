"""What torch has allocated on a rank's device, by the terms that the plan has too.

What lasts is counted from its tensors (`wandistill.models.held`), gradients from the parameters that have one.
Activations are measured: the growth of what torch has allocated since a step, or other work of the rank, began, beyond
that of what is counted, together with the batches and answers that the step before left for it. So whatever was there
as the work began and nobody counts is `unattributed`: a library's workspace, and what leaks from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from wandistill.metrics.names import MEASURED_TERMS
from wandistill.metrics.snapshot import Sample
from wandistill.models.held import block_bytes, held_bytes, plain_tensors


class MeasuredTerms:
    """The terms of one rank.

    `begin` is for the thread that trains; all else may be called from another while that one goes on.

    Args:
        allocated: bytes that torch has allocated on `device` now; it must not wait for the device.
    """

    def __init__(self, device: torch.device, allocated: Callable[[], int]) -> None:
        self._device, self._allocated = device, allocated
        # Bytes of the gradients that are there.
        self.gradients: Callable[[], int] = lambda: 0
        self._before = 0  # bytes that were there, and not accounted for, as the running work began

    def begin(self, handed_on: object = None) -> None:
        """A step begins, or other work.

        Args:
            handed_on: what of the work before is for this one; its tensors on the device count as activations.
        """
        counted = sum(self.counted().values()) + _bytes_in(handed_on, self._device)
        self._before = max(self._allocated() - counted, 0)

    def counted(self) -> dict[str, int]:
        """Bytes by term of what is counted from tensors."""
        return held_bytes(self._device) | {"gradients": self.gradients()}

    def samples(self, allocated: int, before: Mapping[str, int]) -> dict[str, list[Sample]]:
        """The samples, which add up to `allocated`.

        Args:
            allocated: as torch's allocator just told it.
            before: `counted()` just before that. What has come or gone since then counts with the activations: this
                thread cannot tell on which side of the allocator's answer that was.
        """
        after = self.counted()
        terms = {term: min(before.get(term, 0), after.get(term, 0)) for term in MEASURED_TERMS}
        others = allocated - sum(terms.values())
        terms["activations"] += max(others - self._before, 0)
        return {
            "wandistill_rank_gpu_memory_measured_bytes": [({"term": term}, size) for term, size in terms.items()],
            "wandistill_rank_gpu_memory_unattributed_bytes": [({}, min(others, self._before))],
        }


def _bytes_in(found: object, device: torch.device) -> int:
    """Bytes of the storages on `device` that the tensors in `found` have, each counted once."""
    plain = [plain for tensor in _tensors_in(found) for plain in plain_tensors(tensor) if plain.device == device]
    return sum({tensor.untyped_storage().data_ptr(): block_bytes(tensor) for tensor in plain}.values())


def _tensors_in(found: object) -> Iterator[Tensor]:
    """The tensors in dataclasses, mappings and sequences, however deep."""
    if isinstance(found, Tensor):
        yield found
        return
    parts: list[object] = []
    if is_dataclass(found) and not isinstance(found, type):
        parts = [getattr(found, field.name) for field in fields(found)]
    elif isinstance(found, Mapping):
        parts = list(found.values())
    elif isinstance(found, Sequence) and not isinstance(found, str | bytes):
        parts = list(found)
    for part in parts:
        yield from _tensors_in(part)
