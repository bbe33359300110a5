"""The values of the chart: the tree, and a values file laid over its defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wandistill.config import PLACEMENTS
from wandistill.config import json_schema as config_schema
from wandistill.errors import ConfigError
from wandistill.kube.fields import (
    Field,
    boolean,
    check,
    complete,
    defaults,
    free,
    integer,
    json_schema,
    listing,
    merge,
    names,
    quantity,
    record,
    text,
)
from wandistill.planner.request import TEACHER_DTYPES

TOPOLOGIES = ("single", "independent", "teacher-and-students")
ON_CHANGE = ("refuse", "keep", "replace")
_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"


def _create(doc: str, size: str) -> Field:
    return record(
        doc,
        enabled=boolean("whether the chart makes the claim; it is kept when the release is uninstalled", False),
        size=quantity("its size", size),
        storageClass=text("its storage class; empty: the cluster's default"),
        accessModes=listing(
            "ReadWriteMany is needed as soon as a job has more than one pod",
            text("", choices=("ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany")),
            ("ReadWriteOnce",),
        ),
    )


def _image(doc: str) -> Field:
    return record(
        doc,
        repository=text("where you pushed it, such as registry.example.com/wandistill"),
        tag=text("its tag; empty: the chart's version"),
        digest=text("its digest, which wins over the tag", pattern="^(sha256:[0-9a-f]{64})?$"),
        pullPolicy=text("when it is pulled", "IfNotPresent", choices=("Always", "IfNotPresent", "Never")),
        pullSecrets=listing("names of secrets of the registry", text("")),
    )


POOL = record(
    "nodes that are alike",
    nodes=integer("pods, one on each node", 1, minimum=1),
    gpusPerNode=integer("GPUs of a pod, one rank each; 0: a pool without GPU", 0, minimum=0),
    gpu=text("GPU by its name in the catalogue, such as rtx-3090, l40s or h100-80gb"),
    gpuResource=text("resource that is asked for; a MIG profile takes gpusPerNode 1 and gpuMemory", "nvidia.com/gpu"),
    gpuMemory=quantity("memory of each GPU in place of the catalogue's, such as 40Gi"),
    placement=text("where the teacher lives; auto: the fastest that fits", "auto", choices=PLACEMENTS),
    dtype=text(
        "the teacher's dtype; auto: bfloat16, or float32 without a GPU", "auto", choices=("auto", *TEACHER_DTYPES)
    ),
    processesPerNode=integer("ranks of a pod without GPU", 1, minimum=1),
    cpus=quantity("CPU request of a pod; empty: from the tables"),
    threads=integer("OMP_NUM_THREADS of a rank; 0: from the tables", 0, minimum=0),
    nodeSelector=free("labels of the nodes; set, it takes the place of the catalogue's product labels"),
    tolerations=listing("beside nvidia.com/gpu:NoSchedule"),
    affinity=free("in place of the chart's own affinity"),
    topologySpreadConstraints=listing("how pods spread"),
    priorityClassName=text("priority class"),
    runtimeClassName=text("runtime class, such as nvidia"),
    resources=free("requests and limits that are laid over the computed ones"),
)

COMPUTED = record(
    "numbers of one pool",
    inputs=text("what they were computed for"),
    placement=text("the placement"),
    settings=free("settings of the trainer that the plan relies on"),
    memory=text("memory request and limit"),
    shm=text("size of /dev/shm"),
    stepSeconds=text("seconds of a step as planned"),
    teacherMemory=text("memory of the teacher's pod in teacher-and-students"),
    teacherShm=text("/dev/shm of that pod"),
)

VALUES = record(
    "",
    **{
        "global": record("shared with other charts", imageRegistry=text("registry in front of every image")),
        "topology": text(
            "single: one pool, one job; independent: a job for each pool; teacher-and-students: one job, the teacher "
            "on the pool `teacher`, students on the pool `students`",
            "single",
            choices=TOPOLOGIES,
        ),
    },
    teacher=record(
        "the model that is distilled",
        model=text("catalogue name such as wan2.2-t2v-a14b, a hub id, or embedded for the shipped one", "embedded"),
        revision=text("branch, tag or commit of the weights on the hub; empty: the main branch"),
        path=text("folder of the weights within the cache claim, in place of the hub"),
        tokenSecret=record("secret with the hub's token", name=text("its name"), key=text("its key", "token")),
        cache=record(
            "claim for the weights, mounted at /cache; they are fetched once and shared by all jobs that use it",
            existingClaim=text("name of a claim that is there"),
            create=_create("a claim that the chart makes", "200Gi"),
        ),
        endpoint=text("mirror of the hub, such as https://hf-mirror.example.com"),
        proxy=record(
            "proxies for the download",
            http=text("HTTP_PROXY"),
            https=text("HTTPS_PROXY"),
            noProxy=text("NO_PROXY"),
        ),
        caBundle=record(
            "certificates of a private authority",
            configMap=text("name of the ConfigMap"),
            key=text("its key", "ca.crt"),
        ),
        offline=boolean("never ask the hub: the cache must hold the weights", False),
    ),
    student=record(
        "the model that is trained",
        config=text("half, quarter or 1b", "half", choices=("half", "quarter", "1b")),
        custom=free("layers, heads, ffn and blocks of a student of your own; set, it takes the place of config"),
    ),
    data=record(
        "prompts; the embedded teacher brings its own",
        prompts=listing("inline, one text each", text("")),
        configMap=record("a ConfigMap with prompts", name=text("its name"), key=text("its key", "prompts.txt")),
        existingClaim=text("claim with prompts or captioned images"),
        path=text("file or folder within the claim", "prompts.txt"),
    ),
    prepare=record(
        "a job without GPU before each run: it fetches the teacher and encodes the prompts, and the run waits for it",
        enabled=boolean("whether it is made; its claims are then mounted by more than one pod", False),
        waitSeconds=integer(
            "seconds after which a run that waits ends with the command that prepares it", 86400, minimum=1
        ),
        cpus=quantity("its CPU request; empty: from the tables"),
        nodeSelector=free("labels of its node"),
        tolerations=listing("its tolerations"),
        affinity=free("in place of the chart's own affinity"),
        resources=free("requests and limits that are laid over the computed ones"),
    ),
    training=free(
        "settings of `wandistill train` as its --config file takes them; placement and dtype belong to pools"
    ),
    pools=names("name -> nodes that are alike; a preset brings them", POOL),
    computed=names("written by `wandistill values` for pools outside the tables", COMPUTED),
    output=record(
        "claim for runs; each job writes to the folder of its name",
        existingClaim=text("name of a claim that is there"),
        create=_create("a claim that the chart makes", "100Gi"),
    ),
    metrics=record(
        "metrics of each pod",
        port=integer("port of the pods' metrics", 9400, minimum=1024),
        annotations=boolean("prometheus.io annotations on the pods, for a Prometheus without its operator", False),
        podMonitor=record(
            "a PodMonitor of the Prometheus operator",
            enabled=boolean("whether it is made", False),
            additionalLabels=free("labels by which your Prometheus selects it, such as release: prometheus"),
            interval=text("seconds between scrapes", "15s"),
        ),
        prometheusRule=record(
            "the alerts, as a PrometheusRule of the Prometheus operator",
            enabled=boolean("whether it is made", False),
            additionalLabels=free("labels by which your Prometheus selects it"),
        ),
    ),
    dashboards=record(
        "Grafana dashboards, as ConfigMaps that Grafana's sidecar loads",
        enabled=boolean("whether they are made", False),
        folder=text("folder in Grafana", "wandistill"),
    ),
    exporter=record(
        "the cluster exporter, once for a namespace or a cluster; preset monitoring has it",
        enabled=boolean("whether it is made", False),
        clusterWide=boolean("watch the runs of all namespaces, not of its own alone", False),
        port=integer("port of its metrics", 9401, minimum=1024),
        resources=Field(
            "object",
            "its requests and limits",
            {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "256Mi"}},
        ),
    ),
    image=record(
        "images, built by `make image`",
        train=_image("trainer"),
        control=_image("without torch: tests of the release"),
    ),
    job=record(
        "the PyTorchJob",
        restarts=integer(
            "starts in a row, after the first, that may leave no new checkpoint; kills for memory count too",
            4,
            minimum=0,
        ),
        deadlineSeconds=integer("seconds after which it is stopped; 0: none", 0, minimum=0),
        ttlSecondsAfterFinished=integer("seconds after which a finished job is deleted; -1: kept", -1, minimum=-1),
        suspend=boolean("made suspended", False),
        cleanPodPolicy=text("pods that are deleted when it ends", "Running", choices=("Running", "All", "None")),
        onChange=text(
            "a changed spec while a job runs: refuse the upgrade, keep the old job beside the new one, or replace it",
            "refuse",
            choices=ON_CHANGE,
        ),
        queue=text("Kueue's local queue; the job is made suspended and left to Kueue"),
        terminationGracePeriodSeconds=integer("seconds for a checkpoint after SIGTERM", 600, minimum=30),
    ),
    extraEnv=listing("environment variables of the trainer"),
    extraEnvFrom=listing("sources of environment variables"),
    extraVolumes=listing("volumes of the pods"),
    extraVolumeMounts=listing("their mounts"),
    extraResources=free("resources asked for beside the GPUs, such as rdma/hca"),
    podLabels=free("labels of the pods"),
    podAnnotations=free("annotations of the pods, over the chart's own"),
    serviceAccount=record(
        "service account of the pods", name=text("its name; empty: the namespace's default, without a token")
    ),
    podSecurityContext=Field(
        "object",
        "security of the pods",
        {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "fsGroup": 1000,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    ),
    securityContext=Field(
        "object",
        "security of the container",
        {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    ),
    networkPolicy=record("network", enabled=boolean("allow traffic among the pods of a job, DNS and egress", True)),
)


def load(path: Path) -> dict[str, Any]:
    """A values file over the defaults, checked.

    Raises:
        ConfigError: it cannot be read, is no map, or holds what the tree does not know.
    """
    import yaml

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=loader())
    except OSError as error:
        raise ConfigError(f"-f {path}: cannot be read ({error.strerror}); give the path of a values file.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"-f {path}: is not YAML: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"-f {path}: holds a {type(content).__name__}, but must map keys to values.")
    return content or {}


def resolve(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Layers of values, each over the one before, all over the defaults, checked and complete.

    Raises:
        ConfigError: a key or value that the tree does not know.
    """
    merged: Any = defaults(VALUES)
    for layer in layers:
        check(VALUES, layer)
        merged = merge(merged, layer)
    check(VALUES, merged)
    completed = complete(VALUES, merged)
    assert isinstance(completed, dict)
    return completed


def schema() -> dict[str, Any]:
    """values.schema.json; `training` has the types and choices of the trainer's settings."""
    made = json_schema(VALUES)
    settings = config_schema()["properties"]
    for entry in settings.values():
        entry.pop("default")
        kinds = entry["type"] if isinstance(entry["type"], list) else [entry["type"]]
        entry["type"] = [*kinds, "null"]  # null takes a setting of a preset away
        if "enum" in entry:
            entry["enum"].append(None)
    made["properties"]["training"]["properties"] = settings
    return {"$schema": "http://json-schema.org/draft-07/schema#", **made}


def is_name(value: str) -> bool:
    """Whether Kubernetes takes it as a DNS-1035 label."""
    return re.search(_NAME, value) is not None


def loader() -> Any:
    """YAML as Helm reads it: 1e-5 is a number there too."""
    import yaml

    class Loader(yaml.SafeLoader):
        """With the numbers of YAML 1.2."""

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)$"),
        list("-+.0123456789"),
    )
    return Loader
