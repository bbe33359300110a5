"""What `helm test` runs in the trainer's image: the operator's API is there, and the mounted claims can be written."""

from __future__ import annotations

import os
import ssl
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def failures(folders: Sequence[str], account: Path = _ACCOUNT) -> list[str]:
    """What is wrong, a sentence each.

    Args:
        folders: where claims are mounted.
        account: folder with the pod's token and the API server's certificate.
    """
    found = [sentence for folder in folders if (sentence := _not_writable(folder))]
    try:
        _ask("/apis/kubeflow.org/v1", account)
    except urllib.error.HTTPError as error:
        found.append(
            f"the API server answers {error.code} for kubeflow.org/v1: the Kubeflow training operator is not installed."
        )
    except OSError as error:
        found.append(f"the API server does not answer: {error}.")
    return found


def _not_writable(folder: str) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        return f"{folder} cannot be written by user {os.getuid()}: {error.strerror}; see podSecurityContext.fsGroup."
    return ""


def _ask(path: str, account: Path) -> None:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    address = f"[{host}]" if ":" in host else host
    token = (account / "token").read_text()
    request = urllib.request.Request(f"https://{address}:{port}{path}", headers={"Authorization": f"Bearer {token}"})
    trusted = ssl.create_default_context(cafile=str(account / "ca.crt"))
    with urllib.request.urlopen(request, timeout=10, context=trusted):
        pass


if __name__ == "__main__":
    wrong = failures(sys.argv[1:])
    print("\n".join(wrong) or "the image runs, claims can be written, and the training operator's API is there")
    sys.exit(1 if wrong else 0)
