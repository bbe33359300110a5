"""A cluster for the session, a namespace for each scenario, and on a failure what the namespace held."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tests.cluster.clusters import Cluster, current
from tests.cluster.demo import Demo
from tests.cluster.faults import Killed, Replanned, Stopped
from tests.cluster.kubectl import Kubectl, KubectlError
from tests.cluster.monitoring import BY_OPERATOR, Monitoring
from tests.cluster.prometheus import prometheus

# Every scenario runs where the strictest Pod Security level is enforced.
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
# Fixtures with a namespace that several tests share.
SHARED = ("demo", "killed", "replanned", "stopped", "monitoring")
FAILED = pytest.StashKey[set[str]]()


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster of $KUBECONFIG, or the local one, which is started if it does not run."""
    return current()


@pytest.fixture
def namespace(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Kubectl]:
    """An empty namespace of the test's own, with storage that all its pods may share; removed after it."""
    with own_namespace(cluster, request.node.name.removeprefix("test_"), request.session) as kubectl:
        yield kubectl


@pytest.fixture(scope="session")
def monitoring(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Monitoring]:
    """A Prometheus, and the chart's monitoring beside it: what is installed after it is scraped."""
    folder = tmp_path_factory.mktemp("prometheus")
    with (
        own_namespace(cluster, "monitoring", request.session) as kubectl,
        prometheus(cluster, kubectl, folder) as server,
    ):
        yield Monitoring.install(cluster, kubectl, server)


@pytest.fixture(scope="session")
def demo(request: pytest.FixtureRequest, cluster: Cluster, monitoring: Monitoring) -> Iterator[Demo]:
    """The demo's preset, installed once for all tests that look at it, or go on from it."""
    with own_namespace(cluster, "demo", request.session) as kubectl:
        yield Demo.install(cluster, kubectl, metrics=BY_OPERATOR)


def shared_run(name: str, run: Callable[..., Any], metrics: dict[str, Any]) -> Any:
    """A fixture: a run that something happens to, in a namespace of its own, found by Prometheus as `metrics` says."""

    @pytest.fixture(scope="session", name=name)
    def made(
        request: pytest.FixtureRequest,
        cluster: Cluster,
        monitoring: Monitoring,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Iterator[Any]:
        with own_namespace(cluster, name, request.session) as kubectl:
            yield run(cluster, kubectl, tmp_path_factory.mktemp(name), metrics=metrics)

    return made


killed = shared_run("killed", Killed.run, BY_OPERATOR)
# By its annotations a run is found at once; a new monitor takes longer than this run.
replanned = shared_run("replanned", Replanned.run, {"annotations": True})
stopped = shared_run("stopped", Stopped.run, {"annotations": True})


@contextmanager
def own_namespace(cluster: Cluster, name: str, session: pytest.Session) -> Iterator[Kubectl]:
    """A namespace that is there for a while; with WANDISTILL_E2E_KEEP set, it stays where a test failed in it."""
    kubectl = Kubectl(cluster.kubeconfig, "e2e-" + re.sub(r"[^a-z0-9]+", "-", name.lower())[-40:].strip("-"))
    remove(kubectl, wait=True)
    cluster.remove_volumes(kubectl)
    kubectl.run("create", "namespace", kubectl.namespace)
    kubectl.run("label", "namespace", kubectl.namespace, RESTRICTED)
    cluster.make_volumes(kubectl)
    try:
        yield kubectl
    except Exception as error:  # of a fixture that made something in it; a test's own comes to the hook below
        _note_failure(session, kubectl)
        error.add_note(f"namespace {kubectl.namespace}\n{kubectl.describe()}")
        raise
    finally:
        if not (kubectl.namespace in session.stash.get(FAILED, set()) and os.environ.get("WANDISTILL_E2E_KEEP")):
            remove(kubectl, wait=False)


def remove(kubectl: Kubectl, wait: bool) -> None:
    """Deletes the namespace. Its pods get seconds, where a job's own grace period gives minutes for a checkpoint."""
    kubectl.run("delete", "namespace", kubectl.namespace, "--ignore-not-found", "--wait=false")
    # One request for all pods: kubectl by itself deletes one after the other, five in a second. Of hundreds, what the
    # API server has not deleted in a minute goes with the namespace.
    with suppress(KubectlError):
        kubectl.run("delete", "--raw", f"/api/v1/namespaces/{kubectl.namespace}/pods?gracePeriodSeconds=3")
    if wait:
        kubectl.run("wait", "--for=delete", f"namespace/{kubectl.namespace}", "--timeout=300s", seconds=310)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if report.failed and call.when != "teardown":
        arguments = getattr(item, "funcargs", {})
        shared = [getattr(arguments.get(name), "kubectl", None) for name in SHARED]
        for kubectl in (arguments.get("namespace"), *shared):
            if kubectl is not None:
                _note_failure(item.session, kubectl)
                report.sections.append((f"namespace {kubectl.namespace}", kubectl.describe()))
    return report


def _note_failure(session: pytest.Session, kubectl: Kubectl) -> None:
    session.stash.setdefault(FAILED, set()).add(kubectl.namespace)
