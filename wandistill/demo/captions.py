"""The captions of the embedded teacher's scenes: their grammar, their numbering, and who may see which of them.

A caption names one object on a background, or two objects and where the first lies with respect to the second:

    a small red circle on a gray background
    a large red circle left of a small blue square on a gray background

There are 126 captions with one object and 18,144 with two (whose colours always differ). A scene's number is its place
in `all_scenes()`; the held-out sets are fixed functions of that number. No torch here.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

SIZES = ("small", "large")
COLORS = ("red", "green", "blue", "yellow", "purple", "orange", "cyan")
SHAPES = ("circle", "square", "triangle")
RELATIONS = ("left of", "right of", "above", "below")
BACKGROUNDS = ("white", "gray", "black")

SINGLE_COUNT = 2 * 7 * 3 * 3
SCENE_COUNT = SINGLE_COUNT + 2 * 7 * 3 * 4 * 2 * 6 * 3 * 3
"""Scenes 0 to SINGLE_COUNT - 1 have one object, the rest have two."""

PAIR_SHARE = 0.6
"""Share of two-object captions in every mix: the teacher's training, the student's prompts and the test."""


@dataclass(frozen=True)
class SceneObject:
    """One object as words of the grammar."""

    size: str
    color: str
    shape: str

    def __str__(self) -> str:
        return f"a {self.size} {self.color} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """What one caption says; `relation` and `second` are both given or both None."""

    first: SceneObject
    background: str
    relation: str | None = None
    second: SceneObject | None = None

    @property
    def caption(self) -> str:
        objects = f"{self.first} {self.relation} {self.second}" if self.second else str(self.first)
        return f"{objects} on a {self.background} background"


@lru_cache(maxsize=1)
def all_scenes() -> tuple[Scene, ...]:
    """Every scene once, in the order that gives each its number (single objects first)."""
    singles = [
        Scene(SceneObject(size, color, shape), background)
        for size, color, shape, background in product(SIZES, COLORS, SHAPES, BACKGROUNDS)
    ]
    pairs = [
        # The second colour is counted from the first one on, and never equals it: a caption that named two objects of
        # one colour and shape could not be told apart from its mirror image.
        Scene(
            SceneObject(size, COLORS[color], shape),
            background,
            relation,
            SceneObject(second_size, COLORS[(color + step) % len(COLORS)], second_shape),
        )
        for size, color, shape, relation, second_size, step, second_shape, background in product(
            SIZES, range(len(COLORS)), SHAPES, RELATIONS, SIZES, range(1, len(COLORS)), SHAPES, BACKGROUNDS
        )
    ]
    scenes = tuple(singles + pairs)
    assert len(singles) == SINGLE_COUNT and len(scenes) == SCENE_COUNT
    return scenes


@lru_cache(maxsize=1)
def _numbers_by_caption() -> dict[str, int]:
    return {scene.caption: number for number, scene in enumerate(all_scenes())}


def scene_number(caption: str) -> int:
    """The number of the scene that `caption` describes; case and spacing don't matter. ValueError if it is no scene."""
    number = _numbers_by_caption().get(" ".join(caption.lower().split()))
    if number is None:
        raise ValueError(
            f"{caption!r} is no caption of the embedded teacher's scenes. It must read like "
            f"{all_scenes()[0].caption!r} or {all_scenes()[SINGLE_COUNT].caption!r}, with sizes {', '.join(SIZES)}; "
            f"colours {', '.join(COLORS)} (two objects never share one); shapes {', '.join(SHAPES)}; "
            f"relations {', '.join(RELATIONS)}; backgrounds {', '.join(BACKGROUNDS)}."
        )
    return number


def parse_caption(caption: str) -> Scene:
    """The scene that `caption` describes, or ValueError that names the caption."""
    return all_scenes()[scene_number(caption)]


def _hash(number: int) -> int:
    """16 well-mixed bits of a scene's number (Knuth's multiplicative hash), the same on every machine."""
    return ((number * 2654435761) % 2**32) >> 16


def teacher_holds_out(number: int) -> bool:
    """Whether the embedded teacher never trains on this scene: one in sixteen two-object scenes, no single one."""
    return number >= SINGLE_COUNT and _hash(number) % 16 == 0


def student_holds_out(number: int) -> bool:
    """Whether the scene is kept from the student's training prompts.

    Of the two-object scenes these are the ones that the teacher never saw either. The 126 single objects are all known
    to the teacher, so a quarter of them is held out for the student alone.
    """
    return teacher_holds_out(number) or (number < SINGLE_COUNT and _hash(number) % 4 == 0)


@lru_cache(maxsize=2)
def _pools(held_out: bool) -> tuple[list[str], list[str]]:
    """The (single-object, two-object) captions on one side of the student's split."""
    captions = [(n, scene.caption) for n, scene in enumerate(all_scenes()) if student_holds_out(n) == held_out]
    return [c for n, c in captions if n < SINGLE_COUNT], [c for n, c in captions if n >= SINGLE_COUNT]


def _draw_without_repeat(pool: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """`count` captions, none a second time before all others had their turn."""
    drawn: list[str] = []
    while len(drawn) < count:
        drawn += rng.sample(pool, min(len(pool), count - len(drawn)))
    return drawn


def _mixed_prompts(count: int, seed: int, held_out: bool) -> list[str]:
    if count < 0:
        raise ValueError(f"The number of prompts must not be negative, got {count}.")
    rng = random.Random(f"{seed} {held_out}")
    singles, pairs = _pools(held_out)
    pair_count = round(count * PAIR_SHARE)
    prompts = _draw_without_repeat(pairs, pair_count, rng) + _draw_without_repeat(singles, count - pair_count, rng)
    rng.shuffle(prompts)
    return prompts


def training_prompts(count: int, seed: int = 0) -> list[str]:
    """`count` prompts to train a student on: 60 % two objects, 40 % one, never one of the held-out captions.

    Captions repeat only where a kind has fewer of them than asked for (there are 95 single objects to train on).
    """
    return _mixed_prompts(count, seed, held_out=False)


def heldout_prompts(count: int, seed: int = 0) -> list[str]:
    """`count` prompts to test with, in the same mix, none of which `training_prompts` ever returns."""
    return _mixed_prompts(count, seed, held_out=True)
