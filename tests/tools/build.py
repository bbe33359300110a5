"""The Go programs that the chart and cluster tests run, pinned and built once: `python -m tests.tools.build helm`.

Each folder beside this file is a Go module that requires one project at one version; its go.sum has the sums of all
that is built. The programs lie in `${XDG_CACHE_HOME:-~/.cache}/wandistill/tools/<folder>-<hash>`, where the hash is
over go.mod, go.sum and the build's flags: a new pin is built anew, and an old program is never taken for it.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODULES = Path(__file__).resolve().parent
LDFLAGS = "-s -w"
KUBERNETES = "v1.34.4"

# Program -> (folder, Go package, further linker flags).
_KUBE = f"-X k8s.io/component-base/version.gitVersion={KUBERNETES}"
PROGRAMS: dict[str, tuple[str, str, str]] = {
    **{
        name: ("kubernetes", f"k8s.io/kubernetes/cmd/{name}", _KUBE)
        for name in (
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kube-proxy",
            "kubelet",
            "kubectl",
        )
    },
    "training-operator": ("operator", "github.com/kubeflow/training-operator/cmd/training-operator.v1", ""),
    "helm": ("helm", "helm.sh/helm/v3/cmd/helm", ""),
    "kubeconform": ("kubeconform", "github.com/yannh/kubeconform/cmd/kubeconform", ""),
    "kind": ("kind", "sigs.k8s.io/kind", ""),
    "etcd": ("etcd", "go.etcd.io/etcd/server/v3", ""),
    "coredns": ("coredns", "wandistill.test/coredns", ""),
    "kwok": ("kwok", "sigs.k8s.io/kwok/cmd/kwok", ""),
    "kueue": ("kueue", "sigs.k8s.io/kueue/cmd/kueue", ""),
    "registry": ("registry", "wandistill.test/registry", ""),
    "pause": ("pause", "wandistill.test/pause", ""),
    "prometheus": ("prometheus", "github.com/prometheus/prometheus/cmd/prometheus", ""),
    "promtool": ("prometheus", "github.com/prometheus/prometheus/cmd/promtool", ""),
    "prometheus-operator": (
        "prometheus-operator",
        "github.com/prometheus-operator/prometheus-operator/cmd/operator",
        "",
    ),
    "prometheus-config-reloader": (
        "prometheus-operator",
        "github.com/prometheus-operator/prometheus-operator/cmd/prometheus-config-reloader",
        "",
    ),
}
# By folder. Of the ways to find targets the one that is used; the others are the SDKs of a dozen clouds.
TAGS = {"prometheus": "remove_all_sd,enable_kubernetes_sd"}
HELM = "v3.22"


class BuildError(RuntimeError):
    """A program could not be built; the message says which and how."""


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wandistill"


def bin_dir(folder: str) -> Path:
    """Where the programs of one module folder lie, built or not."""
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum"):
        digest.update((MODULES / folder / name).read_bytes())
    digest.update(repr(sorted(row for row in PROGRAMS.items() if row[1][0] == folder)).encode())
    digest.update(TAGS.get(folder, "").encode())
    return cache_dir() / "tools" / f"{folder}-{digest.hexdigest()[:12]}"


def tool(name: str) -> Path:
    """The program, built if it is not in the cache yet. Several processes may ask at once: one builds.

    A helm on PATH is taken where it has the pinned minor version.

    Raises:
        BuildError: no Go on PATH, or the build failed.
    """
    if name == "helm" and (found := _helm_on_path()):
        return found
    path = bin_dir(PROGRAMS[name][0]) / name
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return path if path.exists() else build(name)


@functools.cache
def _helm_on_path() -> Path | None:
    found = shutil.which("helm")
    command = [found or "", "version", "--template", "{{.Version}}"]
    if found and subprocess.run(command, capture_output=True, text=True).stdout.startswith(HELM):
        return Path(found)
    return None


def build(name: str, *flags: str) -> Path:
    """Builds the program into the cache. With `-mod=mod` Go first completes go.mod and go.sum after a new pin."""
    folder, package, ldflags = PROGRAMS[name]
    if shutil.which("go") is None:
        raise BuildError(
            f"{name} is not in {bin_dir(folder)} and there is no `go` on PATH to build it: install Go 1.26."
        )
    began = time.monotonic()
    (cache_dir() / "tools").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir() / "tools") as made:
        command = [
            "go",
            "build",
            *flags,
            "-trimpath",
            f"-tags={TAGS.get(folder, '')}",
            "-ldflags",
            f"{LDFLAGS} {ldflags}".strip(),
            "-o",
            f"{made}/{name}",
        ]
        done = subprocess.run(
            [*command, package],
            cwd=MODULES / folder,
            env={**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise BuildError(f"{' '.join(command)} {package} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        path = bin_dir(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(f"{made}/{name}", path)
    print(f"built {name} in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return path


def module_files(folder: str, module: str, part: str) -> Path:
    """A folder of the source of the module that a program is built from: what its project ships beside the program."""
    target = bin_dir(folder) / Path(part).name
    if not target.exists():
        done = subprocess.run(
            ["go", "mod", "download", "-json", module], cwd=MODULES / folder, capture_output=True, text=True
        )
        if done.returncode:
            raise BuildError(f"go mod download of {module} ended with {done.returncode}:\n{done.stderr}")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as made:
            copied = Path(made) / target.name
            shutil.copytree(Path(json.loads(done.stdout)["Dir"]) / part, copied)
            subprocess.run(["chmod", "-R", "u+w", made], check=True)
            os.replace(copied, target)
    return target


def operator_manifests() -> Path:
    """The training operator's own manifests and CRDs."""
    return module_files("operator", "github.com/kubeflow/training-operator", "manifests")


def kwok_stages() -> Path:
    """What kwok does with nodes and pods, a stage in each file, as its project ships it."""
    return module_files("kwok", "sigs.k8s.io/kwok", "kustomize/stage")


def prometheus_crds() -> Path:
    """The definitions of the Prometheus operator's objects, each in a file."""
    module = "github.com/prometheus-operator/prometheus-operator"
    return module_files("prometheus-operator", module, "example/prometheus-operator-crd")


def kueue_manifests() -> Path:
    """Kueue's own manifests and CRDs."""
    return module_files("kueue", "sigs.k8s.io/kueue", "config")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*PROGRAMS, []], metavar="PROGRAM", help="none: all of them")
    parser.add_argument("--pin", action="store_true", help="complete go.mod and go.sum after a change of versions")
    args = parser.parse_args()
    for name in args.names or PROGRAMS:
        print(build(name, "-mod=mod") if args.pin else tool(name))


if __name__ == "__main__":
    main()
