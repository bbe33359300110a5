"""The README's file tree, from the modules' own first sentences: `python -m tests.readme_tree --write` renews it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.readme_part import main, replaced

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- file tree -->\n", "<!-- end of file tree -->\n"
OTHER = {
    ".ci/run": "what must hold for every change",
    "docker/": "the images `control` and `train`, and the script that builds them",
    "k8s/operator/": "the training operator's init container, fit for restricted namespaces",
    "Makefile": "`make help` lists the targets",
    "helm/wandistill/": "the chart: values, presets, templates that look up tables and never calculate",
    "k8s/": "manifests: one of each preset as the chart makes it, claims, rights, kustomization",
    "pyproject.toml": "packages, tools and their settings; `uv.lock` pins them",
    "wandistill/demo/demo.yaml": "the settings of `make demo`",
    "wandistill/demo/teacher/": "the embedded teacher's weights, in diffusers' WanPipeline layout, and its model card",
}


def tree() -> str:
    """The tree as Markdown: a file a line, with what it is for."""
    lines = [f"{name:<40} {text}" for name, text in sorted(OTHER.items()) if not name.startswith("wandistill/")]
    files = sorted((ROOT / "wandistill").rglob("*.py")) + sorted((ROOT / "tests").rglob("*.py"))
    entries = {str(path.relative_to(ROOT)): sentence(path) for path in files}
    entries |= {name: text for name, text in OTHER.items() if name.startswith("wandistill/")}
    lines += [f"{name:<40} {text}" for name, text in sorted(entries.items(), key=_order)]
    return "```\n" + "\n".join(lines) + "\n```\n"


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = re.split(r"(?<=[.:;])\s", " ".join(text.split("\n\n")[0].split()))[0]
    return first.rstrip(".:;").replace("`", "")


def renewed(readme: str) -> str:
    """The README with a new tree."""
    return replaced(readme, BEGIN, tree(), END)


def _order(entry: tuple[str, str]) -> tuple[bool, list[str]]:
    parts = entry[0].split("/")
    return parts[0] == "tests", parts


if __name__ == "__main__":
    main(renewed, tree)
