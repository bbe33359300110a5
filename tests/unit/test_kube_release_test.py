"""What `helm test` runs says what is wrong with claims and the operator."""

import io
import urllib.error

import pytest

from wandistill.kube import release_test
from wandistill.kube.release_test import claim_failures, folder_failures

CLAIM = "/api/v1/namespaces/team/persistentvolumeclaims/runs"
EVENTS = "/api/v1/namespaces/team/events?fieldSelector=involvedObject.name%3Druns"


def claim(phase, *modes):
    return {"spec": {"accessModes": list(modes or ["ReadWriteMany"])}, "status": {"phase": phase}}


def event(time, reason, message=""):
    return {"lastTimestamp": time, "reason": reason, "message": message}


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """What the API server answers by path: an object, objects one after the other, or the code of an error."""
    (tmp_path / "namespace").write_text("team")
    given = {"/apis/kubeflow.org/v1": {}}

    def answer(path, account):
        found = given[path]
        if isinstance(found, list):
            found = found.pop(0) if len(found) > 1 else found[0]
        if isinstance(found, int):
            raise urllib.error.HTTPError(path, found, "", {}, io.BytesIO())
        return found

    monkeypatch.setattr(release_test, "_ask", answer)
    monkeypatch.setattr(release_test, "_INTERVAL", 0)
    return given


def test_claims_that_are_bound_or_will_be_with_their_first_pod_are_no_failure(tmp_path, answers):
    answers[CLAIM] = [claim("Pending"), claim("Bound")]
    answers[EVENTS] = {"items": [event("1", "Provisioning")]}
    assert claim_failures({"runs": 2}, tmp_path) == []

    answers[CLAIM] = claim("Pending")
    answers[EVENTS] = {"items": [event("2", "WaitForFirstConsumer"), event("1", "FailedBinding")]}
    assert claim_failures({"runs": 2}, tmp_path) == []


def test_a_claim_that_is_not_bound_is_told_with_what_the_cluster_says_of_it(tmp_path, answers):
    answers[CLAIM] = claim("Pending")
    answers[EVENTS] = {"items": [event("1", "Other", "older"), event("2", "FailedBinding", "no volumes available")]}

    (sentence,) = claim_failures({"runs": 1}, tmp_path, patience=0)

    assert sentence == "claim runs is Pending, not bound: no volumes available."


def test_a_claim_that_is_not_there_or_may_not_be_seen_is_told(tmp_path, answers):
    answers[CLAIM] = [404, 403]
    assert "claim runs is not in namespace team" in claim_failures({"runs": 1}, tmp_path)[0]
    assert claim_failures({"runs": 1}, tmp_path) == ["claim runs cannot be looked at: the API server answers 403."]


def test_a_claim_that_two_pods_cannot_share_is_told(tmp_path, answers):
    answers[CLAIM] = claim("Bound", "ReadWriteOnce")
    assert claim_failures({"runs": 1}, tmp_path) == []
    assert claim_failures({"runs": 2}, tmp_path)[0].startswith("claim runs is ReadWriteOnce, but 2 pods mount it")


def test_a_missing_operator_is_told(tmp_path, answers):
    answers["/apis/kubeflow.org/v1"] = 404
    (sentence,) = claim_failures({"runs": 1}, tmp_path)
    assert "answers 404 for kubeflow.org/v1: the Kubeflow training operator is not installed" in sentence


def test_without_a_cluster_the_api_does_not_answer(tmp_path):
    assert "the API server does not answer" in claim_failures({}, tmp_path)[0]


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    assert folder_failures([str(tmp_path)]) == []
    assert f"{tmp_path}/none cannot be written by user" in folder_failures([str(tmp_path), f"{tmp_path}/none"])[0]
