"""The chart's generated files and the manifests of k8s/: `python -m tests.generate_chart --write` renews them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from wandistill import config
from wandistill.catalog import gpus, models
from wandistill.kube import fields, pools, sizing, tables, values
from wandistill.kube.job import render
from wandistill.kube.render_command import to_yaml
from wandistill.kube.sizes import prepare_sizes
from wandistill.launch.prepared import TRIES
from wandistill.units import format_bytes

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm/wandistill"
PRESETS = CHART / "presets"
# Those that make a job; monitoring makes none.
JOB_PRESETS = [path for path in sorted(PRESETS.glob("*.yaml")) if path.stem != "monitoring"]
# Manifests of presets with a change, by their names.
VARIANTS: dict[str, tuple[Path, dict[str, Any]]] = {
    "2-node-prepared": (PRESETS / "2-node.yaml", {"prepare": {"enabled": True}}),
}
TABLES = CHART / "files/tables"
# The most ranks of a pod for which the chart knows the processor request.
_RANKS = 16
# Manifests stand for an image and claims that everyone names anew.
SAMPLE: dict[str, Any] = {"image": {"train": {"repository": "registry.example.com/wandistill"}}}
PROMPTS: dict[str, Any] = {"data": {"existingClaim": "prompts"}}


def generated() -> dict[str, str]:
    """Contents by path, tables apart."""
    made = {
        "helm/wandistill/values.yaml": values_yaml(),
        "helm/wandistill/values.schema.json": json.dumps(values.schema(), indent=1) + "\n",
        "helm/wandistill/README.md": chart_readme(),
        "helm/wandistill/files/catalog.json": json.dumps(catalog(), indent=1) + "\n",
    }
    for preset in JOB_PRESETS:
        made[f"k8s/{preset.name}"] = manifest(preset)
    for name, (preset, change) in VARIANTS.items():
        made[f"k8s/{name}.yaml"] = manifest(preset, change, name)
    return made


def catalog() -> dict[str, Any]:
    """What templates look up beside the tables."""
    return {
        "models": {name: (model.repositories or (name,))[0] for name, model in models().items()},
        "modelNames": list(models()),
        "pool": fields.defaults(values.POOL),
        "owned": pools.OWNED,
        "settings": sorted(config.FIELDS),
        "sizing": {key: config.FIELDS[key].default for key in pools.SIZING},
        "poolInputs": pools.POOL_INPUTS,
        "trainingInputs": pools.TRAINING_INPUTS,
        "batchSize": config.FIELDS["batch_size"].default,
        "dtypes": tables.DTYPES,
        "letters": {letter: placement for placement, letter in tables.LETTERS.items()},
        "usable": {name: format_bytes(gpu.usable) for name, gpu in gpus().items()},
        "products": {name: list(gpu.products) for name, gpu in gpus().items()},
        "cores": {
            kind: {"threads": cores, "cpus": {str(ranks): str(cores * ranks) for ranks in range(1, _RANKS + 1)}}
            for kind, cores in sizing.CORES.items()
        },
        "scratch": sizing.SCRATCH,
        "prepare": {
            name: {"memory": made.memory, "cpus": made.cpus, "threads": made.threads, "scratch": made.scratch}
            for name, made in ((name, prepare_sizes(model)) for name, model in models().items())
        },
        "prepareTries": TRIES - 1,
    }


def values_yaml() -> str:
    """The chart's defaults, each with its comment."""
    head = "# Made by `make generate` from wandistill/kube/values.py. Presets are in presets/.\n"
    return head + "\n".join(_entries(values.VALUES.fields, 0)) + "\n"


def _entries(spec: Mapping[str, fields.Field], depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, field in spec.items():
        if field.doc:
            yield f"{indent}# -- {field.doc}"
        if field.fields:
            yield f"{indent}{name}:"
            yield from _entries(field.fields, depth + 1)
        else:
            yield f"{indent}{name}: {json.dumps(field.default)}"


def chart_readme() -> str:
    """The chart's README: its values with their defaults and comments."""
    lines = [
        "# Chart wandistill",
        "",
        "Made by `make generate` from wandistill/kube/values.py. How to use it is in the project's README; presets are",
        "in `presets/`.",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
        *_rows(values.VALUES.fields, ""),
        "",
        "Each entry of `pools`:",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
        *_rows(values.POOL.fields, ""),
    ]
    return "\n".join(lines) + "\n"


def _rows(spec: Mapping[str, fields.Field], path: str) -> Iterator[str]:
    for name, field in spec.items():
        if field.fields:
            yield from _rows(field.fields, f"{path}{name}.")
            continue
        choices = f" ({', '.join(field.choices)})" if field.choices else ""
        yield f"| {path}{name} | {field.kind} | `{json.dumps(field.default)}` | {field.doc}{choices} |"


def manifest(preset: Path, change: Mapping[str, Any] | None = None, name: str = "") -> str:
    """The objects of a preset, or of one with a change that has a name of its own."""
    more = "".join(f", {key} {json.dumps(value)}" for key, value in (change or {}).items())
    head = f"# Made by `make generate` from helm/wandistill/presets/{preset.name}{more}: set your image and claims.\n"
    return head + to_yaml(render(preset_values(preset, change), release(name or preset.stem)))


def release(name: str) -> str:
    """The release's name in the manifest of a name."""
    return f"distil-{name}"


def preset_values(preset: Path, change: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A preset with an image, and prompts where the teacher brings none."""
    own = values.load(preset)
    return values.resolve(SAMPLE, own, {} if own["teacher"]["model"] == "embedded" else PROMPTS, change or {})


def write_table(name: str) -> None:
    """A table; the planner needs up to a minute for it."""
    text = json.dumps(tables.build(name), separators=(",", ":")) + "\n"
    (TABLES / f"{name}.json").write_text(text, encoding="utf-8")


def stale(written: Mapping[str, str]) -> list[str]:
    """Files that differ from what the code makes."""
    missing = [name for name, text in written.items() if not _same(ROOT / name, text)]
    return missing + ([] if tables_fresh() else ["helm/wandistill/files/tables"])


def tables_fresh() -> bool:
    """Whether the tables were made from the planner and catalogue that are there."""
    return _same(TABLES / "source.txt", tables.source_digest() + "\n")


def write() -> None:
    """Renews all; the tables only where the planner or the catalogue changed."""
    for name, text in generated().items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(text, encoding="utf-8")
    if not tables_fresh():
        TABLES.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor() as pool:
            list(pool.map(write_table, tables.table_names()))
        (TABLES / "source.txt").write_text(tables.source_digest() + "\n", encoding="utf-8")


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    if "--write" in sys.argv:
        write()
    else:
        differing = stale(generated())
        if differing:
            sys.exit(f"out of date: {', '.join(differing)}; run make generate and commit what it changes.")
