"""One leader among exporters, by a Lease that its holder renews."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Any

from wandistill.metrics.exporter.api import Api, Refused

DURATION = 30


class Leadership:
    """Takes and renews the lease.

    A lease counts as free once it was not renewed for `DURATION` seconds of this process's own clock: the holder's
    clock is not trusted.
    """

    def __init__(self, api: Api, identity: str) -> None:
        self._api, self._identity = api, identity
        self._seen: Any = None
        self._since = 0.0

    def hold(self) -> bool:
        """Takes or renews the lease; returns whether this process has it.

        Raises:
            Refused: the API server does not answer, or does not allow it.
        """
        lease = self._api.read_lease()
        if lease is None:
            return self._write(0, None)
        spec = lease.get("spec") or {}
        mine = spec.get("holderIdentity") == self._identity
        renewed = (spec.get("holderIdentity"), spec.get("renewTime"))
        if renewed != self._seen:
            self._seen, self._since = renewed, time.monotonic()
        if not mine and spec.get("holderIdentity") and time.monotonic() - self._since < DURATION:
            return False
        transitions = int(spec.get("leaseTransitions") or 0) + (not mine)
        return self._write(transitions, lease["metadata"]["resourceVersion"])

    def release(self) -> None:
        """Gives the lease up, so that the next exporter need not wait."""
        lease = self._api.read_lease()
        if lease is not None and (lease.get("spec") or {}).get("holderIdentity") == self._identity:
            spec = {**lease["spec"], "holderIdentity": ""}
            self._api.write_lease(spec, lease["metadata"]["resourceVersion"])

    def _write(self, transitions: int, version: str | None) -> bool:
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": DURATION,
            "renewTime": now,
            "leaseTransitions": transitions,
        }
        try:
            self._api.write_lease(spec, version)
        except Refused as error:
            if error.status == 409:  # another was faster
                return False
            raise
        return True
