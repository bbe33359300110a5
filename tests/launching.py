"""Starting `wandistill launch` from tests, with fake_agent.py in torchrun's place and fake_rank.py in the ranks'."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent

LAUNCH = """
import json, sys
from wandistill.cli import main
from wandistill.launch import command, launcher
node, agent, rank, *flags = sys.argv[1:]
real = launcher.Launcher
def faked(found, config, given, **options):
    return real(found, config, given, **options, agent=(sys.executable, agent), program=(rank,))
command.Launcher = faked
sys.exit(main(["launch", *json.loads(node), "--", *flags]))
"""


def start(
    tmp_path: Path,
    behaviour: str,
    *flags: str,
    ranks: int = 2,
    node: list[str] | None = None,
    prefix: tuple[str, ...] = (),
) -> subprocess.Popen[str]:
    """Starts a launcher whose ranks do `behaviour`; it writes into `run` and `termination-log` below `tmp_path`."""
    log = tmp_path / "termination-log"
    log.touch()
    shape = json.dumps(node or ["--nproc", str(ranks)])
    scripts = [str(TESTS / "fake_agent.py"), str(TESTS / "fake_rank.py")]
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", LAUNCH, shape, *scripts, "--output_dir", str(tmp_path / "run"), *flags],
        env={**os.environ, "FAKE_RANK": behaviour, "WANDISTILL_TERMINATION_LOG": str(log)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def launch(
    tmp_path: Path, behaviour: str, *flags: str, ranks: int = 2, prefix: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Runs a launcher to its end: exit code, and what was printed."""
    process = start(tmp_path, behaviour, *flags, ranks=ranks, prefix=prefix)
    printed, _ = process.communicate(timeout=120)
    return process.returncode, printed


def termination(tmp_path: Path) -> dict[str, Any]:
    """What the launcher left as a pod's termination message."""
    text = (tmp_path / "termination-log").read_text()
    assert text.count("\n") == 1 and len(text.encode()) <= 4000
    content = json.loads(text)
    assert isinstance(content, dict)
    return content


def below(pid: int) -> list[int]:
    """All processes below one."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:  # it is gone
            continue
    found = [child for child, parent in parents.items() if parent == pid]
    return [*found, *(one for child in found for one in below(child))]
