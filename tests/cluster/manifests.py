"""Plain objects that the cluster tests apply: a PyTorchJob without the chart, claims, a pod that reads a claim."""

from __future__ import annotations

from typing import Any

# The chart's user and group: a kubelet gives a volume to one group at a time, so that pods of another on that node may
# not write to it, and only its owner may write into the folder that a run made.
ID = 1000
SECURITY = {
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
POD_SECURITY = {
    "runAsUser": ID,
    "runAsGroup": ID,
    "fsGroup": ID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}


def claim(name: str, storage_class: str, size: str = "1Gi") -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": storage_class,
            "resources": {"requests": {"storage": size}},
        },
    }


def config_map(name: str, **files: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": files}


def pytorch_job(
    name: str, image: str, arguments: list[str], claim_name: str, workers: int, ranks: int, memory: str = "3Gi"
) -> dict[str, Any]:
    """A job of one Master and some Workers whose ranks torchrun starts, as it would be written by hand.

    The ConfigMap `data` is mounted at /data.
    """
    torchrun = ["python", "-m", "torch.distributed.run", "--rdzv_backend=static", "-m", "wandistill.train"]
    container = {
        "name": "pytorch",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": [*torchrun, *arguments],
        "env": [
            {"name": "HOME", "value": "/tmp"},
            {"name": "OMP_NUM_THREADS", "value": "1"},
            {"name": "TORCHINDUCTOR_CACHE_DIR", "value": "/tmp/inductor"},
        ],
        "resources": {"requests": {"cpu": "200m", "memory": memory}, "limits": {"memory": memory}},
        "securityContext": SECURITY,
        "volumeMounts": [
            {"name": "output", "mountPath": "/output"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "data", "mountPath": "/data"},
        ],
    }
    replica = {
        "restartPolicy": "ExitCode",
        "template": {
            "spec": {
                "automountServiceAccountToken": False,
                "securityContext": POD_SECURITY,
                "containers": [container],
                "volumes": [
                    {"name": "output", "persistentVolumeClaim": {"claimName": claim_name}},
                    {"name": "tmp", "emptyDir": {}},
                    {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
                    {"name": "data", "configMap": {"name": "data"}},
                ],
            }
        },
    }
    replicas = {"Master": {"replicas": 1, **replica}}
    if workers:
        replicas["Worker"] = {"replicas": workers, **replica}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "nprocPerNode": str(ranks),
            "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": 1},
            "pytorchReplicaSpecs": replicas,
        },
    }


def reader(image: str, claim_name: str) -> dict[str, Any]:
    """A pod that has a claim at /output and waits to be asked."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "reader"},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "securityContext": {**POD_SECURITY, "runAsNonRoot": True},
            "containers": [
                {
                    "name": "reader",
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["sleep", "3600"],
                    "env": [{"name": "HOME", "value": "/tmp"}],
                    # Without a request it would get what the machine's other processes leave.
                    "resources": {"requests": {"cpu": "500m"}},
                    "securityContext": SECURITY,
                    "volumeMounts": [
                        {"name": "output", "mountPath": "/output"},
                        {"name": "tmp", "mountPath": "/tmp"},
                    ],
                }
            ],
            "volumes": [
                {"name": "output", "persistentVolumeClaim": {"claimName": claim_name}},
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }
