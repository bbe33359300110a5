"""One of the ranks that tests/cpu/test_host_copy.py starts: places a small and then a large teacher on the CPU.

    python host_copy_world.py SMALL_FOLDER LARGE_FOLDER OUTPUT_DIR

It says on stdout what it has done, and goes on when a line comes on stdin.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(small: str, large: str, output_dir: str) -> None:
    """Says ready (imports and connections are done, the small teacher came and went), then done."""
    import torch
    from engine_setup import answers, asks, place

    from wandistill.config import from_mapping
    from wandistill.models.wan import open_teacher
    from wandistill.teacher import Setting
    from wandistill.train import distributed

    config = from_mapping({"output_dir": output_dir, "device": "cpu"})
    world = distributed.start(config)
    for folder, said in ((open_teacher(small), "ready"), (open_teacher(large), "done")):
        teacher = place("cpu", Setting(config, folder, torch.float32, world))
        answers(teacher, asks(folder, batch=1))
        if said == "ready":
            teacher.close()
        print(said, flush=True)
        sys.stdin.readline()
    distributed.stop()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(*sys.argv[1:])
