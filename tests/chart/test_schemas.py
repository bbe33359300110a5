"""Chart and manifests are valid objects of Kubernetes 1.30 to 1.34 and of both operators, as kubeconform says."""

import copy
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests import generate_chart as chart
from wandistill.kube import fields

SCHEMAS = Path(__file__).with_name("schemas")
VERSIONS = ("1.30", "1.31", "1.32", "1.33", "1.34")
CONTROL = {"image": {"control": {"repository": "registry.example.com/control"}}}
# Those of the training operator and of the Prometheus operator.
OPERATORS = ("pytorchjob", "podmonitor", "prometheusrule")
# What no preset makes.
MORE = {
    "prepared": ("cpu-demo", {"prepare": {"enabled": True}, "metrics": {"podMonitor": {"enabled": True}}}),
    "shared claims": ("2-node", {"output": {"existingClaim": "runs", "create": {"enabled": False}}}),
    "whole cluster": ("monitoring", {"exporter": {"clusterWide": True}}),
}
REF = "#/definitions/"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The kept schemas as kubeconform looks for them: a folder for a version, a file for a kind."""
    root = tmp_path_factory.mktemp("schemas")
    contents = [json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8")) for name in OPERATORS]
    operators = {kind: content["definitions"][name] for content in contents for kind, name in content["kinds"].items()}
    for version in VERSIONS:
        content = json.loads((SCHEMAS / f"{version}.json").read_text(encoding="utf-8"))
        kinds, definitions = dict(content["kinds"]), dict(content["definitions"])
        definitions["Template"] = {
            "type": "object",
            "properties": {"metadata": {"type": "object"}, "spec": {"$ref": REF + kinds.pop("PodSpec")}},
            "additionalProperties": False,
        }
        job = copy.deepcopy(operators["PyTorchJob"])
        replicas = job["properties"]["spec"]["properties"]["pytorchReplicaSpecs"]["additionalProperties"]
        replicas["properties"]["template"] = {"$ref": f"{REF}Template"}
        definitions |= {**operators, "PyTorchJob": job}
        (root / f"v{version}.0").mkdir()
        for kind, name in {**kinds, **{kind: kind for kind in operators}}.items():
            schema = {"$ref": REF + name, "definitions": definitions}
            (root / f"v{version}.0/{kind.lower()}.json").write_text(json.dumps(schema))
    return root


@pytest.fixture(scope="module")
def check(kubeconform, folder, tmp_path_factory):
    """What kubeconform says of objects in a version: exit code and text."""

    def run(version, objects):
        file = tmp_path_factory.mktemp("objects") / "all.yaml"
        file.write_text(yaml.safe_dump_all(objects))
        place = f"{folder}/{{{{.NormalizedKubernetesVersion}}}}/{{{{.ResourceKind}}}}.json"
        flags = ["-strict", "-kubernetes-version", f"{version}.0", "-schema-location", place]
        done = subprocess.run([kubeconform, *flags, str(file)], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


def text_of(helm, preset, change):
    """What the chart makes of a preset, tests too."""
    own = chart.values.load(chart.PRESETS / f"{preset}.yaml")
    prompts = {} if own.get("teacher", {}).get("model", "embedded") == "embedded" else chart.PROMPTS
    done = helm.template([own, fields.merge(chart.SAMPLE, CONTROL), prompts, change])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def texts(helm):
    presets = {path.stem: (path.stem, {}) for path in sorted(chart.PRESETS.glob("*.yaml"))}
    return [text_of(helm, preset, change) for preset, change in (presets | MORE).values()]


@pytest.fixture(scope="module")
def made(texts):
    """Objects of the chart and of the manifests; kustomize's own files are no objects."""
    files = [path.read_text(encoding="utf-8") for path in sorted((chart.ROOT / "k8s").glob("*.yaml"))]
    objects = [one for text in (*texts, *files) for one in yaml.safe_load_all(text) if one]
    return [one for one in objects if "kind" in one and one["kind"] != "Kustomization"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_and_holds_nothing_unknown(check, made, folder, version):
    kept = {path.stem for path in (folder / f"v{version}.0").glob("*.json")}
    assert {one["kind"].lower() for one in made} == kept
    code, said = check(version, made)
    assert code == 0, said


@pytest.mark.parametrize(
    ("kind", "path", "sentence"),
    [
        ("Pod", ("spec",), "restartPolice"),
        ("PyTorchJob", ("spec", "runPolicy"), "cleanPods"),
        ("PyTorchJob", ("spec", "pytorchReplicaSpecs", "Master", "template", "spec", "containers", 0), "imagePull"),
        ("Job", ("spec", "template", "spec", "volumes", 0), "emptyDirs"),
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0), "honourLabels"),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0), "severity"),
    ],
)
def test_a_typo_would_be_seen(check, made, kind, path, sentence):
    wrong = copy.deepcopy(next(one for one in made if one["kind"] == kind))
    place = wrong
    for key in path:
        place = place[key]
    place[sentence] = "Never"
    code, said = check("1.34", [wrong])
    assert code == 1 and sentence in said


def test_every_template_is_rendered(texts):
    """By a preset or by one of `MORE`; helpers, whose names begin with an underscore, are those that these use."""
    sources = re.compile(r"^# Source: wandistill/(templates/.*)$", re.MULTILINE)
    files = {str(path.relative_to(chart.CHART)) for path in (chart.CHART / "templates").rglob("*.yaml")}
    assert {name for text in texts for name in sources.findall(text)} == files


def test_the_operators_sdk_reads_every_job(made):
    """Its get_job fails where runPolicy is missing."""
    from kubeflow.training.api_client import ApiClient
    from kubeflow.training.utils.utils import FakeResponse

    for one in made:
        if one["kind"] == "PyTorchJob":
            job = ApiClient().deserialize(FakeResponse(one), "KubeflowOrgV1PyTorchJob")
            assert job.spec.run_policy.clean_pod_policy == "Running"
