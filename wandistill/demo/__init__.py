"""The embedded teacher: a small two-expert Wan text-to-video model, the scenes that it draws, and their judge.

Nothing heavy is imported here, so that code without torch can ask where the teacher's folder is.
"""

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


def embedded_teacher_path() -> Path:
    """The shipped teacher: a folder in diffusers' WanPipeline layout (float16 weights)."""
    return _FOLDER / "teacher"


def judge_path() -> Path:
    """The shipped judge's weights (float16 safetensors), see `wandistill.demo.judge`."""
    return _FOLDER / "judge.safetensors"
