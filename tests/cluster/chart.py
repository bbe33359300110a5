"""The chart, installed with Helm as a user would, and small values that keep a run short."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.clusters import Cluster
from tests.cluster.kubectl import Kubectl
from tests.tools.build import tool

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "wandistill"
STEPS = 8
PARTS = ("repository", "tag")
# A few, since each one's embedding and rollout is made before the first step.
PROMPTS = [
    f"a {size} {color} {shape} on a gray background"
    for size in ("small", "large")
    for color in ("red", "blue")
    for shape in ("circle", "square")
]


class HelmError(RuntimeError):
    """helm ended with an error; the message is what it printed."""


@dataclass(frozen=True)
class Release:
    """One release of the chart in a namespace of a cluster."""

    cluster: Cluster
    kubectl: Kubectl
    name: str

    def install(self, preset: str | None = "cpu-demo", **values: Any) -> str:
        """Installs the preset with values over it; returns the name of its one job."""
        self._helm("install", preset, values)
        return self.job()

    def install_without_job(self, preset: str, **values: Any) -> None:
        """Installs a preset that trains nothing."""
        self._helm("install", preset, values)

    def upgrade(self, preset: str | None = "cpu-demo", **values: Any) -> str:
        return self._helm("upgrade", preset, values)

    def uninstall(self) -> None:
        self._run("uninstall", self.name, "--wait")

    def test(self) -> str:
        """Runs `helm test`."""
        return self._run("test", self.name, "--timeout=150s")

    def jobs(self) -> list[str]:
        label = f"app.kubernetes.io/instance={self.name}"
        return [item["metadata"]["name"] for item in self.kubectl.items("pytorchjobs", "-l", label)]

    def job(self) -> str:
        (name,) = self.jobs()
        return name

    def _helm(self, action: str, preset: str | None, values: dict[str, Any]) -> str:
        files = ["-f", str(CHART / "presets" / f"{preset}.yaml")] if preset else []
        given = json.dumps(small(self.cluster) | values)
        return self._run(action, self.name, str(CHART), *files, "-f", "-", stdin=given)

    def _run(self, *arguments: str, stdin: str | None = None) -> str:
        command = [
            str(tool("helm")),
            f"--kubeconfig={self.kubectl.kubeconfig}",
            f"--namespace={self.kubectl.namespace}",
        ]
        done = subprocess.run([*command, *arguments], input=stdin, capture_output=True, text=True, timeout=180)
        if done.returncode:
            raise HelmError(done.stderr.strip())
        return done.stdout


def computed(cluster: Cluster, folder: Path, preset: str = "cpu-demo", **values: Any) -> dict[str, Any]:
    """Values of pools outside the chart's tables, with the sizes that `wandistill values` computes for them."""
    file = folder / "values.yaml"
    file.write_text(json.dumps(small(cluster) | values))
    command = [sys.executable, "-m", "wandistill", "values", "-f", str(CHART / "presets" / f"{preset}.yaml")]
    done = subprocess.run([*command, "-f", str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return values | yaml.safe_load(done.stdout)


def small(cluster: Cluster) -> dict[str, Any]:
    """Values of every job here: this cluster's images, and few prompts."""
    return {"image": images(cluster), "data": {"prompts": PROMPTS}}


def images(cluster: Cluster) -> dict[str, Any]:
    """The chart's `image` for the images of this cluster."""
    names = {"train": cluster.train_image, "control": cluster.control_image}
    return {key: dict(zip(PARTS, name.rsplit(":", 1), strict=True)) for key, name in names.items()}


def training(**settings: Any) -> dict[str, Any]:
    """Settings of a run of a few steps, which a machine of two cores does in a minute."""
    return {
        "batch_size": 1,
        "rollout_steps": 2,
        "max_steps": STEPS,
        "warmup_steps": 2,
        "checkpoint_interval": 4,
        "save_samples": False,
    } | settings
