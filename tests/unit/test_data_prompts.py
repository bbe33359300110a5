"""Prompt files and image folders are read as they are written, and what cannot be read is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wandistill.config import TrainConfig
from wandistill.data.prompts import read_images, read_prompts
from wandistill.data.source import EMBEDDED_PROMPTS, read_source
from wandistill.errors import ConfigError


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("one_a_line.txt", "a cat\na dog\n", ["a cat", "a dog"]),
        ("blank_lines.txt", "\n\na cat\n   \n\na dog", ["a cat", "a dog"]),
        ("byte_order_mark.txt", b"\xef\xbb\xbfa cat\n", ["a cat"]),
        ("windows.txt", "a cat\r\n\r\na dog\r\n", ["a cat", "a dog"]),
        ("old_mac.txt", "a cat\ra dog\r", ["a cat", "a dog"]),
        ("repeats_stay.txt", "a cat\na dog\na cat\n", ["a cat", "a dog", "a cat"]),
        ("line_separator_is_no_end.txt", "a cat\u2028sits\n", ["a cat\u2028sits"]),
        ("UPPER.TXT", "ein Kätzchen\n", ["ein Kätzchen"]),
        ("table.csv", "id,prompt\n1,a cat\n2,\n3,a dog\n", ["a cat", "a dog"]),
        ("quoted.csv", '\ufeffprompt,id\r\n"a cat, ""two""\nlines",1\r\n', ['a cat, "two"\nlines']),
        ("caption_is_found.csv", "id,caption\n1,a cat\n", ["a cat"]),
        ("prompt_before_caption.csv", "caption,prompt\nx,a cat\n", ["a cat"]),
        ("short_row.csv", "id,text\n1,a cat\n2\n", ["a cat"]),
        ("lines.jsonl", '{"text": "a cat"}\n\n{"text": null}\n{"text": "a dog", "n": 1}\n', ["a cat", "a dog"]),
    ],
)
def test_prompts_are_read(tmp_path: Path, name: str, content: bytes | str, expected: list[str]) -> None:
    assert read_prompts(write(tmp_path / name, content)) == expected


@pytest.mark.parametrize(
    ("name", "content", "column", "said"),
    [
        ("empty.txt", "", None, "is empty"),
        ("blank.txt", "\n \n", None, "only blank lines"),
        ("binary.txt", b"a cat\nPK\x03\x04\x00\x00", None, "binary, not text: line 2 holds a NUL byte at offset 10"),
        ("latin1.txt", b"a cat\ncaf\xe9\n", None, "line 2 is not UTF-8 (byte 0xe9 at offset 9)"),
        ("utf16.txt", "a cat\n".encode("utf-16"), None, "is UTF-16"),
        ("prompts.docx", "a cat", None, "'.docx' is not a kind of prompt file"),
        ("unknown.csv", "id,prompt\n1,a cat\n", "title", "--data_column title"),
        ("unknown.csv", "id,prompt\n1,a cat\n", "title", "its columns are id, prompt"),
        ("none.csv", "id,title\n1,a cat\n", None, "its columns are id, title"),
        ("both.csv", "caption,text\na,b\n", None, "both caption and text"),
        ("header_only.csv", "prompt\n", None, "holds no prompt"),
        ("unclosed.csv", 'prompt\n"a cat\n', None, "line 2"),
        ("broken.jsonl", '{"prompt": "a"}\n{"prompt": \n', None, "line 2 is not JSON"),
        ("list.jsonl", '["a cat"]\n', None, "line 1 holds ['a cat'], but must hold an object"),
        ("number.jsonl", '{"prompt": 7}\n', None, "line 1 holds 7 in column 'prompt'"),
        ("lost_column.jsonl", '{"prompt": "a"}\n{"text": "b"}\n', None, "line 2 has no column prompt"),
        ("broken.parquet", "no parquet", None, "is not a readable parquet file"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes | str, column: str | None, said: str
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(ConfigError) as caught:
        read_prompts(path, column)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.txt: does not exist"):
        read_prompts(tmp_path / "nowhere.txt")


def test_a_parquet_column_is_read_alone(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"n": [1, 2, 3], "description": ["a cat", None, "a dog"]})
    parquet.write_table(table, tmp_path / "p.parquet")
    assert read_prompts(tmp_path / "p.parquet", "description") == ["a cat", "a dog"]
    with pytest.raises(ConfigError, match="its columns are n, description"):
        read_prompts(tmp_path / "p.parquet")
    with pytest.raises(ConfigError, match="row 1 holds 1 in column 'n'"):
        read_prompts(tmp_path / "p.parquet", "n")


def test_captions_lie_beside_the_images(tmp_path: Path) -> None:
    write(tmp_path / "b.PNG", b"b")
    write(tmp_path / "b.txt", "a blue\n square\n")
    write(tmp_path / "sub" / "a.jpg", b"a")
    write(tmp_path / "sub" / "a.txt", "a red circle")
    write(tmp_path / "notes.md", "ignored")
    images = read_images(tmp_path)
    assert images == [(tmp_path / "b.PNG", "a blue square"), (tmp_path / "sub" / "a.jpg", "a red circle")]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_metadata_lists_the_images_that_are_used(tmp_path: Path, kind: str) -> None:
    for name in ("a.png", "b.png", "unused.png"):
        write(tmp_path / name, b"x")
    rows = [("b.png", "a dog"), ("a.png", "a cat")]
    if kind == "csv":
        write(tmp_path / "metadata.csv", "file_name,text\n" + "".join(f"{name},{text}\n" for name, text in rows))
    else:
        lines = [json.dumps({"file_name": name, "text": text}) for name, text in rows]
        write(tmp_path / "metadata.jsonl", "\n".join(lines))
    assert read_images(tmp_path) == [(tmp_path / name, text) for name, text in rows]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.txt": "a cat"}, "holds no picture"),
        ({"a.png": "x", "b.png": "x", "b.txt": "a cat"}, "1 of 2 pictures have no caption"),
        ({"a.png": "x", "a.txt": " \n"}, "caption a.txt is empty"),
        ({"metadata.csv": "file_name,text\na.png,cat\n"}, "which does not exist"),
        ({"metadata.csv": "file_name,text\na.txt,cat\n"}, "which is no picture"),
        ({"metadata.csv": "file,text\na.png,cat\n"}, "has no column file_name"),
        ({"a.png": "x", "metadata.csv": "file_name,text\na.png,\n"}, "has an empty caption"),
        ({"metadata.csv": "file_name,text\n"}, "lists no picture"),
        ({"metadata.csv": "x", "metadata.jsonl": "x"}, "keep the one that is right"),
    ],
)
def test_an_image_folder_that_cannot_be_used_is_named(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, content in files.items():
        write(tmp_path / name, content)
    with pytest.raises(ConfigError) as caught:
        read_images(tmp_path)
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_the_embedded_teacher_brings_its_own_prompts() -> None:
    source = read_source(TrainConfig())
    assert len(source.prompts) == EMBEDDED_PROMPTS
    assert source.pictures is None
    assert len(set(source.sample_prompts)) == 8


def test_a_real_teacher_needs_a_data_path() -> None:
    with pytest.raises(ConfigError, match="--data_path is missing"):
        read_source(TrainConfig(teacher_path="elsewhere"))


def test_cached_targets_and_pictures_contradict_each_other(tmp_path: Path) -> None:
    write(tmp_path / "a.png", b"x")
    write(tmp_path / "a.txt", "a cat")
    with pytest.raises(ConfigError, match="--targets cached and --data_path"):
        read_source(TrainConfig(data_path=str(tmp_path), targets="cached"))


def test_settings_without_effect_are_told(tmp_path: Path) -> None:
    write(tmp_path / "a.png", b"x")
    write(tmp_path / "a.txt", "a cat")
    notes = read_source(TrainConfig(data_path=str(tmp_path), rollouts_per_prompt=3)).notes
    assert [note.split(":")[0] for note in notes] == ["--rollouts_per_prompt"]
    text = write(tmp_path / "p.txt", "a cat\n")
    assert read_source(TrainConfig(data_path=str(text), data_column="x")).notes[0].startswith("--data_column")


def test_sample_prompts_come_from_their_own_file(tmp_path: Path) -> None:
    samples = write(tmp_path / "s.txt", "one\ntwo\n")
    assert read_source(TrainConfig(sample_prompts=str(samples))).sample_prompts == ["one", "two"]
