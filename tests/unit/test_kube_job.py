"""From values to objects: names, replicas, the pod, and the rules between values."""

import copy

import pytest

from wandistill.errors import ConfigError, DoesNotFit
from wandistill.kube import values
from wandistill.kube.job import render
from wandistill.kube.values_command import computed

CPU = {
    "image": {"train": {"repository": "reg.example.com/wandistill"}},
    "output": {"existingClaim": "runs"},
    "pools": {"main": {"nodes": 2, "processesPerNode": 2, "placement": "stream"}},
}
GPU = {
    "image": {"train": {"repository": "reg.example.com/wandistill"}},
    "output": {"existingClaim": "runs"},
    "teacher": {"model": "wan2.1-t2v-1.3b", "cache": {"existingClaim": "models"}},
    "data": {"prompts": ["a cat", "a dog"]},
    "training": {"optimizer": "adamw8bit", "mixed_precision": "bf16", "batch_size": 1},
    "pools": {"main": {"gpusPerNode": 4, "gpu": "rtx-3090"}},
}


def objects(*layers):
    return render(values.resolve(*layers), "my-run")


def job(*layers):
    return next(one for one in objects(*layers) if one["kind"] == "PyTorchJob")


def container(made, role="Master"):
    return made["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"]["containers"][0]


def environment(made, role="Master"):
    return {one["name"]: one.get("value") for one in container(made, role)["env"]}


def test_one_node_is_a_master_alone_and_more_are_workers_beside_it():
    assert set(job(CPU)["spec"]["pytorchReplicaSpecs"]) == {"Master", "Worker"}
    assert set(job(CPU, {"pools": {"main": {"nodes": 1}}})["spec"]["pytorchReplicaSpecs"]) == {"Master"}
    three = job(CPU, {"pools": {"main": {"nodes": 3}}})
    assert three["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 2


def test_processes_are_an_explicit_number_and_the_launcher_gets_its_own():
    made = job(CPU)
    assert made["spec"]["nprocPerNode"] == "2"
    assert environment(made)["WANDISTILL_NPROC"] == "2"
    assert container(made)["command"] == ["wandistill", "launch", "--"]
    assert container(made)["args"][-1] == f"/output/{made['metadata']['name']}"


def test_teacher_and_students_have_their_own_counts_in_one_job():
    pools = {
        "main": None,
        "teacher": {"gpusPerNode": 1, "gpu": "a100-80gb"},
        "students": {"nodes": 2, "gpusPerNode": 2, "gpu": "rtx-4090"},
    }
    made = job(GPU, {"topology": "teacher-and-students", "pools": pools})
    roles = made["spec"]["pytorchReplicaSpecs"]
    assert (roles["Master"]["replicas"], roles["Worker"]["replicas"]) == (1, 2)
    assert environment(made, "Master")["WANDISTILL_NPROC"] == "1"
    assert environment(made, "Worker")["WANDISTILL_NPROC"] == "2"
    assert container(made, "Worker")["resources"]["limits"]["nvidia.com/gpu"] == 2
    config = next(one for one in objects(GPU, {"topology": "teacher-and-students", "pools": pools}) if "data" in one)
    assert 'teacher_rank_trains: "no"' in config["data"]["train.yaml"]
    assert 'teacher_device_strategy: "gpu0"' in config["data"]["train.yaml"]


def test_what_prepares_has_no_gpu_the_same_files_and_claims_and_the_run_waits_for_it():
    assert not [one for one in objects(GPU) if one["kind"] == "Job"]
    assert "WANDISTILL_PREPARE_WAIT" not in environment(job(GPU))
    prepare = {"prepare": {"enabled": True, "waitSeconds": 600}}
    made = job(GPU, prepare)
    (before,) = [one for one in objects(GPU, prepare) if one["kind"] == "Job"]
    assert before["metadata"]["name"] == f"{made['metadata']['name']}-prepare"
    pod = before["spec"]["template"]["spec"]
    (own,) = pod["containers"]
    assert own["command"] == ["wandistill", "prepare", "--only", "embeddings"]
    assert own["args"][-1] == container(made)["args"][-1] == f"/output/{made['metadata']['name']}"
    assert "nvidia.com/gpu" not in str(before)
    trains = made["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    assert pod["volumes"][1:] == trains["volumes"][2:], "all but scratch space and /dev/shm"
    assert environment(made)["WANDISTILL_PREPARE_WAIT"] == "600"
    # UMT5-XXL has 5.7 B parameters, which a CPU computes in float32.
    assert (
        own["resources"]["limits"]["memory"].endswith("Mi") and int(own["resources"]["limits"]["memory"][:-2]) > 21_700
    )
    other = job(GPU, prepare, {"prepare": {"cpus": 2}})
    assert other["metadata"]["name"] != made["metadata"]["name"], "a Job cannot be changed"


def test_independent_pools_make_a_job_each():
    pools = {"other": {"gpusPerNode": 2, "gpu": "a100-80gb"}}
    made = [
        one["metadata"]["name"]
        for one in objects(GPU, {"topology": "independent", "pools": pools})
        if one["kind"] == "PyTorchJob"
    ]
    assert [name.rsplit("-", 1)[0] for name in made] == ["my-run-main", "my-run-other"]


def test_memory_is_the_plan_with_its_shared_memory_in_it():
    made = job(GPU, {"pools": {"main": {"placement": "stream"}}})
    limits = container(made)["resources"]["limits"]
    volumes = made["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["volumes"]
    shm = next(one for one in volumes if one["name"] == "shm")["emptyDir"]["sizeLimit"]
    assert limits["memory"] == container(made)["resources"]["requests"]["memory"]
    assert int(limits["memory"][:-2]) > int(shm[:-2]) > 2600  # the teacher's 1.4 B parameters in bfloat16


def test_the_name_changes_with_what_reaches_the_pods_and_with_nothing_else():
    name = job(CPU)["metadata"]["name"]
    assert job(CPU, {"training": {"lr": 1e-3}})["metadata"]["name"] != name
    assert job(CPU, {"image": {"train": {"tag": "new"}}})["metadata"]["name"] != name
    for same in (
        {"podLabels": {"team": "a"}},
        {"podAnnotations": {"note": "a"}},
        {"metrics": {"port": 9500}},
        {"job": {"onChange": "keep"}},
    ):
        assert job(CPU, same)["metadata"]["name"] == name, same


def test_values_of_the_trainer_arrive_as_written():
    training = {"max_steps": 1000000, "seed": 4294967295, "lr": 1e-5, "deterministic": True}
    config = next(one for one in objects(CPU, {"training": training}) if one["kind"] == "ConfigMap")
    assert config["immutable"] is True
    lines = config["data"]["train.yaml"].splitlines()
    for line in ("max_steps: 1000000", "seed: 4294967295", "lr: 0.00001", "deterministic: true"):
        assert line in lines


def test_pods_are_restricted_and_go_where_their_gpu_is():
    made = job(GPU)
    pod = made["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
    assert container(made)["securityContext"]["readOnlyRootFilesystem"]
    rules = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    keys = {rule["key"]: rule["values"] for rule in rules["nodeSelectorTerms"][0]["matchExpressions"]}
    assert keys == {"kubernetes.io/arch": ["amd64"], "nvidia.com/gpu.product": ["NVIDIA-GeForce-RTX-3090"]}
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_run_policy_is_always_there_and_a_queue_suspends():
    assert job(CPU)["spec"]["runPolicy"] == {"cleanPodPolicy": "Running", "suspend": False}
    queued = job(CPU, {"job": {"queue": "gpus"}})
    assert queued["spec"]["runPolicy"]["suspend"] is True
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"


def test_computed_values_name_what_they_were_computed_for():
    one = computed(values.resolve(CPU))["main"]
    assert one["placement"] == "stream"
    assert one["inputs"] != computed(values.resolve(CPU, {"training": {"batch_size": 2}}))["main"]["inputs"]
    assert one["inputs"] == computed(values.resolve(CPU, {"training": {"lr": 0.1}}))["main"]["inputs"]


REFUSED = [
    (CPU, {"image": {"train": {"repository": ""}}}, "image.train.repository is empty: build and push"),
    (CPU, {"output": {"existingClaim": ""}}, "output: there is no claim for runs"),
    (CPU, {"output": {"create": {"enabled": True}}}, "output: existingClaim and create are both set"),
    (
        CPU,
        {"output": {"existingClaim": "", "create": {"enabled": True}}},
        "output.create.accessModes is ReadWriteOnce, but more than one pod",
    ),
    (CPU, {"pools": {"main": None}}, "pools is empty: take a preset"),
    (CPU, {"pools": {"other": {}}}, "topology single takes one pool, but pools has main, other"),
    (CPU, {"topology": "teacher-and-students"}, "takes the pools teacher and students, but pools has main"),
    (CPU, {"pools": {"main": {"gpusPerNode": 2}}}, "pools.main.gpu is empty, but gpusPerNode is 2"),
    (CPU, {"pools": {"main": {"gpu": "l4"}}}, "pools.main.gpu is l4, but gpusPerNode is 0"),
    (GPU, {"pools": {"main": {"gpuResource": "nvidia.com/mig-1g.10gb"}}}, "set gpusPerNode to 1 and gpuMemory"),
    (CPU, {"training": {"teacher_dtype": "int8"}}, "training.teacher_dtype: belongs to pools.<name>.dtype"),
    (CPU, {"training": {"teacher-on-cpu": True}}, "training.teacher-on-cpu: belongs to pools.<name>.placement"),
    (CPU, {"training": {"batchsize": 1}}, "'batchsize' is not a setting; did you mean 'batch_size'?"),
    (CPU, {"teacher": {"model": "wan9"}}, "teacher.model wan9: is not in the catalogue"),
    (CPU, {"teacher": {"path": "a"}}, "teacher.path is set, but teacher.model is embedded"),
    (GPU, {"teacher": {"cache": {"existingClaim": ""}}}, "its weights need a claim"),
    (GPU, {"data": {"prompts": []}}, "data is empty, but teacher.model is wan2.1-t2v-1.3b"),
    (GPU, {"data": {"existingClaim": "x"}}, "data has prompts and existingClaim: take one of them"),
    (GPU, {"pools": {"main": {"gpu": "voodoo"}}}, "--gpu voodoo: is not in the catalogue"),
    (CPU, {"pools": {"main": None, "a" * 40: {}}}, "characters, but pods' names leave 50"),
    (CPU, {"pools": {"main": None, "Main": {}}}, "pools.Main: a pool's name is lower-case letters"),
]


@pytest.mark.parametrize(("base", "change", "sentence"), REFUSED, ids=[row[2][:40] for row in REFUSED])
def test_rules_between_values_are_refused_with_what_to_set(base, change, sentence):
    with pytest.raises(ConfigError) as caught:
        objects(copy.deepcopy(base), change)
    assert sentence in str(caught.value)


def test_what_does_not_fit_is_refused_with_the_planners_sentence():
    big = {"teacher": {"model": "wan2.2-t2v-a14b"}, "pools": {"main": {"placement": "gpu"}}}
    with pytest.raises(DoesNotFit, match=r"pools.main: placement gpu: rank 0's GPU lacks .* GiB"):
        objects(GPU, big)
