"""kubectl for the cluster tests: objects as dictionaries, and waits that end with what was seen."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.tools.build import tool

# Of each kind: each takes kubectl some requests, and it sends five in a second.
MOST_DESCRIBED = 20


class KubectlError(RuntimeError):
    """kubectl ended with an error; the message is what it printed."""


@dataclass(frozen=True)
class Kubectl:
    """One cluster and a namespace of it; where that is empty, objects say theirs."""

    kubeconfig: Path
    namespace: str = "default"

    def run(self, *arguments: str, stdin: str | None = None, seconds: float = 120) -> str:
        """kubectl's standard output.

        Raises:
            KubectlError: it ended with another code than 0.
        """
        command = [str(tool("kubectl")), f"--kubeconfig={self.kubeconfig}"]
        command += [f"--namespace={self.namespace}"] if self.namespace else []
        done = subprocess.run([*command, *arguments], input=stdin, capture_output=True, text=True, timeout=seconds)
        if done.returncode:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *arguments: str) -> dict[str, Any]:
        return json.loads(self.run("get", *arguments, "-o", "json"))

    def items(self, *arguments: str) -> list[dict[str, Any]]:
        return self.get(*arguments)["items"]

    def apply(self, *objects: dict[str, Any]) -> None:
        self.run("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))

    def conditions(self, job: str) -> dict[str, dict[str, Any]]:
        """A PyTorchJob's conditions that are true, by type."""
        status = self.get("pytorchjob", job).get("status") or {}
        return {item["type"]: item for item in status.get("conditions") or [] if item["status"] == "True"}

    def wait_for_end(self, job: str, seconds: float) -> dict[str, dict[str, Any]]:
        """Waits until a PyTorchJob has succeeded or failed; returns its conditions."""

        def ended() -> dict[str, dict[str, Any]] | None:
            conditions = self.conditions(job)
            return conditions if {"Succeeded", "Failed"} & set(conditions) else None

        return wait_until(ended, seconds, f"PyTorchJob {job} to end")

    def describe(self) -> str:
        """Pods, jobs, events and logs of the namespace, for a failed test's output."""
        kinds = [self._try("get", kind, "-o", "name").split() for kind in ("pods", "pytorchjobs")]
        described = [name for names in kinds for name in names[:MOST_DESCRIBED]]
        parts = [self._try("get", "pytorchjobs,pods,pvc,jobs", "-o", "wide"), self._try("describe", *described)]
        for name in described:
            if name.startswith("pod/"):
                parts += [f"--- logs of {name}", self._try("logs", name, "--all-containers", "--tail=60")]
                parts += [f"--- logs of {name}'s last try", self._try("logs", name, "--previous", "--tail=60")]
        return "\n".join(parts)

    def _try(self, *arguments: str) -> str:
        try:
            return self.run(*arguments)
        except (KubectlError, subprocess.TimeoutExpired) as error:
            return str(error)


def wait_until(found: Callable[[], Any], seconds: float, what: str, every: float = 0.5) -> Any:
    """Asks again until `found()` gives something.

    Raises:
        TimeoutError: it never did; the message has `what`.
    """
    deadline = time.monotonic() + seconds
    while not (value := found()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(every)
    return value
