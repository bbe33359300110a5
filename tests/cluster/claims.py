"""What a run left on its claim, read by a pod that mounts it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.cluster.clusters import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.manifests import reader

LOAD = """
import json, sys, torch
from diffusers import WanPipeline
pipeline = WanPipeline.from_pretrained(sys.argv[1])
images = pipeline("a red circle", height=32, width=32, num_frames=1, num_inference_steps=1, output_type="pt").frames
print(json.dumps({"finite": bool(torch.isfinite(images).all()),
                  "parameters": sum(p.numel() for p in pipeline.transformer.parameters())}))
"""


@dataclass(frozen=True)
class Claim:
    """A claim and the pod that reads it."""

    kubectl: Kubectl

    @classmethod
    def open(cls, cluster: Cluster, kubectl: Kubectl, name: str) -> Claim:
        kubectl.apply(reader(cluster.train_image, name))
        kubectl.run("wait", "--for=condition=Ready", "pod/reader", "--timeout=90s")
        return cls(kubectl)

    def run(self, *command: str, seconds: float = 120) -> str:
        return self.kubectl.run("exec", "reader", "--", *command, seconds=seconds)

    def json(self, path: str) -> Any:
        return json.loads(self.run("cat", f"/output/{path}"))

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """A run's metrics.jsonl, a dictionary a step."""
        return [json.loads(line) for line in self.run("cat", f"/output/{run}/metrics.jsonl").splitlines()]

    def losses(self, run: str) -> dict[int, float]:
        """A run's losses by step."""
        return {line["step"]: line["loss"] for line in self.metrics(run)}

    def load_student(self, run: str) -> dict[str, Any]:
        """Opens the student in stock diffusers and draws one picture with it."""
        return json.loads(self.run("python", "-c", LOAD, f"/output/{run}/student", seconds=300).splitlines()[-1])

    def evaluate(self, run: str) -> dict[str, Any]:
        """Compares the student with the teacher on a few captions, and renews the report; returns the figures."""
        command = ("wandistill", "evaluate", f"/output/{run}", "--json", "--count", "8", "--device", "cpu")
        return json.loads(self.run(*command, seconds=300))
