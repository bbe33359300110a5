"""The README.md of an exported student: what it is, and a call that draws with it (a test runs it)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_TEXT = """\
---
library_name: diffusers
pipeline_tag: text-to-image
---

# A text-to-image student of {teacher}

{millions} million parameters, distilled with wandistill from {teacher}. The folder is a stock diffusers
`WanPipeline` with one transformer; it needs diffusers, transformers, accelerate and ftfy, and not wandistill.

```python
import torch
from diffusers import WanPipeline

folder = "."  # this folder
pipe = WanPipeline.from_pretrained(folder, torch_dtype={{"default": torch.{dtype}, "vae": torch.float32}})
picture = pipe(
    {prompt},
    num_frames={num_frames},
    guidance_scale={guidance_scale},
    num_inference_steps={steps},
    height={height},
    width={width},
    max_sequence_length={token_length},
    generator=torch.Generator().manual_seed(0),
    output_type="pil",
).frames[0][0]
picture.save("picture.png")
```

Give these arguments as they are; the pipeline's own defaults are for video, and other values spoil the picture:

- `guidance_scale={guidance_scale}`: guidance is folded into the weights, so that the pipeline's default of 5 would
  guide twice. A negative prompt has no effect.
- `num_frames={num_frames}`: the student draws pictures; the default is 81 frames.
- `max_sequence_length={token_length}`: Wan does not mask a prompt's padding, so the length must be the trained one.
- `height` and `width`: {width}x{height} is what the student was trained for.
- `num_inference_steps={steps}`: fewer are faster, more change little. The scheduler is Euler's with shift {flow_shift}.

Text encoder, tokenizer and VAE are the teacher's. Their large files may be hard links to the teacher's own: copy the
folder before you write into it. `wandistill.json` holds the same settings for programs, and the record of the training.
The teacher's licence holds for what is taken from it.
"""


def readme(teacher: str, parameters: int, sampling: Mapping[str, Any], prompt: str) -> str:
    """The text, for a student of `parameters` parameters and the settings in `sampling` (see `SampleSettings`)."""
    return _TEXT.format(
        teacher=teacher, millions=f"{parameters / 1e6:,.1f}", prompt=json.dumps(prompt, ensure_ascii=False), **sampling
    )
