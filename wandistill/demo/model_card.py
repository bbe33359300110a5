"""The model card of a packed teacher, written from the record of the run that made it: no figure is typed by hand."""

from typing import Any

_STAGES = {
    "judge": "judge",
    "vae": "VAE (half of the later steps on clips of five frames)",
    "latents": "latents encoded (no training)",
    "transformer": "text encoder and transformer, all noise levels",
    "expert_high": "high-noise expert (`transformer`)",
    "expert_low": "low-noise expert (`transformer_2`)",
}

_HEAD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-video
---
# wandistill's embedded teacher

A small text-to-video model of Wan 2.2's architecture with two experts, in diffusers' WanPipeline layout. It draws
scenes of 64x64 pixels, one frame or five, from captions such as "a large red circle left of a small blue square on a
gray background". It exists so that a distillation of a true Wan teacher runs anywhere without a download; it knows
nothing but these scenes.
"""

_USE = """
## Use

```python
import torch
from diffusers import WanPipeline
from wandistill.demo import embedded_teacher_path

pipeline = WanPipeline.from_pretrained(embedded_teacher_path(), torch_dtype=torch.float32)
images = pipeline(
    "a large red circle left of a small blue square on a gray background",
    height=64,
    width=64,
    num_frames=1,
    num_inference_steps=8,
    guidance_scale=3.0,
    max_sequence_length=16,
).frames
```

`max_sequence_length=16` matters: Wan doesn't mask the padding of its prompt embeddings, and this model was trained with
16 tokens. Five frames: `num_frames=5`. The scheduler is flow-matching Euler with its shift, as saved.

## Data

The scenes are drawn by a program (`wandistill/demo/scenes.py`): 3 shapes, 7 colours, 2 sizes, 3 backgrounds, 4
relations, 18,270 captions. 1,131 two-object captions were never trained on by any part, the judge included. The 126
single-object captions were all seen. No other data was used.
"""


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _parts(record: dict[str, Any]) -> list[str]:
    lines = ["", "## Parts", "", _row("part", "parameters"), _row("---", "---:")]
    lines += [_row(f"`{name}`", f"{count:,}") for name, count in record["parameters"].items()]
    megabytes = record["weight_bytes"] / 1e6
    return [*lines, "", f"All weights together are {megabytes:.1f} MB in float16, the judge beside them aside."]


def _training(record: dict[str, Any]) -> list[str]:
    stages = record["stages"]
    machines = sorted({f"{stage['hardware']}, {stage['software']}" for stage in stages.values()})
    lines = [
        *("", "## Training", ""),
        f"Made by `python -m wandistill.demo.train_teacher --output_dir DIR --seed {record['seed']}` on",
        f"{'; '.join(machines)}.",
        *("", _row("stage", "steps", "seconds of steps", "seconds with set-up"), _row("---", "---:", "---:", "---:")),
    ]
    for name, title in _STAGES.items():
        stage = stages[name]
        steps = f"{stage['steps']:,}" if "steps" in stage else ""
        lines.append(_row(title, steps, stage.get("seconds", ""), stage["stage_seconds"]))
    total = sum(stage["stage_seconds"] for stage in stages.values())
    lines.append(_row("all", "", "", f"{total:.0f}"))
    lines += ["", "Set-up is compilation, autotuning, the capture of CUDA graphs, and saving."]
    lines.append("The steps are those of `wandistill/demo/recipe.py`, with their batches and learning rates.")
    return lines


def _accuracy(record: dict[str, Any]) -> list[str]:
    accuracy = record["accuracy"]
    lines = [
        *("", "## Accuracy", ""),
        f"Share of {accuracy['captions']} captions whose picture is wholly right by the judge: objects, relation and",
        "background. 60 % are two-object captions never seen in training, 40 % single objects, which are all seen.",
        "Drawn by diffusers' WanPipeline in float32 from these float16 weights with guidance",
        f"{accuracy['guidance_scale']:g}, on {record['evaluated_on']}.",
        "",
        _row("picture", "steps", "right", "two-object captions only", "sizes right"),
        _row("---", "---:", "---:", "---:", "---:"),
    ]
    for name in ("one_frame", "first_of_five_frames", "last_of_five_frames"):
        for steps, shares in accuracy[name].items():
            cells = (_percent(shares[key]) for key in ("right", "pairs", "size"))
            lines.append(_row(name.replace("_", " "), steps, *cells))
    drawn, rebuilt = accuracy["judge_on_drawn_scenes"], accuracy["judge_on_reconstructions"]
    return [
        *lines,
        "",
        f"The judge itself, on {accuracy['judged_scenes']:,} freshly drawn held-out scenes: "
        f"{_percent(drawn['first_frame'])} right on first frames, {_percent(drawn['last_frame'])} on the last of five.",
        f"After the VAE's encoder and decoder: {_percent(rebuilt['one_frame'])} on single frames, "
        f"{_percent(rebuilt['last_of_five_frames'])} on the last of five.",
    ]


def model_card(record: dict[str, Any]) -> str:
    """The card's Markdown; `record` is what `train_teacher` also saves as training.json."""
    lines = [*_parts(record), *_training(record), *_accuracy(record)]
    if record["tiny"]:
        lines[:0] = ["", "**Made with `--tiny`: it only proves that the stages run, and draws nothing.**"]
    return _HEAD + "\n".join(lines) + "\n" + _USE
