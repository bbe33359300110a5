"""What `helm test` runs in the trainer's image: the operator's API is there, claims bind, can be shared and written.

Two pods run it one after the other. `claims NAME=PODS ...` asks the API server about claims that so many pods will
mount; `folders PATH ...` runs where they are mounted, which a pod waits for without a word where a claim is not bound.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wandistill.kube.shared_claims import unshared

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# Seconds in which a storage class makes a volume, or else says why it doesn't.
_PATIENCE = 60.0
_INTERVAL = 1.0
# Events of a claim that is bound as soon as a pod mounts it, and not before.
_WAITS_FOR_PODS = ("WaitForFirstConsumer", "WaitForPodScheduled")


def claim_failures(claims: Mapping[str, int], account: Path = _ACCOUNT, patience: float = _PATIENCE) -> list[str]:
    """What is wrong with the operator and with claims, a sentence each.

    Args:
        claims: name -> pods that will mount it.
        account: folder with the pod's token, namespace and the API server's certificate.
        patience: seconds to wait until claims are bound.
    """
    try:
        _ask("/apis/kubeflow.org/v1", account)
        deadline = time.monotonic() + patience
        found = [_claim_failure(name, pods, account, deadline) for name, pods in claims.items()]
    except urllib.error.HTTPError as error:
        return [
            f"the API server answers {error.code} for kubeflow.org/v1: the Kubeflow training operator is not installed."
        ]
    except OSError as error:
        return [f"the API server does not answer: {error}."]
    return [sentence for sentence in found if sentence]


def folder_failures(folders: Sequence[str]) -> list[str]:
    """Which folders this process may not write, a sentence each."""
    return [sentence for sentence in map(_not_writable, folders) if sentence]


def _claim_failure(name: str, pods: int, account: Path, deadline: float) -> str:
    namespace = (account / "namespace").read_text().strip()
    path = f"/api/v1/namespaces/{namespace}"
    while True:
        try:
            claim = _ask(f"{path}/persistentvolumeclaims/{name}", account)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return f"claim {name} is not in namespace {namespace}: make it, or name one that is there."
            return f"claim {name} cannot be looked at: the API server answers {error.code}."
        if problem := unshared(name, claim["spec"].get("accessModes") or [], pods):
            return problem
        phase = claim.get("status", {}).get("phase", "")
        if phase == "Bound":
            return ""
        events = _ask(f"{path}/events?fieldSelector=involvedObject.name%3D{name}", account)["items"]
        last: dict[str, Any] = max(events, key=lambda event: event.get("lastTimestamp") or "", default={})
        if last.get("reason") in _WAITS_FOR_PODS:
            return ""
        if time.monotonic() > deadline:
            why = last.get("message") or "the cluster does not say why"
            return f"claim {name} is {phase}, not bound: {why}."
        time.sleep(_INTERVAL)


def _not_writable(folder: str) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        return f"{folder} cannot be written by user {os.getuid()}: {error.strerror}; see podSecurityContext.fsGroup."
    return ""


def _ask(path: str, account: Path) -> Any:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    address = f"[{host}]" if ":" in host else host
    token = (account / "token").read_text()
    request = urllib.request.Request(f"https://{address}:{port}{path}", headers={"Authorization": f"Bearer {token}"})
    trusted = ssl.create_default_context(cafile=str(account / "ca.crt"))
    with urllib.request.urlopen(request, timeout=10, context=trusted) as answer:
        return json.load(answer)


def main(what: str, *arguments: str) -> int:
    """Prints what is wrong, and says by its exit code whether something is."""
    if what == "claims":
        pairs = (argument.split("=") for argument in arguments)
        wrong = claim_failures({name: int(pods) for name, pods in pairs})
        fine = "the image runs, the training operator's API is there, and claims can be mounted"
    else:
        wrong, fine = folder_failures(arguments), f"{', '.join(arguments)} can be written"
    print("\n".join(wrong) or fine)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
