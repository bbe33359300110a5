"""The teacher's parts spread over ranks: by bytes, in order, and from a file with all that can be wrong in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wandistill.architecture import WanArchitecture
from wandistill.device_map import Place, balanced, read_device_map, runs, sequential, unit_bytes
from wandistill.errors import ConfigError, DoesNotFit

WAN_14B = WanArchitecture()


def ranks_of(device_map) -> list[int]:
    return [place.rank for place in device_map]


@pytest.mark.parametrize(("dtype", "experts"), [("float32", 1), ("bfloat16", 2)])
def test_the_units_bytes_add_up_to_the_teacher(dtype, experts):
    sizes = unit_bytes(WAN_14B, dtype, experts)
    narrow = WAN_14B.parameters - WAN_14B.float32_parameters
    width = 4 if dtype == "float32" else 2
    assert len(sizes) == 42
    assert sum(sizes) == experts * (narrow * width + WAN_14B.float32_parameters * 4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_balanced_gives_no_rank_more_than_its_share_and_one_block(ranks):
    sizes = unit_bytes(WAN_14B, "bfloat16", 1)
    device_map = balanced(sizes, [None] * ranks)
    held = [
        sum(size for size, place in zip(sizes, device_map, strict=True) if place.rank == rank) for rank in range(ranks)
    ]
    assert max(held) <= sum(sizes) / ranks + max(sizes)
    assert ranks_of(device_map) == sorted(ranks_of(device_map))


@pytest.mark.parametrize(
    ("sizes", "limits", "expected"),
    [
        ([1, 4, 4, 4, 4, 1], [None, None], [0, 0, 0, 1, 1, 1]),
        ([8, 4, 4, 1], [None, None], [0, 1, 1, 1]),  # a heavy embedding takes a rank for itself
        ([1, 4, 4, 4, 4, 1], [5, None], [0, 0, 1, 1, 1, 1]),  # a limit moves the rest on
        ([1, 1, 1], [None] * 5, [0, 1, 2]),  # more ranks than units
    ],
)
def test_balanced_makes_the_fullest_rank_as_light_as_it_can_be(sizes, limits, expected):
    assert ranks_of(balanced(sizes, limits)) == expected


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ([None, None], [0, 0, 0, 0, 0, 0]),
        ([9, None], [0, 0, 0, 1, 1, 1]),
        ([5, 4, 100], [0, 0, 1, 2, 2, 2]),
        ([0, None], [1, 1, 1, 1, 1, 1]),
    ],
)
def test_sequential_fills_each_rank_up_to_its_limit(limits, expected):
    assert ranks_of(sequential([1, 4, 4, 4, 4, 1], limits)) == expected


@pytest.mark.parametrize("partition", [balanced, sequential])
def test_limits_that_leave_too_little_room_are_named(partition):
    with pytest.raises(DoesNotFit, match=r"18 B do not fit on 2 ranks with room for 8 B, 8 B.*--max_memory"):
        partition([1, 4, 4, 4, 4, 1], [8, 8])


def read(tmp_path: Path, text: str, *, layers: int = 8, ranks: int = 2, suffix: str = ".yaml"):
    path = tmp_path / f"map{suffix}"
    path.write_text(text, encoding="utf-8")
    return read_device_map(path, layers, ranks)


ON_0, ON_1 = Place(0), Place(1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-3: 0\n4-7: 1", [ON_0] * 5 + [ON_1] * 5),
        ("4-7: 0\n0-3: 1", [ON_1] * 5 + [ON_0] * 5),  # the order in the file says nothing
        ("blocks.0-6: 1\nblocks.7: 0", [ON_1] * 8 + [ON_0] * 2),
        ("0-7: 1\npatch_embedding: 0\ncondition_embedder: 0\nproj_out: 0", [ON_0] + [ON_1] * 8 + [ON_0]),
        ("0-3: 0\n4-7: cpu", [ON_0] * 5 + [Place(0, "cpu")] * 5),  # computed where the units before it are
        ("0-3: disk\n4-7: 1", [Place(1, "disk")] * 5 + [ON_1] * 5),  # or the first after it
        ("0-7: cpu", [Place(0, "cpu")] * 10),
    ],
)
def test_a_map_gives_every_unit_its_place(tmp_path, text, expected):
    assert read(tmp_path, text) == tuple(expected)


def test_json_says_the_same_as_yaml(tmp_path):
    value = {"0-3": 0, "4": 1, "5": "cpu", "6-7": "disk"}
    yaml_text = "\n".join(f"{key}: {place}" for key, place in value.items())
    assert read(tmp_path, json.dumps(value, indent="\t"), suffix=".json") == read(tmp_path, yaml_text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-3: 0\n5-6: 1", r"blocks 4, 7 are missing; the teacher has blocks 0 to 7"),
        ("0-6: 0", r"block 7 is missing"),
        ("0-4: 0\n3-7: 1", r"'3-7: 1': blocks 3-4 are named twice, by '0-4' too"),
        ("0-7: 0\nblocks.5: 1", r"block 5 is named twice, by '0-7' too"),
        ("0-7: 0\n0-7: 1", r"blocks 0-7 are named twice"),  # a key that YAML would hide
        ("0-3: 0\n4-7: 2", r"'4-7: 2' names no place: the job has ranks 0 to 1; beside them there are cpu and disk"),
        ("0-7: cuda", r"'0-7: cuda' names no place"),
        ("0-7: -1", r"'0-7: -1' names no place"),
        ("0-8: 0", r"the teacher has blocks 0 to 7, no block 8"),
        ("7-0: 0", r"runs backwards"),
        ("0-7: 0\nhead: 1", r"'head: 1': names no part of the teacher.*proj_out"),
        ("0-7: 0\nproj_out: 1\nproj_out: 1", r"proj_out is named twice"),
        ("0-7: 0\npatch_embedding: 1\ncondition_embedder: 0", r"must be with patch_embedding, which is on 1"),
        ("- 0-7", r"must map blocks to ranks"),
        ("0-7: [0, 1]", r"line 1: must map blocks to ranks"),
        ("0-7: {", r"is neither JSON nor YAML"),
    ],
)
def test_what_is_wrong_with_a_map_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, text)
    assert "--teacher_device_map" in str(caught.value)


@pytest.mark.parametrize("text", ['{"0-7": 0, "0-7": 1}', '[["0-7", 0]]', '{"0-7": '])
def test_a_broken_json_map_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=r"twice|must map|neither"):
        read(tmp_path, text, suffix=".json")


def test_a_map_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.yaml: cannot be read"):
        read_device_map(tmp_path / "nowhere.yaml", 8, 2)


def test_runs_are_consecutive_units_in_one_place():
    found = runs((ON_0, ON_0, Place(0, "cpu"), ON_1, ON_0))
    assert [(run.units.start, run.units.stop, run.place) for run in found] == [
        (0, 2, ON_0),
        (2, 3, Place(0, "cpu")),
        (3, 4, ON_1),
        (4, 5, ON_0),
    ]
