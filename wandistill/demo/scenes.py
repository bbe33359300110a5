"""Drawing the captioned scenes as small videos: what the embedded teacher and its judge are trained on.

Shapes: B scenes, F frames, H = W = 64 pixels; N scene numbers. Coordinates run from -1 to 1 across the picture, x
to the right and y downwards. Scenes are named by their number (see `wandistill.demo.captions`), so that a CUDA graph
can draw random batches without the host; number EMPTY_CAPTION stands for the empty caption of classifier-free guidance.

The random draws (positions, exact sizes, speeds) come from an explicit generator on the device of the numbers.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from wandistill.demo.captions import (
    BACKGROUNDS,
    COLORS,
    PAIR_SHARE,
    RELATIONS,
    SCENE_COUNT,
    SHAPES,
    SINGLE_COUNT,
    SIZES,
    all_scenes,
    heldout_prompts,
    scene_number,
    teacher_holds_out,
    training_prompts,
)

__all__ = [
    "EMPTY_CAPTION",
    "IMAGE_SIZE",
    "Attributes",
    "attributes",
    "draw",
    "heldout_prompts",
    "sample_numbers",
    "scene_numbers",
    "training_prompts",
]

IMAGE_SIZE = 64
EMPTY_CAPTION = SCENE_COUNT

_RGB = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.7, 0.2),
    "blue": (0.15, 0.25, 0.9),
    "yellow": (0.95, 0.85, 0.1),
    "purple": (0.6, 0.15, 0.75),
    "orange": (1.0, 0.55, 0.05),
    "cyan": (0.1, 0.8, 0.85),
    "white": (1.0, 1.0, 1.0),
    "gray": (0.5, 0.5, 0.5),
    "black": (0.05, 0.05, 0.05),
}
_RADIUS = (0.22, 0.36)
"""Of a small and of a large object; each drawn object's own is up to 0.015 away from it."""


class Attributes(NamedTuple):
    """What B captions say, each an int64 [B]: indices into SIZES, COLORS, SHAPES, RELATIONS, BACKGROUNDS.

    Where `has_second` is 0, relation, size2, color2 and shape2 mean nothing.
    """

    has_second: Tensor
    size1: Tensor
    color1: Tensor
    shape1: Tensor
    relation: Tensor
    size2: Tensor
    color2: Tensor
    shape2: Tensor
    background: Tensor


@lru_cache(maxsize=4)
def _attribute_table(device: torch.device) -> Tensor:
    """[SCENE_COUNT + 1, 9]: the attributes of each scene; the last row, of the empty caption, is all zeros."""
    rows = []
    for scene in all_scenes():
        first, second = scene.first, scene.second or scene.first
        rows.append(
            (
                int(scene.second is not None),
                SIZES.index(first.size),
                COLORS.index(first.color),
                SHAPES.index(first.shape),
                RELATIONS.index(scene.relation) if scene.relation else 0,
                SIZES.index(second.size),
                COLORS.index(second.color),
                SHAPES.index(second.shape),
                BACKGROUNDS.index(scene.background),
            )
        )
    return torch.tensor([*rows, (0,) * len(Attributes._fields)], device=device)


@lru_cache(maxsize=4)
def _palette(device: torch.device) -> tuple[Tensor, Tensor]:
    """Colours of objects [7, 3] and of backgrounds [3, 3], red green blue in 0..1."""
    return (
        torch.tensor([_RGB[color] for color in COLORS], device=device),
        torch.tensor([_RGB[background] for background in BACKGROUNDS], device=device),
    )


@lru_cache(maxsize=8)
def _pair_pool(device: torch.device, held_out: bool) -> Tensor:
    """The numbers of the two-object scenes that the teacher holds out, or of those that it trains on."""
    numbers = [n for n in range(SINGLE_COUNT, SCENE_COUNT) if teacher_holds_out(n) == held_out]
    return torch.tensor(numbers, device=device)


def scene_numbers(captions: Sequence[str], device: torch.device | str = "cpu") -> Tensor:
    """The scene number of each caption, int64 [B]. A caption that is no scene is a ValueError that names it."""
    return torch.tensor([scene_number(caption) for caption in captions], dtype=torch.long, device=device)


def attributes(numbers: Tensor) -> Attributes:
    """What the captions of these scenes say."""
    return Attributes(*_attribute_table(numbers.device)[numbers].unbind(1))


def sample_numbers(count: int, generator: torch.Generator, held_out: bool = False) -> Tensor:
    """`count` random scene numbers, int64 [count] on the generator's device: 60 % two-object scenes, 40 % single ones.

    The two-object ones are those that the teacher trains on, or, with `held_out`, those that it never sees.
    """
    device = generator.device
    pool = _pair_pool(device, held_out)
    pairs = pool[torch.randint(len(pool), (count,), device=device, generator=generator)]
    singles = torch.randint(SINGLE_COUNT, (count,), device=device, generator=generator)
    return torch.where(torch.rand(count, device=device, generator=generator) < PAIR_SHARE, pairs, singles)


def _signed_distance(shape: Tensor, x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    """How far (x, y) lies outside a shape centred on 0, negative inside; all arguments broadcast to [B, F, H, W]."""
    circle = torch.sqrt(x * x + y * y) - radius
    # Square and triangle are a little smaller than their circle, so that the three shapes cover similar areas.
    square = torch.maximum(x.abs(), y.abs()) - 0.88 * radius
    triangle = torch.maximum(x.abs() * (math.sqrt(3) / 2) - y * 0.5, y) - 0.6 * radius
    return torch.where(shape == 0, circle, torch.where(shape == 1, square, triangle))


class _Motion(NamedTuple):
    """Where an object is and how large, each [B]: centre at time 0, speed per frame, radius."""

    x: Tensor
    y: Tensor
    speed_x: Tensor
    speed_y: Tensor
    radius: Tensor


def _random_motions(scene: Attributes, generator: torch.Generator) -> tuple[_Motion, _Motion]:
    """Random places and speeds of the first and second object that fit what the captions say."""
    count, device = len(scene.relation), generator.device
    u = torch.rand(count, 6, device=device, generator=generator)
    speed = (torch.rand(count, 4, device=device, generator=generator) - 0.5) * 0.12
    small, large = _RADIUS
    radius1 = small + (large - small) * scene.size1 + 0.03 * (u[:, 0] - 0.5)
    radius2 = small + (large - small) * scene.size2 + 0.03 * (u[:, 1] - 0.5)
    # The first object lies `distance` off the centre on its side, the second mirrored; across they are free to shift.
    distance, across = 0.48 + 0.08 * u[:, 2], (u[:, 3] - 0.5) * 0.5
    left, right, above, below = (scene.relation == i for i in range(4))
    side_x = torch.where(left, -distance, torch.where(right, distance, across))
    side_y = torch.where(above, -distance, torch.where(below, distance, across))
    pair = scene.has_second.bool()
    x1 = torch.where(pair, side_x, (u[:, 4] - 0.5) * 0.8)
    y1 = torch.where(pair, side_y, (u[:, 5] - 0.5) * 0.8)
    horizontal = left | right
    x2 = torch.where(horizontal, -side_x, -0.6 * across)
    y2 = torch.where(horizontal, -0.6 * across, -side_y)
    return (
        _Motion(x1, y1, speed[:, 0], speed[:, 1], radius1),
        _Motion(x2, y2, speed[:, 2], speed[:, 3], radius2),
    )


def draw(numbers: Tensor, generator: torch.Generator, frames: int = 1, times: Tensor | None = None) -> Tensor:
    """Videos of the scenes `numbers` [B], as [B, 3, F, 64, 64] in -1..1, on the device of the numbers.

    Objects drift in straight lines; the first one is in front. `times` [B, F] sets each frame's time in frames, by
    default 0, 1, ..., frames - 1.
    """
    device = numbers.device
    scene = attributes(numbers)
    motion1, motion2 = _random_motions(scene, generator)
    if times is None:
        times = torch.arange(frames, device=device, dtype=torch.float32).expand(len(numbers), frames)
    axis = torch.linspace(-1, 1, IMAGE_SIZE, device=device)
    rgb, background_rgb = _palette(device)

    def paint(canvas: Tensor, color: Tensor, shape: Tensor, motion: _Motion, visible: Tensor) -> Tensor:
        """`canvas` [B, F, 3, H, W] with one object over it, its edge smoothed over about a pixel."""
        center_x = motion.x[:, None] + motion.speed_x[:, None] * times
        center_y = motion.y[:, None] + motion.speed_y[:, None] * times
        distance = _signed_distance(
            shape.view(-1, 1, 1, 1),
            axis.view(1, 1, 1, -1) - center_x[:, :, None, None],
            axis.view(1, 1, -1, 1) - center_y[:, :, None, None],
            motion.radius.view(-1, 1, 1, 1),
        )
        opacity = (torch.sigmoid(-1.2 * IMAGE_SIZE * distance) * visible.view(-1, 1, 1, 1))[:, :, None]
        return canvas * (1 - opacity) + opacity * rgb[color][:, None, :, None, None]

    canvas = background_rgb[scene.background][:, None, :, None, None]
    canvas = canvas.expand(-1, times.shape[1], -1, IMAGE_SIZE, IMAGE_SIZE)
    canvas = paint(canvas, scene.color2, scene.shape2, motion2, scene.has_second)
    canvas = paint(canvas, scene.color1, scene.shape1, motion1, torch.ones_like(scene.has_second))
    return (canvas * 2 - 1).transpose(1, 2).contiguous()
