"""The README tells of what is there."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.readme_metrics import renewed as renewed_metrics  # noqa: E402
from tests.readme_tree import renewed  # noqa: E402
from wandistill.cli import COMMANDS  # noqa: E402
from wandistill.config import FIELDS, PLACEMENT_ALIASES  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_file_tree_is_that_of_the_modules():
    assert renewed(README) == README, "run `make generate`"


def test_the_table_of_metrics_is_that_of_the_code():
    assert renewed_metrics(README) == README, "run `make generate`"


def test_every_command_and_every_flag_in_it_exists():
    assert all(f"wandistill {name}" in README for name in COMMANDS)
    known = {
        *FIELDS,
        *PLACEMENT_ALIASES,
        "config",
        "json",
        "prompt",
        "teacher",
        "nproc_per_node",
        "output",
        "write",
        "help",
    }
    launch = {"nproc", "nnodes", "node_rank", "master_addr", "master_port"}
    used = set(re.findall(r"(?<![\w-])--([a-z_0-9]+)", README))
    commands_own = {
        "format",
        "model",
        "student",
        "gpu",
        "gpus",
        "host_memory",
        "name",
        "wait",
        "cluster_wide",
        "set",
        "only",
    }
    known |= launch | commands_own
    assert used <= known, used - known


def test_every_make_target_in_it_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([a-z0-9-]+)`", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
