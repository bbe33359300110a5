"""The pod of a pool: container, environment, volumes, and where it may run. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from wandistill import __version__
from wandistill.catalog import find_gpu
from wandistill.kube import helm
from wandistill.kube.fields import merge
from wandistill.kube.pools import Pool
from wandistill.kube.sizes import PodSizes
from wandistill.launch.prepared import WAIT

# Stands for the job's name until the digest of the rest is known.
JOB = "@JOB@"
# Meshes hold connections that outlive the job, and nothing may move a pod that trains.
ANNOTATIONS = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
    "sidecar.istio.io/inject": "false",
}
_ARCHITECTURE = {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]}
_GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
METRICS_PORT = "WANDISTILL_METRICS_PORT"
# The container that prepares, and what ends its job's name.
PREPARE = "prepare"
_CERTIFICATES = "/etc/wandistill-ca/ca.crt"
Object = dict[str, Any]


def image(values: Mapping[str, Any], which: str) -> str:
    """The reference of an image."""
    own, registry = values["image"][which], values["global"]["imageRegistry"]
    name = f"{registry}/{own['repository']}" if registry else own["repository"]
    return f"{name}@{own['digest']}" if own["digest"] else f"{name}:{own['tag'] or __version__}"


def pod_spec(values: Mapping[str, Any], release: str, pool: Pool, sized: PodSizes) -> Object:
    """The spec of a pool's pods; the job's name in it is `JOB`."""
    own = pool.values
    spec: Object = {
        **_common(values),
        "terminationGracePeriodSeconds": values["job"]["terminationGracePeriodSeconds"],
        "affinity": own["affinity"] or _affinity(pool),
        "tolerations": ([_GPU_TAINT] if pool.on_gpu else []) + own["tolerations"],
        "containers": [_container(values, release, pool, sized)],
        "volumes": [_shm(sized), *_volumes(values, release, sized)],
    }
    for key in ("nodeSelector", "topologySpreadConstraints", "priorityClassName", "runtimeClassName"):
        if own[key]:
            spec[key] = own[key]
    return spec


def prepare_spec(values: Mapping[str, Any], release: str, sized: PodSizes) -> Object:
    """The spec of the pod that fetches the teacher and encodes the prompts for job `JOB`."""
    own = values["prepare"]
    spec: Object = {
        **_common(values),
        "restartPolicy": "Never",
        "affinity": own["affinity"] or _node_affinity([_ARCHITECTURE]),
        "tolerations": own["tolerations"],
        "containers": [_preparing(values, release, sized)],
        "volumes": _volumes(values, release, sized),
    }
    if own["nodeSelector"]:
        spec["nodeSelector"] = own["nodeSelector"]
    return spec


def _common(values: Mapping[str, Any]) -> Object:
    """What all pods of a release are alike in."""
    account, secrets = values["serviceAccount"]["name"], values["image"]["train"]["pullSecrets"]
    return {
        "automountServiceAccountToken": bool(account),
        "securityContext": values["podSecurityContext"],
        **({"serviceAccountName": account} if account else {}),
        **({"imagePullSecrets": [{"name": name} for name in secrets]} if secrets else {}),
    }


def _affinity(pool: Pool) -> Object:
    rules: list[Object] = [_ARCHITECTURE]
    if pool.on_gpu and not pool.values["nodeSelector"]:
        products = list(find_gpu(pool.values["gpu"]).products)
        rules.append({"key": "nvidia.com/gpu.product", "operator": "In", "values": products})
    return _node_affinity(rules)


def _node_affinity(rules: list[Object]) -> Object:
    terms = {"nodeSelectorTerms": [{"matchExpressions": rules}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def _container(values: Mapping[str, Any], release: str, pool: Pool, sized: PodSizes) -> Object:
    return {
        "name": "pytorch",
        "image": image(values, "train"),
        "imagePullPolicy": values["image"]["train"]["pullPolicy"],
        "command": ["wandistill", "launch", "--"],
        "args": ["--config", "/etc/wandistill/train.yaml", "--resume", "auto", "--output_dir", f"/output/{JOB}"],
        "env": _environment(values, _of_ranks(values, release, pool, sized)),
        "envFrom": values["extraEnvFrom"],
        "ports": [{"name": "metrics", "containerPort": values["metrics"]["port"], "protocol": "TCP"}],
        "resources": _resources(values, pool, sized),
        "securityContext": values["securityContext"],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, *_mounts(values)],
    }


def _preparing(values: Mapping[str, Any], release: str, sized: PodSizes) -> Object:
    own = {helm.RELEASE: release, helm.RUN: JOB, "OMP_NUM_THREADS": str(sized.threads)}
    cpus = values["prepare"]["cpus"]
    requests = {"cpu": cpus if cpus != "" else sized.cpus, "memory": sized.memory, "ephemeral-storage": sized.scratch}
    computed = {"requests": requests, "limits": {"memory": sized.memory}}
    return {
        "name": PREPARE,
        "image": image(values, "train"),
        "imagePullPolicy": values["image"]["train"]["pullPolicy"],
        "command": ["wandistill", "prepare", "--only", "embeddings"],
        "args": ["--config", "/etc/wandistill/train.yaml", "--device", "cpu", "--output_dir", f"/output/{JOB}"],
        "env": _environment(values, own),
        "envFrom": values["extraEnvFrom"],
        "resources": merge(computed, values["prepare"]["resources"]),
        "securityContext": values["securityContext"],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(values),
    }


def _of_ranks(values: Mapping[str, Any], release: str, pool: Pool, sized: PodSizes) -> dict[str, str]:
    prepare = values["prepare"]
    return {
        "WANDISTILL_NPROC": str(pool.ranks),
        "WANDISTILL_RESTARTS": str(values["job"]["restarts"]),
        WAIT: str(prepare["waitSeconds"]) if prepare["enabled"] else "",
        helm.RELEASE: release,
        helm.RUN: JOB,
        helm.POOL: pool.name,
        METRICS_PORT: str(values["metrics"]["port"]),
        "OMP_NUM_THREADS": str(pool.values["threads"] or sized.threads),
    }


def _environment(values: Mapping[str, Any], own: Mapping[str, str]) -> list[Object]:
    """`own` variables of a pod, and what all have."""
    teacher = values["teacher"]
    proxy = teacher["proxy"]
    pairs = {
        **own,
        # Whatever the uid, it has no entry in the image's password file.
        "USER": "wandistill",
        "HOME": "/tmp",
        "XDG_CACHE_HOME": "/tmp/cache",
        "HF_HOME": "/cache/huggingface" if _cache(values) else "/tmp/huggingface",
        "TRITON_CACHE_DIR": "/tmp/triton",
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor",
        "HF_HUB_OFFLINE": "1" if teacher["offline"] else "",
        "HF_ENDPOINT": teacher["endpoint"],
        "HTTP_PROXY": proxy["http"],
        "HTTPS_PROXY": proxy["https"],
        "NO_PROXY": proxy["noProxy"],
        "SSL_CERT_FILE": _CERTIFICATES if teacher["caBundle"]["configMap"] else "",
        "REQUESTS_CA_BUNDLE": _CERTIFICATES if teacher["caBundle"]["configMap"] else "",
    }
    env: list[Object] = [{"name": name, "value": value} for name, value in pairs.items() if value]
    if teacher["tokenSecret"]["name"]:
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": deepcopy(teacher["tokenSecret"])}})
    return env + values["extraEnv"]


def _resources(values: Mapping[str, Any], pool: Pool, sized: PodSizes) -> Object:
    beside = dict(values["extraResources"])
    if pool.on_gpu:
        beside[pool.values["gpuResource"]] = pool.values["gpusPerNode"]
    cpus = pool.values["cpus"]
    requests = {"cpu": cpus if cpus != "" else sized.cpus, "memory": sized.memory, "ephemeral-storage": sized.scratch}
    computed = {"requests": requests | beside, "limits": {"memory": sized.memory} | beside}
    merged = merge(computed, pool.values["resources"])
    assert isinstance(merged, dict)
    return merged


def _mounts(values: Mapping[str, Any]) -> list[Object]:
    data, teacher = values["data"], values["teacher"]
    mounts: list[Object] = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "config", "mountPath": "/etc/wandistill", "readOnly": True},
        {"name": "output", "mountPath": "/output"},
    ]
    if _cache(values):
        mounts.append({"name": "cache", "mountPath": "/cache"})
    if data["configMap"]["name"] or data["existingClaim"]:
        mounts.append({"name": "data", "mountPath": "/data", "readOnly": True})
    if teacher["caBundle"]["configMap"]:
        mounts.append({"name": "ca", "mountPath": "/etc/wandistill-ca", "readOnly": True})
    return mounts + values["extraVolumeMounts"]


def _shm(sized: PodSizes) -> Object:
    return {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": sized.shm}}


def _volumes(values: Mapping[str, Any], release: str, sized: PodSizes) -> list[Object]:
    data, bundle = values["data"], values["teacher"]["caBundle"]
    volumes: list[Object] = [
        {"name": "tmp", "emptyDir": {"sizeLimit": sized.scratch}},
        {"name": "config", "configMap": {"name": JOB}},
        {"name": "output", **_claim(values["output"]["existingClaim"] or f"{release}-output")},
    ]
    if _cache(values):
        volumes.append({"name": "cache", **_claim(values["teacher"]["cache"]["existingClaim"] or f"{release}-cache")})
    if data["configMap"]["name"]:
        volumes.append({"name": "data", "configMap": {"name": data["configMap"]["name"]}})
    if data["existingClaim"]:
        volumes.append({"name": "data", **_claim(data["existingClaim"])})
    if bundle["configMap"]:
        items = [{"key": bundle["key"], "path": "ca.crt"}]
        volumes.append({"name": "ca", "configMap": {"name": bundle["configMap"], "items": items}})
    return volumes + values["extraVolumes"]


def _claim(name: str) -> Object:
    return {"persistentVolumeClaim": {"claimName": name}}


def _cache(values: Mapping[str, Any]) -> bool:
    cache = values["teacher"]["cache"]
    return bool(cache["existingClaim"] or cache["create"]["enabled"])
