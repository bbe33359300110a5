"""submit, status, wait, logs and delete against a stand-in for the API server."""

import json
import time

import kube_fakes as fakes
import pytest

from wandistill.errors import ExitCode
from wandistill.kube import values
from wandistill.kube.client import Client, TimedOut
from wandistill.kube.cluster import Cluster, ClusterError, Forbidden, NotThere, Refused
from wandistill.kube.job import render
from wandistill.kube.progress import of_log
from wandistill.metrics.exporter.api import STATE_KEY, STATE_NAME
from wandistill.metrics.exporter.ledger import Ledger

VALUES = {
    "image": {"train": {"repository": "reg.example.com/wandistill"}},
    "output": {"existingClaim": "runs"},
    "pools": {"main": {"nodes": 2, "processesPerNode": 2, "placement": "stream"}},
}


@pytest.fixture
def server():
    return fakes.Server()


@pytest.fixture
def client(server):
    return Client(Cluster("team", server, server, server, server, lambda: server))


@pytest.fixture
def name(client):
    (made,) = client.submit(values.resolve(VALUES), "my-run")
    return made


def put(server, name, *conditions, **counts):
    server.kept[("PyTorchJob", name)]["status"] = {"conditions": list(conditions), "replicaStatuses": counts}


def test_submit_makes_the_objects_and_the_same_again_leaves_them_alone(client, server, name):
    assert {kind for kind, _ in server.kept} == {"NetworkPolicy", "ConfigMap", "PyTorchJob"}
    before = dict(server.kept)
    assert client.submit(values.resolve(VALUES), "my-run") == [name]
    assert server.kept == before


def test_status_shows_replicas_placement_memory_and_the_last_step(client, server, name):
    put(
        server, name, fakes.condition("Created"), fakes.condition("Running"), Master={"active": 1}, Worker={"active": 1}
    )
    server.pods = [fakes.pod(name, phase="Running"), fakes.pod(name, "worker", phase="Running")]
    line = {"schema": 1, "progress": "training", "done": 120, "total": 400, "seconds_left": 185.2, "loss": 0.21}
    memory = {"pod_bytes": 3 << 30, "pod_planned_bytes": 4 << 30, "pod_limit_bytes": 5 << 30}
    server.logs[f"{name}-master-0"] = f"plan: stream\n{json.dumps(line | memory)}\nsomething else\n"
    text = client.status(name).text()
    assert "training 120/400, loss 0.2100, 3 min 05 s left" in text
    assert "memory: the Master's pod 3.0 GiB, planned 4.0 GiB, limit 5.0 GiB" in text
    assert f"{name}: Running (Master 1 active, Worker 1 active)" in text
    assert "placement stream" in text and "Mi of memory a pod" in text
    assert client.status(name).to_json()["progress"]["source"] == "log"


def test_a_log_without_progress_has_none():
    assert of_log('plan: stream\nsomething 1/2\n{"a": 1}\n[1]\n3\n') is None


def test_without_a_log_the_master_s_end_tells_the_last_step(client, server, name):
    put(server, name, fakes.condition("Succeeded"))
    server.pods = [ended(name, 0, "Completed", json.dumps({"schema": 1, "exit_code": 0, "step": 400, "loss": 0.05}))]
    status = client.status(name)
    assert str(status.progress) == "step 400, loss 0.0500" and status.progress.source == "termination"
    (listed,) = client.statuses()
    assert listed.progress == status.progress


def test_without_pods_the_exporter_s_config_map_tells_the_last_step_and_what_went_wrong(client, server, name):
    put(server, name, fakes.condition("Failed", "failed"))
    ledger = Ledger()
    (made,) = [ended(name, 1, "OOMKilled", json.dumps({"exit_code": 1, "step": 120, "loss": 0.5}))]
    made["metadata"] |= {"uid": "1234567890ab", "namespace": "team"}
    ledger.update(made, time.time())
    server.kept["ConfigMap", STATE_NAME] = {"data": {STATE_KEY: ledger.to_json()}}
    text = client.status(name).text()
    assert "step 120, loss 0.5000, as the exporter remembers" in text
    assert "containers that ended badly, by cause: oom 1" in text
    assert "containers that the kernel killed for memory: 1" in text
    del server.kept["ConfigMap", STATE_NAME]
    assert client.status(name).progress is None


def test_a_claim_of_several_pods_that_is_not_shared_is_told_by_status_and_submit(client, server, name):
    claim = {"kind": "PersistentVolumeClaim", "spec": {"accessModes": ["ReadWriteOnce"]}}
    server.kept["PersistentVolumeClaim", "runs"] = claim
    server.pods = [fakes.pod(name, phase="Running")]
    sentence = "claim runs is ReadWriteOnce, but 2 pods mount it: on more than one node it must be ReadWriteMany"
    assert sentence not in client.status(name).text(), "the pods run"
    server.pods += [fakes.pod(name, "worker", phase="Pending")]
    assert sentence in client.status(name).text()
    jobs = [made for made in render(values.resolve(VALUES), "my-run") if made["kind"] == "PyTorchJob"]
    assert client.unshared(jobs)[0].startswith(sentence)
    claim["spec"]["accessModes"] = ["ReadWriteOnce", "ReadWriteMany"]
    assert client.unshared(jobs) == []
    one = values.resolve(VALUES, {"pools": {"main": {"nodes": 1}}})
    claim["spec"]["accessModes"] = ["ReadWriteOnce"]
    assert client.unshared([made for made in render(one, "my-run") if made["kind"] == "PyTorchJob"]) == []


def unschedulable(name):
    message = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."
    reason = {"type": "PodScheduled", "status": "False", "message": message}
    rule = {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-L4"]}
    terms = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}}
    spec = {"affinity": {"nodeAffinity": terms}, "nodeSelector": {"zone": "a"}}
    return fakes.pod(name, spec=spec, phase="Pending", conditions=[reason])


def waiting(name, reason, message="", key="containerStatuses", container="pytorch"):
    state = {"waiting": {"reason": reason, "message": message}}
    return fakes.pod(name, "worker", phase="Pending", **{key: [{"name": container, "state": state}]})


def ended(name, code, reason="Error", message=""):
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    return fakes.pod(name, phase="Failed", containerStatuses=[{"name": "pytorch", "state": state}])


REASONS = [
    (
        unschedulable,
        "no node takes it of pool main (it wants nvidia.com/gpu.product NVIDIA-L4, zone a): 0/3 nodes are available: "
        "3 node(s) didn't match Pod's node affinity",
    ),
    (lambda job: waiting(job, "ImagePullBackOff", 'Back-off pulling image "x"'), "ImagePullBackOff: Back-off pulling"),
    (lambda job: waiting(job, "CreateContainerConfigError", 'secret "hub" not found'), 'secret "hub" not found'),
    (
        lambda job: waiting(job, "ErrImagePull", "no route", "initContainerStatuses", "init-pytorch"),
        "container init-pytorch: ErrImagePull: no route; k8s/operator has the patch for it",
    ),
    (lambda job: ended(job, 137, "OOMKilled"), "OOMKilled, exit code 137"),
    (lambda job: ended(job, 2, message="wandistill train: does not fit\n"), "exit code 2: wandistill train: does not"),
]


@pytest.mark.parametrize(("made", "reason"), REASONS, ids=[reason[:30] for _, reason in REASONS])
def test_status_says_what_keeps_a_job_from_running(client, server, name, made, reason):
    put(server, name, fakes.condition("Created"))
    server.pods = [made(name)]
    assert reason in client.status(name).text()


def test_status_says_which_volume_is_missing(client, server, name):
    server.pods = [waiting(name, "ContainerCreating")]
    event = {
        "reason": "FailedMount",
        "message": 'configmap "p" not found',
        "involvedObject": {"name": f"{name}-worker-0"},
    }
    server.events[f"{name}-worker-0"] = [event]
    assert 'configmap "p" not found' in client.status(name).text()


def test_status_names_the_patch_where_the_operators_container_is_refused(client, server, name):
    message = 'pods "w" is forbidden: violates PodSecurity "restricted:latest": (container "init-pytorch" must set ...)'
    server.events[name] = [{"reason": "FailedCreatePod", "message": message, "involvedObject": {"name": name}}]
    assert "container init-pytorch is refused by the namespace's Pod Security level; k8s/operator" in (
        client.status(name).text()
    )


def test_status_is_silent_about_pods_that_could_not_be_made_once_all_are_there(client, server, name):
    put(server, name, fakes.condition("Running"))
    message = 'object is being deleted: pods "w" already exists'
    server.events[name] = [{"reason": "FailedCreatePod", "message": message, "involvedObject": {"name": name}}]
    server.pods = [fakes.pod(name, phase="Running")]
    assert message in client.status(name).text()
    server.pods.append(fakes.pod(name, "worker", phase="Running"))
    assert message not in client.status(name).text()


def test_advice_after_an_out_of_memory_is_a_helm_command(client, server, name):
    put(server, name, fakes.condition("Failed", "failed"))
    advice = {
        "why": "the teacher elsewhere",
        "command": "wandistill launch -- --x",
        "changes": {"teacher_device_strategy": "disk", "batch_size": 2, "gradient_checkpointing": True},
    }
    message = json.dumps({"schema": 1, "code": 1, "message": "rank 1 was killed", "advice": [advice]})
    server.pods = [ended(name, 1, message=message)]
    text = client.status(name).text()
    assert "rank 1 was killed" in text
    assert (
        "helm upgrade my-run helm/wandistill --reuse-values --set pools.main.placement=disk "
        "--set training.batch_size=2 --set training.gradient_checkpointing=true"
    ) in text


PREPARED = {"prepare": {"enabled": True}}


def test_what_prepares_is_submitted_told_and_deleted_with_the_job(client, server):
    (name,) = client.submit(values.resolve(VALUES, PREPARED), "my-run")
    assert ("Job", f"{name}-prepare") in server.kept
    server.pods = [fakes.pod(name, phase="Running"), fakes.preparing(name, phase="Running")]
    waits = {"schema": 1, "progress": "waiting for prepare, seconds", "done": 30, "total": 86400, "seconds_left": None}
    server.logs[f"{name}-master-0"] = json.dumps(waits)
    assert "waiting for prepare, seconds 30/86400" in client.status(name).text()
    fetches = {"schema": 1, "progress": "teacher MiB", "done": 1000, "total": 126000, "seconds_left": 60}
    server.logs[f"{name}-prepare-x"] = json.dumps(fetches)
    assert "teacher MiB 1000/126000, 1 min 00 s left" in client.status(name).text()
    state = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    server.pods[1] = fakes.preparing(name, phase="Failed", containerStatuses=[{"name": "prepare", "state": state}])
    assert f"{name}-prepare-x: OOMKilled, exit code 137" in client.status(name).text()
    client.delete(name)
    assert not server.kept


def test_all_jobs_come_from_two_lists(client, server):
    for number in range(20):
        client.submit(values.resolve(VALUES), f"run-{number}")
    server.calls.clear()
    assert len(client.statuses()) == 20
    assert [call for call, _ in server.calls] == ["list_namespaced_custom_object", "list_namespaced_pod"]


def test_wait_ends_with_the_job_by_one_watch(client, server, name):
    done = {**server.kept[("PyTorchJob", name)], "status": {"conditions": [fakes.condition("Succeeded")]}}
    server.changes = [
        {"type": "MODIFIED", "object": server.kept[("PyTorchJob", name)]},
        {"type": "MODIFIED", "object": done},
    ]
    server.calls.clear()
    assert client.wait(name, 30).state == "Succeeded"
    watches = [options for call, options in server.calls if call == "watch"]
    assert len(watches) == 1 and watches[0]["resource_version"] == "7"


def test_wait_says_when_the_job_is_deleted_and_when_time_is_over(client, server, name):
    server.changes = [{"type": "DELETED", "object": server.kept[("PyTorchJob", name)]}]
    with pytest.raises(NotThere, match="was deleted"):
        client.wait(name, 30)
    with pytest.raises(TimedOut, match="has not ended after 0 s"):
        client.wait(name, 0)


def test_logs_of_all_pods_have_their_role_in_front(client, server, name):
    server.pods = [fakes.pod(name), fakes.pod(name, "worker", 1)]
    server.logs = {f"{name}-master-0": "a\nb\n", f"{name}-worker-1": "c\n"}
    assert sorted(client.logs(name)) == ["[master-0] a", "[master-0] b", "[worker-1] c"]


def test_delete_removes_all_but_claims(client, server):
    with_claim = {"output": {"existingClaim": "", "create": {"enabled": True, "accessModes": ["ReadWriteMany"]}}}
    (name,) = client.submit(values.resolve(VALUES, with_claim), "my-run")
    client.delete(name)
    assert set(server.kept) == {("PersistentVolumeClaim", "my-run-output")}
    with pytest.raises(NotThere, match="get PyTorchJob"):
        client.delete(name)


ANSWERS = [
    (
        403,
        'pytorchjobs.kubeflow.org is forbidden: User "u" cannot create resource "pytorchjobs"',
        Forbidden,
        "k8s/rbac",
    ),
    (403, "exceeded quota: gpus, requested: nvidia.com/gpu=8", Refused, "exceeded quota"),
    (400, 'admission webhook "validator" denied the request: name', Refused, "denied the request: name"),
    (404, "the server could not find the requested resource", NotThere, "install the Kubeflow training operator"),
    (500, "etcdserver: leader changed", ClusterError, "answered 500"),
]


@pytest.mark.parametrize(("status", "message", "kind", "sentence"), ANSWERS, ids=[row[1][:25] for row in ANSWERS])
def test_answers_of_the_server_are_told_apart(client, server, status, message, kind, sentence):
    server.refuse["create_namespaced_custom_object"] = fakes.ApiError(status, message)
    with pytest.raises(kind, match=sentence) as caught:
        client.submit(values.resolve(VALUES), "my-run")
    assert type(caught.value) is kind
    assert caught.value.exit_code == ExitCode.BAD_CONFIG
