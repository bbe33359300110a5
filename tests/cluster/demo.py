"""The demo's preset on the cluster, two pods of two ranks: installed once, and read by every test that can share it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tests.cluster.chart import Release, training
from tests.cluster.claims import Claim
from tests.cluster.clusters import Cluster
from tests.cluster.kubectl import Kubectl

CLAIM = "demo-output"
SETTINGS = training(checkpoint_interval=2)


@dataclass(frozen=True)
class Demo:
    """The release and its job, which runs or has ended."""

    cluster: Cluster
    kubectl: Kubectl
    release: Release
    job: str
    values: dict[str, Any]

    @classmethod
    def install(cls, cluster: Cluster, kubectl: Kubectl, **more: Any) -> Demo:
        release, values = Release(cluster, kubectl, "demo"), {"training": SETTINGS, **more}
        return cls(cluster, kubectl, release, release.install(**values), values)

    def wait(self) -> dict[str, dict[str, Any]]:
        """The job's conditions after its end."""
        return self.kubectl.wait_for_end(self.job, seconds=420)

    def losses(self) -> dict[int, float]:
        """The finished run's losses by step."""
        conditions = self.wait()
        assert "Succeeded" in conditions, conditions
        return self.output.losses(self.job)

    @cached_property
    def output(self) -> Claim:
        """The claim that the run is on."""
        return Claim.open(self.cluster, self.kubectl, CLAIM)
