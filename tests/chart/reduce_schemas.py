"""Makes tests/chart/schemas from Kubernetes' and the operators' own descriptions, reduced to the kinds that we make.

python -m tests.chart.reduce_schemas 1.34 kubernetes/api/openapi-spec/swagger.json
python -m tests.chart.reduce_schemas pytorchjob training-operator/manifests/base/crds/kubeflow.org_pytorchjobs.yaml
python -m tests.chart.reduce_schemas podmonitor prometheus-operator/.../monitoring.coreos.com_podmonitors.yaml
python -m tests.chart.reduce_schemas prometheusrule prometheus-operator/.../monitoring.coreos.com_prometheusrules.yaml

The Prometheus operator's are those of its v0.85.0, in example/prometheus-operator-crd of the Go module
github.com/prometheus-operator/prometheus-operator.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).with_name("schemas")
KINDS = {
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "PersistentVolumeClaim": "io.k8s.api.core.v1.PersistentVolumeClaim",
    "Pod": "io.k8s.api.core.v1.Pod",
    "PodSpec": "io.k8s.api.core.v1.PodSpec",
    "ServiceAccount": "io.k8s.api.core.v1.ServiceAccount",
    "Deployment": "io.k8s.api.apps.v1.Deployment",
    "Job": "io.k8s.api.batch.v1.Job",
    "NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
    "Role": "io.k8s.api.rbac.v1.Role",
    "RoleBinding": "io.k8s.api.rbac.v1.RoleBinding",
    "ClusterRole": "io.k8s.api.rbac.v1.ClusterRole",
    "ClusterRoleBinding": "io.k8s.api.rbac.v1.ClusterRoleBinding",
}
_REF = "#/definitions/"
_KEPT = ("type", "properties", "items", "required", "additionalProperties", "enum", "$ref", "pattern", "minimum")


def reduce_swagger(swagger: dict[str, Any]) -> dict[str, Any]:
    """The definitions that our kinds reach, strict: no property that is not described."""
    definitions: dict[str, Any] = {}
    wanted = list(KINDS.values())
    while wanted:
        name = wanted.pop()
        if name not in definitions:
            definitions[name] = strict(swagger["definitions"][name])
            wanted += [ref.removeprefix(_REF) for ref in references(definitions[name])]
    return {"kinds": KINDS, "definitions": definitions}


def reduce_crd(crd: dict[str, Any]) -> dict[str, Any]:
    """The schema of an operator's kind; a PyTorchJob's without its pods' templates, which Kubernetes' own checks."""
    kind = crd["spec"]["names"]["kind"]
    version = next(one for one in crd["spec"]["versions"] if one["name"] == "v1")
    own = strict(version["schema"]["openAPIV3Schema"])
    own["properties"]["metadata"] = {"type": "object"}
    own["properties"].pop("status", None)
    if kind == "PyTorchJob":
        replicas = own["properties"]["spec"]["properties"]["pytorchReplicaSpecs"]["additionalProperties"]
        replicas["properties"]["template"] = {"type": "object"}
    return {"kinds": {kind: kind}, "definitions": {kind: own}}


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without descriptions and defaults, that refuses unknown properties."""
    if schema.get("format") == "int-or-string" or schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made = {key: value for key, value in schema.items() if key in _KEPT}
    if "properties" in made:
        made["properties"] = {name: strict(value) for name, value in made["properties"].items()}
        made.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(made.get(key), dict):
            made[key] = strict(made[key])
    # Quantities are written as numbers too.
    if schema.get("description", "").startswith("Quantity is a fixed-point representation"):
        made["type"] = ["string", "number"]
    return made


def references(schema: Any) -> list[str]:
    """All `$ref` below a schema."""
    if isinstance(schema, dict):
        own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
        return own + [ref for value in schema.values() for ref in references(value)]
    return [ref for value in schema for ref in references(value)] if isinstance(schema, list) else []


if __name__ == "__main__":
    name, source = sys.argv[1:]
    content = yaml.safe_load(Path(source).read_text(encoding="utf-8"))
    reduced = reduce_crd(content) if content.get("kind") == "CustomResourceDefinition" else reduce_swagger(content)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(reduced, separators=(",", ":"), sort_keys=True) + "\n")
