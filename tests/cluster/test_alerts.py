"""A rank that stops in the middle of its run. Its alert takes a minute, so the tests that wait for it come last."""

import pytest

from tests.cluster.faults import Stopped
from tests.cluster.monitoring import Monitoring

pytestmark = pytest.mark.cluster

# What the kernel says of the container's memory, cgroup version 1 or 2, and of /dev/shm.
KERNEL = """
import os
def first(*names):
    return next(int(open(name).read()) for name in names if os.path.exists(name))
root = "/sys/fs/cgroup/"
shm = os.statvfs("/dev/shm")
print(first(root + "memory/memory.limit_in_bytes", root + "memory.max"),
      first(root + "memory/memory.usage_in_bytes", root + "memory.current"),
      (shm.f_blocks - shm.f_bfree) * shm.f_frsize, shm.f_blocks * shm.f_frsize)
"""


def test_annotated_pod_is_scraped_and_its_memory_is_what_the_kernel_says(monitoring: Monitoring, stopped: Stopped):
    own = f'job="by-annotations", namespace="{stopped.kubectl.namespace}", run="{stopped.job}"'
    (step,) = monitoring.prometheus.wait(f"wandistill_step{{{own}}} == 1")
    assert step["metric"]["pod"] == f"{stopped.job}-master-0"

    told = stopped.kubectl.run("exec", f"{stopped.job}-master-0", "--", "python", "-c", KERNEL)
    limit, usage, used, size = map(int, told.split())
    # A new scrape, of what has not changed since the rank was stopped but for that process.
    assert value(monitoring, f'wandistill_pod_memory_bytes{{state="limit", {own}}}') == limit
    assert value(monitoring, f'wandistill_pod_memory_bytes{{state="usage", {own}}}') == pytest.approx(usage, rel=0.05)
    assert value(monitoring, f'wandistill_pod_shm_bytes{{state="used", {own}}}') == used
    assert value(monitoring, f'wandistill_pod_shm_bytes{{state="size", {own}}}') == size


def value(monitoring: Monitoring, expr: str) -> float:
    (sample,) = monitoring.prometheus.wait(expr)
    return float(sample["value"][1])
