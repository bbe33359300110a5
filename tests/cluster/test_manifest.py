"""`kubectl apply -k k8s`, as the kustomization says: the job that the chart makes, on a cluster."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.chart import PROMPTS, ROOT, training
from tests.cluster.claims import Claim
from tests.cluster.clusters import Cluster
from tests.cluster.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.full]

STEPS = 2


def test_applied_manifest_trains(cluster: Cluster, namespace: Kubectl, tmp_path: Path):
    folder = tmp_path / "k8s"
    shutil.copytree(ROOT / "k8s", folder)
    objects = {one["kind"]: one for one in yaml.safe_load_all((folder / "cpu-demo.yaml").read_text()) if one}
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    name, tag = cluster.train_image.rsplit(":", 1)
    kustomization["images"][0] |= {"newName": name, "newTag": tag}
    kustomization["patches"] = [{"patch": json.dumps(shortened(objects["ConfigMap"]))}]
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization))

    namespace.run("apply", "-k", str(folder))

    job = objects["PyTorchJob"]["metadata"]["name"]
    conditions = namespace.wait_for_end(job, seconds=420)
    assert "Succeeded" in conditions, conditions
    output = Claim.open(cluster, namespace, objects["PersistentVolumeClaim"]["metadata"]["name"])
    assert list(output.losses(job)) == [1, 2]
    assert output.load_student(job)["finite"]


def shortened(config: dict[str, Any]) -> dict[str, Any]:
    """A patch of the job's ConfigMap: few steps and few prompts."""
    short = training(max_steps=STEPS, checkpoint_interval=STEPS, data_path="/etc/wandistill/prompts.txt")
    settings = yaml.safe_load(config["data"]["train.yaml"]) | short
    data = {"train.yaml": yaml.safe_dump(settings), "prompts.txt": "\n".join(PROMPTS)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": config["metadata"]["name"]}, "data": data}
