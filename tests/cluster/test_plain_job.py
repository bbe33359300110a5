"""A PyTorchJob written by hand, on the operator, the network and the image alone: two pods of two ranks train."""

import pytest

from tests.cluster.chart import PROMPTS
from tests.cluster.claims import Claim
from tests.cluster.clusters import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.manifests import claim, config_map, pytorch_job

pytestmark = [pytest.mark.cluster, pytest.mark.full]

STEPS = 6
ARGUMENTS = [
    "--teacher_path=embedded",
    "--student_config=half",
    "--device=cpu",
    "--data_path=/data/prompts.txt",
    "--guidance_scale=3",
    "--rollout_steps=2",
    "--batch_size=1",
    f"--max_steps={STEPS}",
    "--checkpoint_interval=3",
    "--no_save_samples",
    "--output_dir=/output/run",
    "--cache_dir=/output/cache",
]


def test_two_pods_of_two_ranks_train_and_leave_a_student(cluster: Cluster, namespace: Kubectl):
    namespace.apply(claim("output", cluster.storage_class), config_map("data", **{"prompts.txt": "\n".join(PROMPTS)}))
    namespace.apply(pytorch_job("plain", cluster.train_image, ARGUMENTS, "output", workers=1, ranks=2))

    conditions = namespace.wait_for_end("plain", seconds=420)

    assert "Succeeded" in conditions, conditions
    output = Claim.open(cluster, namespace, "output")
    assert [line["step"] for line in output.metrics("run")] == list(range(1, STEPS + 1))
    assert [entry["world_size"] for entry in output.json("run/run.json")["history"]] == [4]
    assert output.load_student("run")["finite"]
