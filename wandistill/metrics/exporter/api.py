"""The few questions that the cluster exporter asks the API server; objects are plain dictionaries."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from wandistill.errors import ConfigError
from wandistill.metrics.exporter.terminations import RUN_LABEL

STATE_NAME = "wandistill-exporter-state"
LEASE_NAME = "wandistill-exporter"
STATE_KEY = "state.json"
# Seconds that an answer may take; a watch is asked to end by itself before.
_TIMEOUT = 20
Object = dict[str, Any]


class Refused(Exception):
    """An answer that is an error; `status` is HTTP's, 0 for no answer at all."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api(Protocol):
    """What the exporter needs; every call may raise `Refused`."""

    def list_pods(self) -> tuple[list[Object], str]:
        """The runs' pods and the version from which `watch_pods` goes on."""
        ...

    def watch_pods(self, version: str, seconds: int) -> Iterator[tuple[str, Object]]:
        """Changes since `version` for at most `seconds`: ADDED, MODIFIED, DELETED or BOOKMARK, and the object."""
        ...

    def read_state(self) -> tuple[str, str]:
        """What `write_state` kept, and its version; both empty if there is nothing yet."""
        ...

    def write_state(self, text: str, version: str) -> str:
        """Replaces what is kept if it still has `version`; returns the new version."""
        ...

    def read_lease(self) -> Object | None:
        """The lease; None if there is none yet."""
        ...

    def write_lease(self, spec: Object, version: str | None) -> None:
        """Makes the lease (no version) or replaces it if it still has `version`."""
        ...

    def create_event(self, namespace: str, name: str, involved: Mapping[str, Any], fields: Object) -> None:
        """A Kubernetes Event; one of the same name is left as it is."""
        ...


class Cluster:
    """The API server, through the package kubernetes.

    Args:
        namespace: where the exporter's own ConfigMap and Lease are, and, unless `cluster_wide`, the pods.

    Raises:
        ConfigError: no cluster is configured.
    """

    def __init__(self, namespace: str, *, cluster_wide: bool, selector: str = RUN_LABEL) -> None:
        try:
            from kubernetes import client, config
        except ModuleNotFoundError as error:
            raise ConfigError(
                "wandistill exporter: needs the package kubernetes, which the base install leaves out: "
                "pip install 'wandistill[kube]'."
            ) from error
        try:
            config.load_config()
        except config.ConfigException as error:
            raise ConfigError(
                f"wandistill exporter: no cluster is configured ({error}); run it in a pod, or set KUBECONFIG."
            ) from error
        self._namespace, self._cluster_wide, self._selector = namespace, cluster_wide, selector
        self._core, self._leases = client.CoreV1Api(), client.CoordinationV1Api()

    def list_pods(self) -> tuple[list[Object], str]:
        answer = self._ask(self._pods(), label_selector=self._selector)
        return answer.get("items", []), answer["metadata"]["resourceVersion"]

    def watch_pods(self, version: str, seconds: int) -> Iterator[tuple[str, Object]]:
        response = self._call(
            self._pods(),
            label_selector=self._selector,
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=seconds,
            _request_timeout=(_TIMEOUT, seconds + _TIMEOUT),
        )
        rest = b""
        try:
            for chunk in response.stream(amt=None, decode_content=False):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise Refused(event["object"].get("code", 0), event["object"].get("message", ""))
                    yield event["type"], event["object"]
        except OSError as error:
            raise Refused(0, str(error)) from error
        finally:
            response.release_conn()

    def read_state(self) -> tuple[str, str]:
        try:
            found = self._ask(self._core.read_namespaced_config_map, STATE_NAME, self._namespace)
        except Refused as error:
            if error.status == 404:
                return "", ""
            raise
        return (found.get("data") or {}).get(STATE_KEY, ""), found["metadata"]["resourceVersion"]

    def write_state(self, text: str, version: str) -> str:
        metadata = {"name": STATE_NAME, "namespace": self._namespace}
        body = {"metadata": metadata | ({"resourceVersion": version} if version else {}), "data": {STATE_KEY: text}}
        if version:
            found = self._ask(self._core.replace_namespaced_config_map, STATE_NAME, self._namespace, body)
        else:
            found = self._ask(self._core.create_namespaced_config_map, self._namespace, body)
        return str(found["metadata"]["resourceVersion"])

    def read_lease(self) -> Object | None:
        try:
            return self._ask(self._leases.read_namespaced_lease, LEASE_NAME, self._namespace)
        except Refused as error:
            if error.status == 404:
                return None
            raise

    def write_lease(self, spec: Object, version: str | None) -> None:
        metadata = {"name": LEASE_NAME, "namespace": self._namespace}
        body = {"metadata": metadata | ({"resourceVersion": version} if version else {}), "spec": spec}
        if version:
            self._ask(self._leases.replace_namespaced_lease, LEASE_NAME, self._namespace, body)
        else:
            self._ask(self._leases.create_namespaced_lease, self._namespace, body)

    def create_event(self, namespace: str, name: str, involved: Mapping[str, Any], fields: Object) -> None:
        body = {"metadata": {"name": name, "namespace": namespace}, "involvedObject": dict(involved), **fields}
        try:
            self._ask(self._core.create_namespaced_event, namespace, body)
        except Refused as error:
            if error.status != 409:
                raise

    def _pods(self) -> Any:
        if self._cluster_wide:
            return self._core.list_pod_for_all_namespaces

        def of_namespace(**options: Any) -> Any:
            return self._core.list_namespaced_pod(self._namespace, **options)

        return of_namespace

    def _ask(self, function: Any, *arguments: Any, **options: Any) -> Object:
        found = json.loads(self._call(function, *arguments, _request_timeout=_TIMEOUT, **options).data)
        assert isinstance(found, dict)
        return found

    @staticmethod
    def _call(function: Any, *arguments: Any, **options: Any) -> Any:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return function(*arguments, _preload_content=False, **options)
        except ApiException as error:
            raise Refused(error.status or 0, f"{error.reason}: {error.body}") from error
        except (HTTPError, OSError) as error:
            raise Refused(0, str(error)) from error
