"""The report's pictures: teacher and student side by side, and how the student's changed in training. No torch."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from wandistill.evaluate.rundir import PICTURES_FOLDER, RunDirectory

_STRIPS = 4
_STRIP_COLUMNS = 6
# Pictures up to this wide are scaled up pixel by pixel.
_SMALL_WIDTH = 128
_QUESTIONS = ("objects", "relation", "background")


def pictures_section(run: RunDirectory) -> str:
    """Pairs of pictures with what the judge says; empty before there are any."""
    cards = [card for entry in run.pictures if (card := _pair_card(run, entry))]
    if not cards:
        return ""
    total = run.evaluation["prompts"] if run.evaluation else len(cards)
    text = f"The first {len(cards)} of {total} prompts, not chosen; teacher and student begin with the same noise."
    return f'<section><h2>Pictures</h2><p class="soft">{text}</p><div class="pairs">{"".join(cards)}</div></section>'


def samples_section(run: RunDirectory) -> str:
    """A strip per prompt of the student's pictures during training; empty without samples."""
    steps = _spread(run.sample_steps(), _STRIP_COLUMNS)
    if not steps:
        return ""
    files = sorted(file.name for file in steps[-1][1].glob("*.png"))[:_STRIPS]
    prompts = _prompts(steps[-1][1])
    strips = []
    for place, file in enumerate(files):
        pictures = [(step, folder / file) for step, folder in steps if (folder / file).is_file()]
        figures = "".join(
            f"<figure>{_image(path, f'after step {step}')}<figcaption>step {step:,}</figcaption></figure>"
            for step, path in pictures
        )
        prompt = prompts[place] if place < len(prompts) else file
        strips.append(
            f'<div class="card"><p class="prompt">{escape(prompt)}</p><div class="strip">{figures}</div></div>'
        )
    return (
        '<section><h2>How the student’s pictures changed</h2><p class="soft">The same prompts from the same noise, '
        f'drawn during training.</p><div class="strips">{"".join(strips)}</div></section>'
    )


def pair_width(run: RunDirectory) -> str:
    """The least width of a pair's card, in CSS: large pictures get more room."""
    paths = [run.path / PICTURES_FOLDER / str(entry.get("teacher")) for entry in run.pictures[:1]]
    return "480px" if any(_png_width(path) > _SMALL_WIDTH for path in paths if path.is_file()) else "260px"


def strip_columns(run: RunDirectory) -> str:
    """Columns of a strip, in CSS; few steps leave their pictures small."""
    return str(min(max(len(run.sample_steps()), 4), _STRIP_COLUMNS))


def _pair_card(run: RunDirectory, entry: Mapping[str, Any]) -> str:
    prompt, verdicts = str(entry.get("prompt", "")), entry.get("verdict", {})
    figures = []
    for side in ("teacher", "student"):
        path = run.path / PICTURES_FOLDER / Path(str(entry.get(side))).name
        if not path.is_file():
            return ""
        caption = f"{side} {_verdict(verdicts.get(side))}"
        figures.append(f"<figure>{_image(path, f'{side}: {prompt}')}<figcaption>{caption}</figcaption></figure>")
    return (
        f'<div class="card pair"><p class="prompt">{escape(prompt)}</p>'
        f'<div class="sides">{"".join(figures)}</div></div>'
    )


def _verdict(verdict: Mapping[str, bool] | None) -> str:
    """What the judge says of one picture, as a badge; nothing if it was not asked."""
    if not verdict:
        return ""
    if verdict["right"]:
        return '<span class="verdict right">✓ right</span>'
    wrong = [question for question in _QUESTIONS if not verdict.get(question, True)]
    return f'<span class="verdict wrong">✗ {escape(", ".join(wrong) or "wrong")}</span>'


def _image(path: Path, description: str) -> str:
    kind = ' class="small"' if _png_width(path) <= _SMALL_WIDTH else ""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img{kind} alt="{escape(description)}" src="data:image/png;base64,{data}">'


def _png_width(path: Path) -> int:
    """The width that a PNG file's header gives: bytes 16 to 20."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(20)[16:20], "big")


def _prompts(folder: Path) -> list[str]:
    file = folder / "prompts.txt"
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the items, evenly spaced, with both ends."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
