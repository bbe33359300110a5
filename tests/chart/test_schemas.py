"""Chart and manifests are valid objects of Kubernetes 1.30 to 1.34 and of the training operator."""

import copy
import json
from pathlib import Path

import fastjsonschema
import pytest
import yaml

from tests import generate_chart as chart

SCHEMAS = Path(__file__).with_name("schemas")
VERSIONS = ("1.30", "1.31", "1.32", "1.33", "1.34")
FILES = [*chart.JOB_PRESETS, chart.ROOT / "k8s/rbac.yaml", chart.ROOT / "k8s/claims.yaml"]


def validators(name):
    """A validator for each kind of a schema file."""
    content = json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))
    definitions = content["definitions"]
    return {
        kind: fastjsonschema.compile({"$ref": f"#/definitions/{definition}", "definitions": definitions})
        for kind, definition in content["kinds"].items()
    }


@pytest.fixture(scope="module", params=VERSIONS)
def kinds(request):
    return validators(request.param) | validators("pytorchjob")


def objects(helm, file):
    """Of a preset as the chart makes them, tests too; of a manifest as they stand."""
    if file.parent != chart.PRESETS:
        return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    done = helm.template([chart.values.load(file), chart.SAMPLE, chart.PROMPTS if _takes_prompts(file) else {}])
    assert done.returncode == 0, done.stderr
    return [made for made in yaml.safe_load_all(done.stdout) if made]


def _takes_prompts(preset):
    return chart.values.load(preset)["teacher"]["model"] != "embedded"


@pytest.fixture(scope="module")
def made(helm):
    return [one for file in FILES for one in objects(helm, file)]


def pod_specs(job):
    return [replica["template"]["spec"] for replica in job["spec"]["pytorchReplicaSpecs"].values()]


def test_every_object_is_valid_and_holds_nothing_unknown(kinds, made):
    assert {one["kind"] for one in made} == set(kinds) - {"PodSpec"}
    for one in made:
        kinds[one["kind"]](one)
        for spec in pod_specs(one) if one["kind"] == "PyTorchJob" else ():
            kinds["PodSpec"](spec)


def test_a_typo_would_be_seen(kinds, made):
    pod = copy.deepcopy(next(one for one in made if one["kind"] == "Pod"))
    pod["spec"]["restartPolice"] = "Never"
    with pytest.raises(fastjsonschema.JsonSchemaException, match="restartPolice"):
        kinds["Pod"](pod)
    job = copy.deepcopy(next(one for one in made if one["kind"] == "PyTorchJob"))
    job["spec"]["runPolicy"]["cleanPods"] = "Running"
    pod_specs(job)[0]["containers"][0]["imagePull"] = "Never"
    with pytest.raises(fastjsonschema.JsonSchemaException, match="cleanPods"):
        kinds["PyTorchJob"](job)
    with pytest.raises(fastjsonschema.JsonSchemaException, match="imagePull"):
        kinds["PodSpec"](pod_specs(job)[0])


def test_the_operators_sdk_reads_every_job(made):
    """Its get_job fails where runPolicy is missing."""
    from kubeflow.training.api_client import ApiClient
    from kubeflow.training.utils.utils import FakeResponse

    for one in made:
        if one["kind"] == "PyTorchJob":
            job = ApiClient().deserialize(FakeResponse(one), "KubeflowOrgV1PyTorchJob")
            assert job.spec.run_policy.clean_pod_policy == "Running"
