"""Stands before runc: a container of an image that carries the mark shares the machine's /usr and the checkout.

A real image of the trainer is 6 GB, and importing it takes minutes. Here it is a few files, and the rest is bound
read-only when the container is created. Nothing of this shows in a pod, so a namespace that refuses hostPath volumes
takes it as it takes the real image. Run by containerd as its BinaryName; standard library only.
"""

import json
import os
import sys
from pathlib import Path


def main() -> None:
    arguments = sys.argv[1:]
    if "create" in arguments:
        bundle = Path(arguments[arguments.index("--bundle") + 1])
        share(bundle / "config.json", **json.loads(os.environ["WANDISTILL_E2E_SHARE"]))
    os.execvp("runc", ["runc", *arguments])


def share(config: Path, mark: str, paths: dict[str, str]) -> None:
    """Adds paths of the machine, by where they go, as read-only mounts to a bundle whose environment has the mark."""
    spec = json.loads(config.read_text())
    if f"{mark}=1" not in spec["process"].get("env", []):
        return
    # First, so that the pod's own mounts, /dev/shm and volumes among them, lie above.
    spec["mounts"] = [
        {"destination": inside, "source": outside, "type": "bind", "options": ["rbind", "ro"]}
        for inside, outside in paths.items()
    ] + spec["mounts"]
    config.write_text(json.dumps(spec))


if __name__ == "__main__":
    main()
