"""Memory as terms: a name, bytes, and the formula with its numbers in, so that a sum can be explained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from wandistill.units import format_bytes


@dataclass(frozen=True)
class Term:
    """Bytes of one kind on a rank's device, or on a node."""

    name: str
    size: int
    formula: str = ""
    allocated: bool = True  # by torch's allocator, so in max_memory_allocated

    def to_json(self) -> dict[str, object]:
        """As JSON."""
        return {"term": self.name, "bytes": self.size, "formula": self.formula, "allocated": self.allocated}


def total(terms: Iterable[Term]) -> int:
    """The sum of `terms`."""
    return sum(term.size for term in terms)


@dataclass(frozen=True)
class Phases:
    """What is live in each phase of a run; the peak is that of the largest."""

    phases: Mapping[str, Sequence[Term]]

    @cached_property
    def phase(self) -> str:
        """The phase of the peak."""
        return max(self.phases, key=lambda name: total(self.phases[name]))

    @property
    def terms(self) -> Sequence[Term]:
        """The terms at the peak, those of no bytes left out."""
        return [term for term in self.phases[self.phase] if term.size]

    @cached_property
    def peak(self) -> int:
        """Bytes at the peak."""
        return total(self.phases[self.phase])

    @property
    def peak_allocated(self) -> int:
        """What torch.cuda.max_memory_allocated will show: the largest sum of what torch's allocator holds."""
        return max(total(term for term in terms if term.allocated) for terms in self.phases.values())

    def size(self, name: str) -> int:
        """Bytes of the term `name` at the peak; 0 if it is not there."""
        return total(term for term in self.terms if term.name == name)

    def to_json(self) -> dict[str, object]:
        """The peak as JSON."""
        return {
            "peak_bytes": self.peak,
            "peak_allocated_bytes": self.peak_allocated,
            "phase": self.phase,
            "terms": [term.to_json() for term in self.terms],
        }


def count_bytes(count: int, each: float, what: str) -> str:
    """A formula such as `997.3 M parameters x 4 B = 3.7 GiB`."""
    return f"{count / 1e6:,.1f} M {what} x {each:g} B = {format_bytes(count * each)}"
