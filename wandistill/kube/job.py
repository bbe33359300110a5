"""The objects of a release, from checked values: PyTorchJobs, their ConfigMaps, claims and the network policy. Pure.

The chart's templates give the same objects; a test holds them equal. A job's name ends in a digest of what reaches its
pods, so a changed value makes a new job and an unchanged one leaves the running job alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from wandistill.errors import ConfigError
from wandistill.kube import pods
from wandistill.kube.gojson import digest, to_json
from wandistill.kube.pools import JobPools, check_training, find_teacher, jobs
from wandistill.kube.rules import check_values
from wandistill.kube.sizes import PoolSizes, pool_sizes, prepare_sizes
from wandistill.kube.values import is_name
from wandistill.launch.prepared import TRIES

GROUP, VERSION, PLURAL = "kubeflow.org", "v1", "pytorchjobs"
LONGEST_NAME = 50
INSTANCE = "app.kubernetes.io/instance"
ANNOTATION = "wandistill.dev"
Object = dict[str, Any]


def render(values: Mapping[str, Any], release: str) -> list[Object]:
    """All objects of a release, in the order in which they are made.

    Raises:
        ConfigError: values that break a rule; DoesNotFit among them.
    """
    check_values(values)
    check_training(values["training"])
    made = [*claims(values, release), *_network(values, release)]
    for job in jobs(values):
        made += job_objects(values, release, job)
    return made


def job_objects(values: Mapping[str, Any], release: str, job: JobPools) -> list[Object]:
    """The ConfigMap of a job, the job that prepares it where that is wanted, and the PyTorchJob."""
    sized = pool_sizes(values, job)
    files = _files(values, job, sized)
    body = _spec(values, release, job, sized)
    hashed = {"files": files, "spec": _hashed(body)}
    prepares = values["prepare"]["enabled"]
    before = pods.prepare_spec(values, release, prepare_sizes(find_teacher(values["teacher"]["model"])))
    if prepares:
        hashed["prepare"] = before
    name = job_name(release, job.pool.name, digest(hashed, 8))
    labels = _labels(release)
    queue = values["job"]["queue"]
    keep = {"helm.sh/resource-policy": "keep"} if values["job"]["onChange"] == "keep" else {}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "labels": labels} | ({"annotations": keep} if keep else {}),
            "immutable": True,
            "data": files,
        },
        *([_prepare_job(values, release, name, before, keep)] if prepares else []),
        {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "PyTorchJob",
            "metadata": {
                "name": name,
                "labels": labels | ({"kueue.x-k8s.io/queue-name": queue} if queue else {}),
                "annotations": {
                    f"{ANNOTATION}/pool": job.pool.name,
                    f"{ANNOTATION}/placement": sized.placement,
                    f"{ANNOTATION}/memory": sized.pod.memory,
                    **({f"{ANNOTATION}/prepare": f"{name}-{pods.PREPARE}"} if prepares else {}),
                    **keep,
                },
            },
            "spec": _named(body, name),
        },
    ]


def _prepare_job(values: Mapping[str, Any], release: str, name: str, spec: Object, keep: dict[str, str]) -> Object:
    labels = _labels(release) | {f"{ANNOTATION}/{pods.PREPARE}": name}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": f"{name}-{pods.PREPARE}",
            "labels": _labels(release),
            **({"annotations": keep} if keep else {}),
        },
        "spec": {
            "backoffLimit": TRIES - 1,
            "template": {
                "metadata": {
                    "labels": labels | values["podLabels"],
                    "annotations": pods.ANNOTATIONS | values["podAnnotations"],
                },
                "spec": _named(spec, name),
            },
        },
    }


def job_name(release: str, pool: str, suffix: str) -> str:
    """The name of a job.

    Raises:
        ConfigError: it is too long for the names of its pods, or no DNS-1035 label.
    """
    name = f"{release}-{pool}-{suffix}"
    if len(name) > LONGEST_NAME:
        raise ConfigError(
            f"the job's name {name} has {len(name)} characters, but pods' names leave {LONGEST_NAME}: take a shorter "
            "name of the release or of the pool."
        )
    if not is_name(name):
        raise ConfigError(
            f"the job's name {name} is not lower-case letters, digits and '-' that begin with a letter: take another "
            "name of the release."
        )
    return name


def claims(values: Mapping[str, Any], release: str) -> list[Object]:
    """The claims that the chart makes."""
    wanted = {"output": values["output"]["create"], "cache": values["teacher"]["cache"]["create"]}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {
                "name": f"{release}-{name}",
                "labels": _labels(release),
                "annotations": {"helm.sh/resource-policy": "keep"},
            },
            "spec": {
                "accessModes": create["accessModes"],
                "resources": {"requests": {"storage": create["size"]}},
                **({"storageClassName": create["storageClass"]} if create["storageClass"] else {}),
            },
        }
        for name, create in wanted.items()
        if create["enabled"]
    ]


def _network(values: Mapping[str, Any], release: str) -> list[Object]:
    if not values["networkPolicy"]["enabled"]:
        return []
    peers = {"podSelector": {"matchLabels": {INSTANCE: release}}}
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": release, "labels": _labels(release)},
            "spec": {
                "podSelector": {"matchLabels": {INSTANCE: release}},
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [{"from": [peers]}, {"ports": [{"port": "metrics", "protocol": "TCP"}]}],
                "egress": [{}],
            },
        }
    ]


def _files(values: Mapping[str, Any], job: JobPools, sized: PoolSizes) -> dict[str, str]:
    """What is mounted at /etc/wandistill."""
    files = {"train.yaml": _config(values, job, sized)}
    if values["student"]["custom"]:
        files["student.yaml"] = to_json(values["student"]["custom"]) + "\n"
    if values["data"]["prompts"]:
        files["prompts.txt"] = "\n".join(values["data"]["prompts"]) + "\n"
    return files


def _config(values: Mapping[str, Any], job: JobPools, sized: PoolSizes) -> str:
    """The file of --config: each value as JSON, which is YAML."""
    settings: dict[str, Any] = {key.replace("-", "_"): value for key, value in values["training"].items()}
    settings |= sized.settings
    settings |= {
        "teacher_path": _teacher_path(values),
        "student_config": "/etc/wandistill/student.yaml"
        if values["student"]["custom"]
        else values["student"]["config"],
        "teacher_device_strategy": sized.placement,
        "teacher_dtype": job.pool.dtype,
        "device": "cuda" if job.pool.on_gpu else "cpu",
    }
    optional = {"data_path": _data_path(values), "teacher_revision": values["teacher"]["revision"]}
    settings |= {name: value for name, value in optional.items() if value}
    return "".join(f"{key}: {to_json(settings[key])}\n" for key in sorted(settings))


def _teacher_path(values: Mapping[str, Any]) -> str:
    teacher = values["teacher"]
    if teacher["path"]:
        return f"/cache/{teacher['path']}"
    model = find_teacher(teacher["model"])
    return model.repositories[0] if model.repositories else model.name


def _data_path(values: Mapping[str, Any]) -> str:
    data = values["data"]
    if data["prompts"]:
        return "/etc/wandistill/prompts.txt"
    if data["configMap"]["name"]:
        return f"/data/{data['configMap']['key']}"
    return f"/data/{data['path']}" if data["existingClaim"] else ""


def _spec(values: Mapping[str, Any], release: str, job: JobPools, sized: PoolSizes) -> Object:
    options = values["job"]
    policy: Object = {
        "cleanPodPolicy": options["cleanPodPolicy"],
        "suspend": bool(options["suspend"] or options["queue"]),
    }
    if options["deadlineSeconds"]:
        policy["activeDeadlineSeconds"] = options["deadlineSeconds"]
    if options["ttlSecondsAfterFinished"] >= 0:
        policy["ttlSecondsAfterFinished"] = options["ttlSecondsAfterFinished"]
    replicas = {
        "Master": _replica(
            values,
            release,
            job.master.name,
            1,
            pods.pod_spec(values, release, job.master, sized.master),
        )
    }
    if job.workers is not None:
        spec = pods.pod_spec(values, release, job.workers, sized.pod)
        replicas["Worker"] = _replica(values, release, job.workers.name, job.worker_count, spec)
    return {"nprocPerNode": str(job.master.ranks), "runPolicy": policy, "pytorchReplicaSpecs": replicas}


def _scrape(values: Mapping[str, Any]) -> dict[str, str]:
    """Annotations by which a Prometheus without its operator finds the metrics, where they are wanted."""
    if not values["metrics"]["annotations"]:
        return {}
    port = str(values["metrics"]["port"])
    return {"prometheus.io/scrape": "true", "prometheus.io/port": port, "prometheus.io/path": "/metrics"}


def _replica(values: Mapping[str, Any], release: str, pool: str, count: int, spec: Object) -> Object:
    return {
        "replicas": count,
        "restartPolicy": "ExitCode",
        "template": {
            "metadata": {
                "labels": _labels(release) | {f"{ANNOTATION}/pool": pool} | values["podLabels"],
                "annotations": pods.ANNOTATIONS | _scrape(values) | values["podAnnotations"],
            },
            "spec": spec,
        },
    }


def _hashed(body: Object) -> Object:
    """The part of a job's spec that its name stands for: without the pods' labels and their metrics port."""
    replicas = {}
    for role, replica in body["pytorchReplicaSpecs"].items():
        spec = dict(replica["template"]["spec"])
        container = {key: value for key, value in spec["containers"][0].items() if key != "ports"}
        container["env"] = [entry for entry in container["env"] if entry["name"] != pods.METRICS_PORT]
        replicas[role] = {"replicas": replica["replicas"], "spec": spec | {"containers": [container]}}
    return replicas


def _named(body: Any, name: str) -> Any:
    return json.loads(json.dumps(body).replace(pods.JOB, name))


def _labels(release: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "wandistill", INSTANCE: release}
