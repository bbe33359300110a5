"""What `helm test` runs in the trainer's image: the operator's API is there, claims can be written and shared.

A claim is given as FOLDER, where it is mounted, or as FOLDER=NAME if more than one pod will mount it.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wandistill.kube.shared_claims import unshared

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def failures(claims: Sequence[str], pods: int = 1, account: Path = _ACCOUNT) -> list[str]:
    """What is wrong, a sentence each.

    Args:
        claims: FOLDER or FOLDER=NAME.
        pods: that will mount the claims with a name.
        account: folder with the pod's token, namespace and the API server's certificate.
    """
    folders = [claim.partition("=")[0] for claim in claims]
    shared = [name for claim in claims if (name := claim.partition("=")[2])]
    found = [_not_writable(folder) for folder in folders]
    try:
        _ask("/apis/kubeflow.org/v1", account)
        found += [_not_shared(name, pods, account) for name in shared]
    except urllib.error.HTTPError as error:
        found.append(
            f"the API server answers {error.code} for kubeflow.org/v1: the Kubeflow training operator is not installed."
        )
    except OSError as error:
        found.append(f"the API server does not answer: {error}.")
    return [sentence for sentence in found if sentence]


def _not_shared(name: str, pods: int, account: Path) -> str:
    namespace = (account / "namespace").read_text().strip()
    try:
        claim = _ask(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}", account)
    except urllib.error.HTTPError as error:
        return f"claim {name} cannot be looked at: the API server answers {error.code}."
    return unshared(name, claim["spec"].get("accessModes") or [], pods)


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


if __name__ == "__main__":
    wrong = failures(sys.argv[2:], int(sys.argv[1]))
    print("\n".join(wrong) or "the image runs, claims can be written, and the training operator's API is there")
    sys.exit(1 if wrong else 0)
