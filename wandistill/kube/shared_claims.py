"""Claims that several pods of a job mount, which must be ReadWriteMany."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SHARED = "ReadWriteMany"


def claims_of(job: Mapping[str, Any]) -> tuple[int, list[str]]:
    """The number of a job's pods, and the claims that they mount."""
    replicas = job["spec"]["pytorchReplicaSpecs"].values()
    names = [
        volume["persistentVolumeClaim"]["claimName"]
        for replica in replicas
        for volume in replica["template"]["spec"].get("volumes") or []
        if "persistentVolumeClaim" in volume
    ]
    return sum(replica["replicas"] for replica in replicas), list(dict.fromkeys(names))


def unshared(claim: str, modes: Sequence[str], pods: int) -> str:
    """What is wrong with a claim that so many pods mount; empty if nothing is."""
    if pods < 2 or SHARED in modes or not modes:
        return ""
    return (
        f"claim {claim} is {', '.join(modes)}, but {pods} pods mount it: on more than one node it must be {SHARED}, "
        "with a storage class that has it."
    )
