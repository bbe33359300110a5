"""The judge: a small network that says whether a picture shows what its caption says.

It reads which objects (shape and colour) are in the picture, which background, how the object that the caption names
first lies to the other one, and how large both are. A picture is "right" when objects, relation and background all are.

Shapes: B pictures; 21 object classes (shape x colour).
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from wandistill.demo import judge_path
from wandistill.demo.captions import BACKGROUNDS, COLORS, RELATIONS, SHAPES, SIZES
from wandistill.demo.scenes import IMAGE_SIZE, Attributes, attributes, scene_numbers

OBJECT_CLASSES = len(SHAPES) * len(COLORS)
_CHANNELS = (3, 32, 64, 128, 128)
_FEATURES = 256


class JudgeLogits(NamedTuple):
    """What the judge reads in B pictures."""

    objects: Tensor
    """[B, 21], positive where an object of that shape and colour is there."""
    relation: Tensor
    """[B, 4], of the first-named object to the other."""
    background: Tensor
    """[B, 3]"""
    sizes: Tensor
    """[B, 2, 2]: first and second object; small and large."""


def object_class(shape: Tensor, color: Tensor) -> Tensor:
    return shape * len(COLORS) + color


class Judge(nn.Module):
    """A convolutional network with a head per question (1.19 M parameters)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise(_CHANNELS):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.GELU()]
            layers += [nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.GELU()]
        pixels = (IMAGE_SIZE // 2 ** (len(_CHANNELS) - 1)) ** 2
        self.features = nn.Sequential(*layers, nn.Flatten(), nn.Linear(_CHANNELS[-1] * pixels, _FEATURES), nn.GELU())
        self.objects = nn.Linear(_FEATURES, OBJECT_CLASSES)
        self.background = nn.Linear(_FEATURES, len(BACKGROUNDS))
        # These two are told which object the caption names first: "left of" and the order of sizes depend on it.
        self.relation = self._head(len(RELATIONS))
        self.sizes = self._head(2 * len(SIZES))

    @staticmethod
    def _head(outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(_FEATURES + OBJECT_CLASSES, 128), nn.GELU(), nn.Linear(128, outputs))

    def forward(self, images: Tensor, first_object: Tensor) -> JudgeLogits:
        """`images` [B, 3, 64, 64] in -1..1; `first_object` [B], the class of the first-named object."""
        features = self.features(images)
        told = torch.cat([features, F.one_hot(first_object, OBJECT_CLASSES).to(features.dtype)], dim=1)
        return JudgeLogits(
            objects=self.objects(features),
            relation=self.relation(told),
            background=self.background(features),
            sizes=self.sizes(told).unflatten(1, (2, len(SIZES))),
        )


def object_labels(scene: Attributes) -> Tensor:
    """[B, 21] of 0 and 1: the objects that the captions name."""
    first = F.one_hot(object_class(scene.shape1, scene.color1), OBJECT_CLASSES)
    second = F.one_hot(object_class(scene.shape2, scene.color2), OBJECT_CLASSES)
    return torch.maximum(first, second * scene.has_second[:, None]).float()


def judge_loss(judge: Judge, images: Tensor, scene: Attributes) -> Tensor:
    """The training loss: cross entropies of the four questions; relation and second size count for pairs only."""
    read = judge(images, object_class(scene.shape1, scene.color1))
    pair = scene.has_second.float()
    relation = F.cross_entropy(read.relation, scene.relation, reduction="none")
    second_size = F.cross_entropy(read.sizes[:, 1], scene.size2, reduction="none")
    return (
        5 * F.binary_cross_entropy_with_logits(read.objects, object_labels(scene))
        + (relation * pair).mean()
        + F.cross_entropy(read.background, scene.background)
        # Size is a side question, which "right" doesn't ask.
        + 0.3 * (F.cross_entropy(read.sizes[:, 0], scene.size1) + (second_size * pair).mean())
    )


@torch.no_grad()
def verdicts_of_scenes(judge: Judge, images: Tensor, numbers: Tensor) -> dict[str, Tensor]:
    """As `verdicts`, for scenes given by their numbers [B]."""
    parts: list[dict[str, Tensor]] = []
    for chunk, chunk_numbers in zip(images.split(512), numbers.split(512), strict=True):
        scene = attributes(chunk_numbers)
        read = judge(chunk.float(), object_class(scene.shape1, scene.color1))
        single = scene.has_second == 0
        verdict = {
            "objects": ((read.objects > 0) == (object_labels(scene) > 0.5)).all(dim=1),
            "relation": single | (read.relation.argmax(1) == scene.relation),
            "background": read.background.argmax(1) == scene.background,
            "size": (read.sizes[:, 0].argmax(1) == scene.size1)
            & (single | (read.sizes[:, 1].argmax(1) == scene.size2)),
        }
        verdict["right"] = verdict["objects"] & verdict["relation"] & verdict["background"]
        parts.append(verdict)
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def verdicts(images: Tensor, captions: Sequence[str], judge: Judge | None = None) -> dict[str, Tensor]:
    """Per picture, whether it shows what its caption says: bool [B] under right, objects, relation, background, size.

    `images` [B, 3, 64, 64] in -1..1; without `judge` the shipped one looks. The relation of a single object is always
    right. ValueError for a caption that is no scene, or pictures of another shape.
    """
    expected = (len(captions), 3, IMAGE_SIZE, IMAGE_SIZE)
    if tuple(images.shape) != expected or not captions:
        raise ValueError(
            f"The judge looks at one picture per caption, [{len(captions)} > 0, 3, 64, 64]; got {list(images.shape)}."
        )
    return verdicts_of_scenes(judge or shipped_judge(images.device), images, scene_numbers(captions, images.device))


def score(images: Tensor, captions: Sequence[str], judge: Judge | None = None) -> dict[str, float]:
    """The shares of pictures for which each of `verdicts` holds: right, objects, relation, background, size."""
    return {key: value.float().mean().item() for key, value in verdicts(images, captions, judge).items()}


def load_judge(device: torch.device | str = "cpu", path: Path | None = None) -> Judge:
    """The judge in `path` (by default the shipped one), in float32, ready to look."""
    judge = Judge()
    judge.load_state_dict(load_file(path or judge_path()))
    return judge.to(device).eval().requires_grad_(False)


def save_judge(judge: Judge, path: Path) -> None:
    """Writes the judge's weights in float16."""
    weights = judge.state_dict().items()
    save_file({key: value.half() if value.is_floating_point() else value for key, value in weights}, path)
    path.chmod(0o644)


@lru_cache(maxsize=2)
def shipped_judge(device: torch.device) -> Judge:
    """The shipped judge, loaded once per device."""
    return load_judge(device)
