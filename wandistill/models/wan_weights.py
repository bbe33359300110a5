"""Safetensors files as numbers: their headers, checked against the file's size, and content keys of them.

No weight is loaded. A safetensors file is 8 bytes with the header's length n, n bytes of JSON that give each tensor's
dtype, shape and byte range, and the ranges, one after the other (https://github.com/huggingface/safetensors). So a
file that is cut short, or that was not finished, shows without reading the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wandistill.errors import ConfigError

_DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2"), 8),
}
# The reference implementation refuses longer headers too.
_LONGEST_HEADER = 100_000_000
# Tensors up to _WHOLE bytes are hashed whole, longer ones at _WINDOWS evenly spaced windows of _WINDOW bytes.
_WHOLE = 16384
_WINDOW = 4096
_WINDOWS = 4


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a safetensors file."""

    file: Path
    dtype: str  # as safetensors names it: F32, BF16, ...
    shape: tuple[int, ...]
    begin: int  # first byte in the file
    end: int  # byte after the last

    @property
    def parameters(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file by name.

    Raises:
        ConfigError: the file is missing, truncated or not a safetensors file; the message names it.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            start = handle.read(8)
            length = int.from_bytes(start, "little")
            if start.startswith(b"version "):
                raise ConfigError(
                    f"{file} is a Git LFS pointer, not the weights: fetch them with `git lfs pull` in its repository."
                )
            if len(start) < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise _corrupt(file, f"its header should have {length} bytes, but the whole file has {size}")
            header = json.loads(handle.read(length))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}): restore the file.") from error
    except ValueError as error:
        raise _corrupt(file, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _corrupt(file, "its header is not a JSON object")
    header.pop("__metadata__", None)
    data = 8 + length
    tensors = {name: _entry(file, name, fields, data) for name, fields in header.items()}
    _check_ranges(file, tensors.values(), data, size)
    return tensors


def _entry(file: Path, name: str, fields: Any, data: int) -> StoredTensor:
    """The checked header entry of one tensor; `data` is where the file's data begin."""
    try:
        dtype, shape = fields["dtype"], tuple(int(size) for size in fields["shape"])
        begin, end = (int(offset) for offset in fields["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise _corrupt(file, f"the header's entry for tensor {name} is damaged") from error
    if dtype in _DTYPE_BITS and math.prod(shape) * _DTYPE_BITS[dtype] != 8 * (end - begin):
        raise _corrupt(file, f"tensor {name} of shape {list(shape)} in {dtype} has {end - begin} bytes")
    return StoredTensor(file, dtype, shape, data + begin, data + end)


def _check_ranges(file: Path, tensors: Iterable[StoredTensor], data: int, size: int) -> None:
    """Holds that the tensors' ranges follow each other without a gap and end where the file ends."""
    position = data
    for tensor in sorted(tensors, key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != position:
            raise _corrupt(file, f"its tensors leave a gap or overlap at byte {position}")
        position = tensor.end
    if position != size:
        raise _corrupt(file, f"its header asks for {position} bytes, but the file has {size}")


def _corrupt(file: Path, fault: str) -> ConfigError:
    return ConfigError(
        f"{file} is not a complete safetensors file: {fault}. It was cut short or damaged; download or copy it again."
    )


def component_tensors(folder: Path, stem: str) -> dict[str, StoredTensor]:
    """All tensors of a component's folder, from `STEM.safetensors` or the shards of `STEM.safetensors.index.json`.

    Raises:
        ConfigError: the weights, a shard or a tensor that the index lists is missing, or a file is damaged.
    """
    index = folder / f"{stem}.safetensors.index.json"
    single = folder / f"{stem}.safetensors"
    # diffusers takes the index where both exist, transformers the single file: both must then be sound.
    if index.is_file():
        tensors = _sharded_tensors(index)
        if single.is_file():
            read_header(single)
        return tensors
    if single.is_file():
        return read_header(single)
    others = sorted(path.name for path in folder.iterdir() if path.suffix in {".safetensors", ".bin", ".pth", ".pt"})
    found = f"; it has {', '.join(others)}" if others else ""
    raise ConfigError(
        f"{folder} holds no weights: {single.name} or {index.name} is missing{found}. "
        "Download the component's safetensors files again, under these names."
    )


def _sharded_tensors(index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} has no weight_map that says which shard holds which tensor: download it again.")
    wrong = [name for name, shard in weight_map.items() if not isinstance(shard, str)]
    if wrong:
        raise ConfigError(f"{index} names no file for the tensor {wrong[0]}: download it again.")
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise ConfigError(
            f"{index.parent} lacks {', '.join(missing)}: {index.name} lists {len(shards)} shards, and all of them "
            "are needed. Download the missing ones."
        )
    stored = {shard: read_header(index.parent / shard) for shard in shards}
    for name, shard in weight_map.items():
        if name not in stored[shard]:
            raise ConfigError(
                f"{index.parent / shard} lacks the tensor {name} that {index.name} places there: the index and the "
                "shards are of different downloads. Download the component again."
            )
    return {name: stored[shard][name] for name, shard in weight_map.items()}


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ConfigError: the file is missing or holds something else; the message names it.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{file} is missing: the teacher's folder is not complete. Restore the file.") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a readable JSON file ({error}): restore the file.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object, not a {type(value).__name__}: restore the file.")
    return value


def sampled_content(tensors: dict[str, StoredTensor]) -> Iterator[bytes]:
    """What a content key hashes of weights: each tensor's name, dtype, shape and sampled bytes, by name.

    Independent of paths, shards and the order in the files. Tensors of up to 16 KiB are read whole, longer ones at 4
    evenly spaced windows of 4 KiB (the first and the last bytes among them), so that a 14 B transformer takes about
    4,000 small reads. Training moves all weights, so a fine-tuned model differs; a change outside all windows of
    otherwise equal weights is not seen.
    """
    with ExitStack() as stack:
        files = sorted({tensor.file for tensor in tensors.values()})
        handles = {file: stack.enter_context(file.open("rb")) for file in files}
        for name, tensor in sorted(tensors.items()):
            yield f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode()
            for begin, length in _windows(tensor.end - tensor.begin):
                handles[tensor.file].seek(tensor.begin + begin)
                yield handles[tensor.file].read(length)


def _windows(size: int) -> list[tuple[int, int]]:
    if size <= _WHOLE:
        return [(0, size)]
    return [(number * (size - _WINDOW) // (_WINDOWS - 1), _WINDOW) for number in range(_WINDOWS)]
