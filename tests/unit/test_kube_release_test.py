"""What `helm test` runs says what is wrong with claims and the operator."""

import io
import urllib.error

from wandistill.kube import release_test


def test_a_claim_that_can_be_written_and_an_api_that_answers_are_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(release_test, "_ask", lambda path, account: None)
    assert release_test.failures([str(tmp_path)]) == []


def test_a_missing_operator_and_a_claim_that_is_not_there_are_told(tmp_path, monkeypatch):
    def refuse(path, account):
        raise urllib.error.HTTPError(path, 404, "not found", {}, io.BytesIO())

    monkeypatch.setattr(release_test, "_ask", refuse)
    claim, operator = release_test.failures([str(tmp_path / "none")])
    assert "cannot be written by user" in claim
    assert "answers 404 for kubeflow.org/v1: the Kubeflow training operator is not installed" in operator


def test_a_claim_that_two_pods_cannot_share_is_told(tmp_path, monkeypatch):
    (tmp_path / "namespace").write_text("team")
    asked = []

    def answer(path, account):
        asked.append(path)
        return {"spec": {"accessModes": ["ReadWriteOnce"]}}

    monkeypatch.setattr(release_test, "_ask", answer)
    (sentence,) = release_test.failures([f"{tmp_path}=runs", str(tmp_path)], 2, tmp_path)
    assert sentence.startswith("claim runs is ReadWriteOnce, but 2 pods mount it")
    assert asked == ["/apis/kubeflow.org/v1", "/api/v1/namespaces/team/persistentvolumeclaims/runs"]


def test_without_a_cluster_the_api_does_not_answer(tmp_path):
    assert "the API server does not answer" in release_test.failures([], 1, tmp_path)[0]
