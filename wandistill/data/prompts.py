"""Reads prompts and captions: text files, tables, and folders of images. No torch.

Files are UTF-8, with or without a byte order mark. Blank lines and rows whose prompt is empty are dropped; a prompt
that occurs twice stays twice, and counts twice.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from wandistill.errors import ConfigError

PROMPT_SUFFIXES = (".txt", ".csv", ".jsonl", ".parquet")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
METADATA_FILES = ("metadata.csv", "metadata.jsonl")
_FALLBACK_COLUMNS = ("caption", "text")


class CaptionedImage(NamedTuple):
    """One picture and what it shows."""

    path: Path
    caption: str


def read_prompts(path: Path, column: str | None = None) -> list[str]:
    """The prompts of a .txt (one a line), .csv, .jsonl or .parquet file, in its order.

    Args:
        path: the file.
        column: the column that holds the prompts; None: `prompt`, else the one of `caption` and `text` there is.

    Raises:
        ConfigError: the file is missing, empty, binary, not UTF-8, malformed, or has no such column.
    """
    suffix = path.suffix.lower()
    if suffix not in PROMPT_SUFFIXES:
        raise ConfigError(
            f"--data_path {path}: '{suffix}' is not a kind of prompt file; give one of {', '.join(PROMPT_SUFFIXES)}, "
            "or a folder of images with captions."
        )
    _require_content(path)
    texts = _read_text(path) if suffix == ".txt" else [row[0] for row in _read_columns(path, column)]
    prompts = [text for text in (raw.strip() for raw in texts) if text]
    if not prompts:
        raise ConfigError(f"--data_path {path}: holds no prompt, only blank lines or rows; give at least one.")
    return prompts


def read_images(folder: Path, column: str | None = None) -> list[CaptionedImage]:
    """The captioned pictures (png, jpg, jpeg, webp) under `folder`, sub-folders included.

    A metadata.csv or metadata.jsonl in it, with a column `file_name` and one of captions, says which pictures are used
    and in which order; without one, every picture has its caption in a .txt of the same name beside it.

    Raises:
        ConfigError: no picture, a picture or caption missing, two metadata files, or a caption that is empty.
    """
    listed = [folder / name for name in METADATA_FILES if (folder / name).is_file()]
    if len(listed) > 1:
        raise ConfigError(f"--data_path {folder}: holds {' and '.join(METADATA_FILES)}; keep the one that is right.")
    if listed:
        return _read_metadata(folder, listed[0], column)
    images = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
    if not images:
        raise ConfigError(
            f"--data_path {folder}: holds no picture ({', '.join(IMAGE_SUFFIXES)}); give a folder of captioned "
            f"pictures, or a prompt file ({', '.join(PROMPT_SUFFIXES)})."
        )
    bare = [path for path in images if not path.with_suffix(".txt").is_file()]
    if bare:
        raise ConfigError(
            f"--data_path {folder}: {len(bare)} of {len(images)} pictures have no caption, the first is {bare[0]}; "
            f"write {bare[0].with_suffix('.txt').name} beside it, or list the pictures in metadata.csv."
        )
    return [CaptionedImage(path, _read_caption(path.with_suffix(".txt"))) for path in images]


def _require_content(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"--data_path {path}: does not exist (looked for {path.absolute()}); give an existing file.")
    if path.stat().st_size == 0:
        raise ConfigError(f"--data_path {path}: is empty; give a file with at least one prompt.")


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file with their numbers from 1 and their ends; a byte order mark is dropped.

    Lines end at a line feed, so a separator that a prompt may hold (U+2028, form feed) doesn't cut it.
    """
    try:
        with path.open("rb") as file:
            offset = 0
            for number, raw in enumerate(file, 1):
                if number == 1 and raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise ConfigError(f"--data_path {path}: is UTF-16; save it as UTF-8.")
                if (at := raw.find(b"\0")) >= 0:
                    raise ConfigError(
                        f"--data_path {path}: is binary, not text: line {number} holds a NUL byte at offset "
                        f"{offset + at}; give a text file in UTF-8."
                    )
                try:
                    line = raw.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise ConfigError(
                        f"--data_path {path}: line {number} is not UTF-8 (byte 0x{raw[error.start]:02x} at offset "
                        f"{offset + error.start}); save the file as UTF-8."
                    ) from error
                offset += len(raw)
                yield number, line.removeprefix("\ufeff") if number == 1 else line
    except OSError as error:
        raise ConfigError(
            f"--data_path {path}: cannot be read ({error.strerror}); check the path and its permissions."
        ) from error


def _read_text(path: Path) -> list[str]:
    # A lone carriage return ends a line too (classic Mac OS).
    return [part for _, line in _numbered_lines(path) for part in line.replace("\r", "\n").split("\n")]


def _read_caption(path: Path) -> str:
    caption = " ".join(" ".join(_read_text(path)).split())
    if not caption:
        raise ConfigError(f"--data_path {path.parent}: the caption {path.name} is empty; say what the picture shows.")
    return caption


def _read_metadata(folder: Path, table: Path, column: str | None) -> list[CaptionedImage]:
    _require_content(table)
    images = []
    for row, (caption, name) in enumerate(_read_columns(table, column, also=("file_name",)), 1):
        path = folder / name
        if not name.strip() or path.suffix.lower() not in IMAGE_SUFFIXES:
            raise ConfigError(
                f"--data_path {table}: row {row} names the file '{name}', which is no picture "
                f"({', '.join(IMAGE_SUFFIXES)}); correct its file_name."
            )
        if not path.is_file():
            raise ConfigError(f"--data_path {table}: row {row} names {path}, which does not exist; correct or drop it.")
        if not caption.strip():
            raise ConfigError(f"--data_path {table}: row {row} ({name}) has an empty caption; say what it shows.")
        images.append(CaptionedImage(path, caption.strip()))
    if not images:
        raise ConfigError(f"--data_path {table}: lists no picture; give one row a picture.")
    return images


def _choose_column(columns: Sequence[str], wanted: str | None, path: Path) -> str:
    listing = f"its columns are {', '.join(columns)}" if columns else "it has no columns"
    if wanted:
        if wanted in columns:
            return wanted
        raise ConfigError(f"--data_column {wanted}: {path} has no such column; {listing}.")
    if "prompt" in columns:
        return "prompt"
    found = [name for name in _FALLBACK_COLUMNS if name in columns]
    if len(found) == 1:
        return found[0]
    reason = "both caption and text" if found else "none of prompt, caption and text"
    raise ConfigError(f"--data_path {path}: has {reason}; {listing}. Say with --data_column which holds the prompts.")


def _read_columns(path: Path, column: str | None, also: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Rows of (prompt, *also) as texts; a value that is absent (null) reads as an empty text."""
    read = {".csv": _csv_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows}[path.suffix.lower()]
    rows = read(path, column, also)
    for where, values in rows:
        for name, value in values.items():
            if value is not None and not isinstance(value, str):
                raise ConfigError(
                    f"--data_path {path}: {where} holds {_shorten(value)} in column '{name}', which is no text; "
                    "correct the row or choose another --data_column."
                )
        yield tuple(value or "" for value in values.values())


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _pick(columns: Sequence[str], column: str | None, also: Iterable[str], path: Path) -> tuple[str, ...]:
    missing = [name for name in also if name not in columns]
    if missing:
        raise ConfigError(
            f"--data_path {path}: has no column {missing[0]}; its columns are {', '.join(columns)}. Add the column."
        )
    return (_choose_column(columns, column, path), *also)


def _csv_rows(path: Path, column: str | None, also: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.DictReader((line for _, line in _numbered_lines(path)), strict=True)
    names: tuple[str, ...] = ()
    try:
        for row in reader:
            names = names or _pick(list(reader.fieldnames or ()), column, also, path)
            yield f"line {reader.line_num}", {name: row[name] for name in names}
        _pick(list(reader.fieldnames or ()), column, also, path)
    except csv.Error as error:
        raise ConfigError(
            f"--data_path {path}: is not a comma-separated table with a header: line {reader.reader.line_num}: {error}."
        ) from error


def _jsonl_rows(path: Path, column: str | None, also: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    names: tuple[str, ...] = ()
    for number, line in _numbered_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--data_path {path}: line {number} is not JSON: {error}.") from error
        if not isinstance(row, dict):
            raise ConfigError(f"--data_path {path}: line {number} holds {_shorten(row)}, but must hold an object.")
        names = names or _pick(list(row), column, also, path)
        for name in names:
            if name not in row:
                raise ConfigError(
                    f"--data_path {path}: line {number} has no column {name}; its columns are {', '.join(row)}."
                )
        yield f"line {number}", {name: row[name] for name in names}


def _parquet_rows(path: Path, column: str | None, also: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"--data_path {path}: reading .parquet needs pyarrow: install wandistill[train], or convert it to .jsonl."
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = _pick(file.schema_arrow.names, column, also, path)
            row = 0
            for batch in file.iter_batches(columns=list(names)):
                for values in batch.to_pylist():
                    row += 1
                    yield f"row {row}", {name: values[name] for name in names}
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"--data_path {path}: is not a readable parquet file: {error}.") from error
