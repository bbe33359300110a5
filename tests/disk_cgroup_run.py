"""Runs a teacher at placement `disk` in a memory cgroup: what tests/cpu/test_disk_cgroup.py starts.

    python disk_cgroup_run.py TEACHER OUTPUT_DIR DISK_BUFFER CGROUP_FILE STEPS

It puts itself into the cgroup before it imports anything large, and prints for each step the bytes read from the disk.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def bytes_read() -> int:
    """Bytes that this process has read from disks."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def main(teacher: str, output_dir: str, disk_buffer: str, cgroup_file: str, steps: str) -> None:
    """Asks both experts in turn, three requests in a step."""
    Path(cgroup_file).write_text(str(os.getpid()))
    sys.path.insert(0, str(Path(__file__).parent))
    import torch
    from engine_setup import answers, asks, place, setting

    from wandistill.models.wan import open_teacher

    folder = open_teacher(teacher)
    placed = place("disk", setting(folder, Path(output_dir), torch.bfloat16, disk_buffer=disk_buffer))
    found = []
    for step in range(int(steps)):
        before = bytes_read()
        outputs = answers(placed, asks(folder, [folder.experts[step % len(folder.experts)]] * 3, batch=1))
        assert all(torch.isfinite(output.velocity).all() for output in outputs)
        found.append(bytes_read() - before)
    placed.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
