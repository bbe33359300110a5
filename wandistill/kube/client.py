"""The Python API: submit a run from values, see how it is, follow its logs, wait for its end, delete it.

client = Client()
(name,) = client.submit(values.resolve(values.load(Path("my.yaml"))), "my-run")
print(client.wait(name).text())
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from wandistill.errors import WandistillError
from wandistill.kube.cluster import Cluster, ClusterError, Exists, NotThere, connect
from wandistill.kube.job import ANNOTATION, INSTANCE, render
from wandistill.kube.pods import PREPARE
from wandistill.kube.progress import ROLE_LABEL, Progress, of_ends, of_exporter, of_log
from wandistill.kube.shared_claims import claims_of, unshared
from wandistill.kube.status import INDEX_LABEL, JOB_LABEL, JobStatus, job_status
from wandistill.launch.prepared import WAITING
from wandistill.metrics.exporter.api import STATE_KEY, STATE_NAME

_OURS = "app.kubernetes.io/name=wandistill"
_LOG_LINES = 50
# The API server ends a watch when it wants; it is begun anew until the deadline.
_WATCH_SECONDS = 300
_DAY = 24 * 3600.0


class TimedOut(WandistillError):
    """A job has not ended in the time that was given."""


class Client:
    """Jobs of a namespace.

    Args:
        cluster: in place of the one that the kubeconfig names.
    """

    def __init__(self, cluster: Cluster | None = None, *, namespace: str | None = None) -> None:
        self.cluster = cluster or connect(namespace)

    def submit(self, values: Mapping[str, Any], release: str) -> list[str]:
        """Makes the objects of a release; returns the names of its jobs. What is there already stays.

        Raises:
            ConfigError: values that break a rule.
            ClusterError: the cluster refused an object.
        """
        made = []
        for each in render(values, release):
            # Names of jobs and their ConfigMaps end in a digest: the same name is the same content.
            with suppress(Exists):
                self.cluster.create(each)
            if each["kind"] == "PyTorchJob":
                made.append(each["metadata"]["name"])
        return made

    def status(self, name: str) -> JobStatus:
        """How a job is.

        Raises:
            NotThere: there is no such job.
        """
        job = self.cluster.job(name)
        pods = self.cluster.pods(f"{JOB_LABEL}={name}")
        prepares = f"{ANNOTATION}/{PREPARE}" in (job["metadata"].get("annotations") or {})
        preparing = self.cluster.pods(f"{ANNOTATION}/{PREPARE}={name}") if prepares else []
        events = self.cluster.events(name)
        waiting = [pod for pod in (*preparing, *pods) if (pod.get("status") or {}).get("phase") == "Pending"]
        for pod in waiting:
            events += self.cluster.events(pod["metadata"]["name"])
        notes = self.unshared([job]) if waiting else []
        progress, more = self._progress(name, pods)
        if progress is None or progress.what == WAITING:
            logs = [self.cluster.log(_name(pod), _LOG_LINES, PREPARE) for pod in preparing]
            progress = next((found for found in map(of_log, logs) if found), progress)
        return job_status(job, [*preparing, *pods], events, progress, [*notes, *more])

    def statuses(self) -> list[JobStatus]:
        """All jobs of wandistill in a namespace, by two lists however many there are; progress of ended ones only."""
        jobs = self.cluster.jobs(label_selector=_OURS)["items"]
        by_job: dict[str, list[dict[str, Any]]] = {}
        for pod in self.cluster.pods(_OURS) if jobs else []:
            by_job.setdefault(pod["metadata"]["labels"].get(JOB_LABEL, ""), []).append(pod)
        found = [(job, by_job.get(_name(job), [])) for job in jobs]
        return [job_status(job, pods, progress=of_ends(pods)) for job, pods in found]

    def unshared(self, jobs: Sequence[Mapping[str, Any]]) -> list[str]:
        """What is wrong with the claims that several pods of these jobs together mount; one that is missing has none.

        Args:
            jobs: PyTorchJobs as they are, or as they are rendered.
        """
        found = [claims_of(job) for job in jobs]
        names = dict.fromkeys(name for _, names in found for name in names)
        counts = {name: sum(pods for pods, mounted in found if name in mounted) for name in names}
        shared = {name: pods for name, pods in counts.items() if pods > 1}
        told = [unshared(name, self.cluster.access_modes(name), pods) for name, pods in shared.items()]
        return [sentence for sentence in told if sentence]

    def wait(self, name: str, seconds: float = _DAY) -> JobStatus:
        """The status of a job when it has ended, by a watch.

        Raises:
            NotThere: there is no such job, or it was deleted.
            TimedOut: it goes on after so many seconds.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for job in self.cluster.watch_job(name, max(1, min(int(left), _WATCH_SECONDS))):
                if job_status(job, []).over:
                    return self.status(name)
        raise TimedOut(f"PyTorchJob {name} has not ended after {seconds:.0f} s: {self.status(name).text()}")

    def logs(self, name: str) -> Iterator[str]:
        """Lines of all pods of a job as they come, each with its pod's role in front.

        Raises:
            NotThere: there is no such job, or it has no pods.
        """
        self.cluster.job(name)
        pods = self.cluster.pods(f"{JOB_LABEL}={name}")
        if not pods:
            raise NotThere(f"PyTorchJob {name} has no pods: 'wandistill status {name}' says why.")
        lines: queue.Queue[str | None] = queue.Queue()

        def follow(pod: Mapping[str, Any]) -> None:
            labels = pod["metadata"]["labels"]
            front = f"[{labels.get(ROLE_LABEL, 'pod')}-{labels.get(INDEX_LABEL, '0')}]"
            try:
                for line in self.cluster.follow(pod["metadata"]["name"]):
                    lines.put(f"{front} {line}")
            except ClusterError as error:
                lines.put(f"{front} {error}")
            finally:
                lines.put(None)

        for pod in pods:
            threading.Thread(target=follow, args=(pod,), daemon=True).start()
        open_pods = len(pods)
        while open_pods:
            line = lines.get()
            if line is None:
                open_pods -= 1
            else:
                yield line

    def delete(self, name: str) -> None:
        """Deletes a job, its pods and its ConfigMap; claims and what is on them stay.

        Raises:
            NotThere: there is no such job.
        """
        release = (self.cluster.job(name)["metadata"].get("labels") or {}).get(INSTANCE, "")
        self.cluster.delete("PyTorchJob", name)
        same = self.cluster.jobs(label_selector=f"{_OURS},{INSTANCE}={release}")["items"]
        others = [job for job in same if _name(job) != name]
        self._forget("ConfigMap", name)
        self._forget("Job", f"{name}-{PREPARE}")
        if release and not others:
            self._forget("NetworkPolicy", release)

    def _forget(self, kind: str, name: str) -> None:
        with suppress(NotThere):
            self.cluster.delete(kind, name)

    def _progress(self, name: str, pods: Sequence[Mapping[str, Any]]) -> tuple[Progress | None, list[str]]:
        """How far a job is; where no pod can tell it any more, what the exporter remembers, failures too."""
        found = of_log(self._master_log(pods)) or of_ends(pods)
        if found is not None or pods:
            return found, []
        return of_exporter(self.cluster.config(STATE_NAME).get(STATE_KEY, ""), self.cluster.namespace, name)

    def _master_log(self, pods: Sequence[Mapping[str, Any]]) -> str:
        for pod in pods:
            if pod["metadata"]["labels"].get(ROLE_LABEL) == "master":
                return self.cluster.log(pod["metadata"]["name"], _LOG_LINES)
        return ""


def _name(job: Mapping[str, Any]) -> str:
    return str(job["metadata"]["name"])
