"""A stand-in for the API server: it keeps objects and answers as the Kubernetes client's classes do."""

import copy
import json
from types import SimpleNamespace


class ApiError(Exception):
    """As kubernetes.client.ApiException."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status, self.body = status, json.dumps({"message": message})


class Server:
    """Jobs, pods, events and logs of one namespace; `refuse` maps a method to the error that it raises."""

    def __init__(self):
        self.kept, self.pods, self.events, self.logs = {}, [], {}, {}
        self.refuse, self.calls, self.changes = {}, [], []

    def __getattr__(self, name):
        if not name.startswith(("create_", "delete_", "get_", "list_", "read_")):
            raise AttributeError(name)

        def call(*arguments, **options):
            self.calls.append((name, options))
            if name in self.refuse:
                raise self.refuse[name]
            return getattr(self, f"_{name.split('_', 1)[0]}")(name, arguments, options)

        return call

    def _create(self, name, arguments, options):
        made = arguments[-1]
        key = (made["kind"], made["metadata"]["name"])
        if key in self.kept:
            raise ApiError(409, f"{key[1]} already exists")
        self.kept[key] = copy.deepcopy(made)

    def _delete(self, name, arguments, options):
        wanted = arguments[-1] if "custom" in name else arguments[0]
        kind = "PyTorchJob" if "custom" in name else name.removeprefix("delete_namespaced_")
        found = [key for key in self.kept if key[1] == wanted and key[0].lower() == kind.replace("_", "").lower()]
        if not found:
            raise ApiError(404, f"{wanted} not found")
        del self.kept[found[0]]

    def _get(self, name, arguments, options):
        try:
            return self.kept[("PyTorchJob", arguments[-1])]
        except KeyError:
            raise ApiError(404, f'pytorchjobs.kubeflow.org "{arguments[-1]}" not found') from None

    def _list(self, name, arguments, options):
        if "custom" in name:
            wanted = options.get("field_selector", "").removeprefix("metadata.name=")
            labels = dict(part.split("=") for part in options.get("label_selector", "").split(",") if part)
            items = [
                made
                for (kind, own), made in self.kept.items()
                if kind == "PyTorchJob"
                and wanted in ("", own)
                and all(made["metadata"]["labels"].get(key) == value for key, value in labels.items())
            ]
            return {"metadata": {"resourceVersion": "7"}, "items": items}
        if "event" in name:
            items = self.events.get(options["field_selector"].split("=")[1], [])
        else:
            labels = dict(part.split("=") for part in options["label_selector"].split(","))
            items = [
                pod
                for pod in self.pods
                if all(pod["metadata"]["labels"].get(key) == value for key, value in labels.items())
            ]
        return SimpleNamespace(data=json.dumps({"items": items}))

    def _read(self, name, arguments, options):
        kinds = {
            "read_namespaced_persistent_volume_claim": "PersistentVolumeClaim",
            "read_namespaced_config_map": "ConfigMap",
        }
        if name in kinds:
            if (kinds[name], arguments[0]) not in self.kept:
                raise ApiError(404, f"{arguments[0]} not found")
            return SimpleNamespace(data=json.dumps(self.kept[kinds[name], arguments[0]]))
        if arguments[0] not in self.logs:
            raise ApiError(400, f'container "pytorch" in pod "{arguments[0]}" is waiting to start')
        text = self.logs[arguments[0]]
        return SimpleNamespace(stream=lambda: [text.encode()]) if options.get("follow") else text

    def stream(self, call, *arguments, **options):
        """As kubernetes.watch.Watch: the changes that the test has laid down."""
        self.calls.append(("watch", options))
        while self.changes:
            change = self.changes.pop(0)
            if change["type"] != "DELETED":
                self.kept[("PyTorchJob", change["object"]["metadata"]["name"])] = change["object"]
            yield change


def pod(job, role="master", index=0, spec=None, **status):
    """A pod of a job."""
    return {
        "spec": spec or {},
        "metadata": {
            "name": f"{job}-{role}-{index}",
            "labels": {
                "app.kubernetes.io/name": "wandistill",
                "wandistill.dev/pool": "main",
                "training.kubeflow.org/job-name": job,
                "training.kubeflow.org/replica-type": role,
                "training.kubeflow.org/replica-index": str(index),
            },
        },
        "status": status,
    }


def preparing(job, **status):
    """The pod that prepares a job."""
    labels = {"app.kubernetes.io/name": "wandistill", "wandistill.dev/prepare": job}
    return {"metadata": {"name": f"{job}-prepare-x", "labels": labels}, "spec": {}, "status": status}


def condition(kind, message="", status="True"):
    """A condition of a job."""
    return {"type": kind, "status": status, "reason": f"PyTorchJob{kind}", "message": message}
