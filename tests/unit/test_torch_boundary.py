"""What runs without torch imports nothing of it."""

import subprocess
import sys
from pathlib import Path

import wandistill

ROOT = Path(wandistill.__file__).parent
BELOW = ("models", "teacher", "data", "train", "evaluate", "demo")

BLOCKED = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "diffusers", "transformers", "accelerate", "safetensors", "numpy"):
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Blocker())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def modules_above_the_boundary() -> list[str]:
    names = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] not in BELOW and parts[-1] not in ("__main__", "__init__"):
            names.append(".".join(("wandistill", *parts)))
    return names


def test_everything_above_the_boundary_imports_where_torch_cannot_be_imported():
    names = modules_above_the_boundary()
    assert "wandistill.config" in names and "wandistill.cli" in names
    result = subprocess.run([sys.executable, "-c", BLOCKED, *names], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_command_that_needs_torch_says_what_to_install():
    command = "from wandistill.cli import main; sys.exit(main(['train']))"
    code = BLOCKED.replace("importlib.import_module(name)", command)
    result = subprocess.run([sys.executable, "-c", code, "once"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "pip install 'wandistill[train]'" in result.stderr
    assert "Traceback" not in result.stderr
