"""The cluster's API as the client needs it: a few calls, and errors that say what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from wandistill.errors import ConfigError, WandistillError
from wandistill.kube.job import GROUP, PLURAL, VERSION, Object

# The kinds that `wandistill.kube.job` makes beside PyTorchJobs: API, and the middle of its methods' names.
_KINDS = {
    "ConfigMap": ("core", "config_map"),
    "PersistentVolumeClaim": ("core", "persistent_volume_claim"),
    "NetworkPolicy": ("networking", "network_policy"),
    "Job": ("batch", "job"),
}
_RBAC = re.compile(r"cannot \w+ resource")


class ClusterError(WandistillError):
    """The API server refused or could not be reached."""

    exit_code = ConfigError.exit_code


class NotThere(ClusterError):
    """404."""


class Forbidden(ClusterError):
    """403: the account lacks a right."""


class Refused(ClusterError):
    """An admission controller, a quota or the check of the object said no."""


class Exists(ClusterError):
    """409: an object of that name is there."""


@dataclass
class Cluster:
    """A namespace of a cluster.

    Args:
        core, custom, networking, batch: clients of the API's groups, or objects with the same methods.
        watch: makes a watch with a method `stream`.
    """

    namespace: str
    core: Any
    custom: Any
    networking: Any
    batch: Any
    watch: Callable[[], Any]

    def create(self, made: Object) -> None:
        """Makes an object.

        Raises:
            Exists: there is one of that name already.
            ClusterError: it was refused.
        """
        kind, name = made["kind"], made["metadata"]["name"]
        if kind == "PyTorchJob":
            self._ask(
                f"create PyTorchJob {name}",
                self.custom.create_namespaced_custom_object,
                GROUP,
                VERSION,
                self.namespace,
                PLURAL,
                made,
            )
            return
        group, method = _KINDS[kind]
        self._ask(
            f"create {kind} {name}", getattr(getattr(self, group), f"create_namespaced_{method}"), self.namespace, made
        )

    def delete(self, kind: str, name: str) -> None:
        """Deletes an object and what it owns.

        Raises:
            NotThere: it is not there.
            ClusterError: it was refused.
        """
        if kind == "PyTorchJob":
            self._ask(
                f"delete PyTorchJob {name}",
                self.custom.delete_namespaced_custom_object,
                GROUP,
                VERSION,
                self.namespace,
                PLURAL,
                name,
            )
            return
        group, method = _KINDS[kind]
        self._ask(
            f"delete {kind} {name}",
            getattr(getattr(self, group), f"delete_namespaced_{method}"),
            name,
            self.namespace,
            propagation_policy="Background",  # a Job's own default leaves its pods
        )

    def job(self, name: str) -> Object:
        """A PyTorchJob.

        Raises:
            NotThere: it is not there, or the operator is not.
        """
        found = self._ask(
            f"get PyTorchJob {name}",
            self.custom.get_namespaced_custom_object,
            GROUP,
            VERSION,
            self.namespace,
            PLURAL,
            name,
        )
        assert isinstance(found, dict)
        return found

    def jobs(self, **selector: str) -> Object:
        """The PyTorchJobs of a `label_selector` or a `field_selector`, as the list object."""
        found = self._ask(
            "list PyTorchJobs",
            self.custom.list_namespaced_custom_object,
            GROUP,
            VERSION,
            self.namespace,
            PLURAL,
            **selector,
        )
        assert isinstance(found, dict)
        return found

    def pods(self, selector: str) -> list[Object]:
        """All pods with labels, as the API writes them."""
        return self._listed("list pods", self.core.list_namespaced_pod, label_selector=selector)

    def access_modes(self, claim: str) -> list[str]:
        """How a claim may be mounted; none where it is not there or the account may not see it."""
        found = self._seen("claim", self.core.read_namespaced_persistent_volume_claim, claim)
        return list(found["spec"].get("accessModes") or []) if found else []

    def config(self, name: str) -> dict[str, str]:
        """What a ConfigMap holds; nothing where it is not there or the account may not see it."""
        return dict(self._seen("ConfigMap", self.core.read_namespaced_config_map, name).get("data") or {})

    def _seen(self, kind: str, read: Callable[..., Any], name: str) -> Object:
        """An object as the API writes it; empty where it is not there or the account may not see it."""
        with suppress(NotThere, Forbidden):
            answer = self._ask(f"get {kind} {name}", read, name, self.namespace, _preload_content=False)
            found: Object = json.loads(answer.data)
            return found
        return {}

    def events(self, name: str) -> list[Object]:
        """Events of an object; none where the account may not see them."""
        with suppress(Forbidden):
            return self._listed(
                "list events", self.core.list_namespaced_event, field_selector=f"involvedObject.name={name}"
            )
        return []

    def log(self, pod: str, lines: int, container: str = "pytorch") -> str:
        """The last lines of a pod's container; empty where there is no log yet or no right to see it."""
        with suppress(ClusterError):
            return str(
                self._ask(
                    f"read the log of {pod}",
                    self.core.read_namespaced_pod_log,
                    pod,
                    self.namespace,
                    container=container,
                    tail_lines=lines,
                )
            )
        return ""

    def follow(self, pod: str) -> Iterator[str]:
        """Lines of a pod's trainer as they come, until it ends.

        Raises:
            ClusterError: there is no such pod or log.
        """
        answer = self._ask(
            f"follow the log of {pod}",
            self.core.read_namespaced_pod_log,
            pod,
            self.namespace,
            container="pytorch",
            follow=True,
            _preload_content=False,
        )
        rest = b""
        for chunk in answer.stream():
            *whole, rest = (rest + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
        if rest:
            yield rest.decode(errors="replace")

    def watch_job(self, name: str, seconds: int) -> Iterator[Object]:
        """A PyTorchJob as it is, and each time it changes, for so many seconds; one watch, no polling.

        Raises:
            NotThere: there is none, or it was deleted.
        """
        named = {"field_selector": f"metadata.name={name}"}
        found = self.jobs(**named)
        if not found["items"]:
            raise NotThere(
                f"PyTorchJob {name} is not in namespace {self.namespace}: 'wandistill status' lists those that are."
            )
        yield from found["items"]
        watch = self.watch()
        for event in watch.stream(
            self.custom.list_namespaced_custom_object,
            GROUP,
            VERSION,
            self.namespace,
            PLURAL,
            resource_version=found["metadata"]["resourceVersion"],
            timeout_seconds=seconds,
            **named,
        ):
            if event["type"] == "DELETED":
                raise NotThere(f"PyTorchJob {name} was deleted.")
            yield event["object"]

    def _listed(self, what: str, call: Callable[..., Any], **options: Any) -> list[Object]:
        """Items of a list in the API's own spelling."""
        answer = self._ask(what, call, self.namespace, _preload_content=False, **options)
        items = json.loads(answer.data)["items"]
        assert isinstance(items, list)
        return items

    def _ask(self, what: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, **options)
        except Exception as error:
            if not hasattr(error, "status") or not hasattr(error, "body"):
                if type(error).__module__.startswith("urllib3"):
                    raise ClusterError(f"cannot {what}: the API server does not answer ({error}).") from error
                raise
            raise told(what, self.namespace, int(error.status or 0), error.body) from error


def told(what: str, namespace: str, status: int, body: Any) -> ClusterError:
    """An answer of the API server as an error for people."""
    message = _message(body)
    if status == 409:
        return Exists(f"cannot {what}: it exists in namespace {namespace}.")
    if status == 404:
        if "could not find the requested resource" in message or "page not found" in message:
            return NotThere(
                f"cannot {what}: this cluster has no PyTorchJob; install the Kubeflow training operator: kubectl apply "
                "--server-side -k 'github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.4'."
            )
        return NotThere(f"cannot {what}: not found in namespace {namespace} ({message}).")
    if status in (401, 403) and (status == 401 or _RBAC.search(message)):
        return Forbidden(
            f"cannot {what}: the account lacks the right ({message}); have it bound to the role in k8s/rbac.yaml."
        )
    if status in (400, 403, 422):
        return Refused(f"cannot {what}: the cluster refused it: {message}")
    return ClusterError(f"cannot {what}: the API server answered {status}: {message}")


def _message(body: Any) -> str:
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")
    with suppress(ValueError):
        content = json.loads(text)
        if isinstance(content, Mapping):
            return str(content.get("message", text))
    return text.strip()


def connect(namespace: str | None, context: str | None = None) -> Cluster:
    """The cluster of the kubeconfig, or the one that this pod runs in.

    Raises:
        ConfigError: there is no kubeconfig, or the packages are missing.
    """
    try:
        from kubernetes import client, config, watch
    except ModuleNotFoundError as error:
        raise ConfigError("the Kubernetes client is not installed: pip install 'wandistill[kube]'.") from error
    own = "default"
    try:
        config.load_kube_config(context=context)
        _, active = config.list_kube_config_contexts()
        if context is None:
            own = active["context"].get("namespace", own)
    except config.ConfigException as error:
        try:
            config.load_incluster_config()
        except config.ConfigException:
            raise ConfigError(f"no cluster: {error}. Set KUBECONFIG, or --context to one of its contexts.") from error
    return Cluster(
        namespace or own,
        client.CoreV1Api(),
        client.CustomObjectsApi(),
        client.NetworkingV1Api(),
        client.BatchV1Api(),
        watch.Watch,
    )
