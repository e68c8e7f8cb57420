"""Safetensors files, with names, shards and index as Hugging Face has them; read and written here.

The format (https://github.com/huggingface/safetensors#format): 8 bytes, the length of the header,
little-endian; the header, JSON: for each name ``dtype``, ``shape`` and ``data_offsets``, begin and
end in what follows; then the elements of all, in C order, little-endian, without gaps. Several
files are listed in ``model.safetensors.index.json``: ``weight_map`` has each name's file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshlib.checkpoint.checkpointer import save
from meshlib.checkpoint.errors import CheckpointError, CorruptCheckpointError
from meshlib.checkpoint.files.folder import find
from meshlib.checkpoint.files.locations import Location
from meshlib.checkpoint.files.zarr import ChunkGrid, dtype_of, little_endian
from meshlib.checkpoint.leaves import Host
from meshlib.checkpoint.loading import ChunkReader

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LENGTH_BYTES = 8
_ALIGNMENT = 8
_LONGEST_HEADER = 100_000_000  # as the reference implementation has it
_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def export_safetensors(
    path: Location,
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    prefix: str = "",
    rename: Callable[[str], str | None] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> list[str]:
    """Write the arrays of a checkpoint as safetensors files; one process calls, array by array.

    Args:
        path: A checkpoint, or a folder of them.
        folder: Where the files go, made if need be: ``model.safetensors``, or several of them
            (``model-00001-of-00002.safetensors``) with an index.
        step: Which one of a folder; by default the newest.
        prefix: Only arrays below it, ``"model/"``; names are without it, and what else is ``/``
            in them becomes ``.``.
        rename: A function that returns what an array of this name is called in the files, or None
            to leave it out.
        max_shard_bytes: A file is begun when the arrays of the one before would be more.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: Where there is no checkpoint, no such array, a name twice, or a dtype that
            safetensors does not have.
        CorruptCheckpointError: For files of the checkpoint that are torn or changed.
    """
    found = find(path, step)
    arrays: dict[str, _Array] = {}
    for name, grid in found.grids.items():
        if not name.startswith(prefix):
            continue
        short = name.removeprefix(prefix).replace("/", ".")
        called = short if rename is None else rename(short)
        if called is None:
            continue
        if called in arrays:
            raise CheckpointError(f"rename makes two arrays {called!r}; the second is {name!r}")
        arrays[called] = name, grid
    if not arrays:
        raise CheckpointError(
            f"{found.path} has no arrays below {prefix!r}; it has {[*found.arrays]}"
        )
    return _write_files(folder, ChunkReader(found), arrays, max_shard_bytes)


_Array = tuple[str, ChunkGrid]
"""What is to be written: the array's name in the checkpoint, and its grid there."""


def _write_files(
    folder: str | os.PathLike[str],
    reader: ChunkReader,
    arrays: Mapping[str, _Array],
    max_shard_bytes: int,
) -> list[str]:
    """Write ``arrays`` into as many files as that takes, and an index if there are several."""
    shards: list[dict[str, _Array]] = [{}]
    size = 0
    for name, (_, grid) in arrays.items():
        if grid.dtype.name not in _NAMES:
            raise CheckpointError(f"array {name!r} has dtype {grid.dtype}, not in safetensors")
        if shards[-1] and size + grid.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = arrays[name]
        size += grid.nbytes
    top = Path(folder)
    top.mkdir(parents=True, exist_ok=True)
    count = len(shards)
    files = [
        SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        for number in range(1, count + 1)
    ]
    for file, shard in zip(files, shards, strict=True):
        _write_file(top / file, reader, shard)
    if count > 1:
        weight_map = {
            name: file for file, shard in zip(files, shards, strict=True) for name in shard
        }
        total = sum(grid.nbytes for _, grid in arrays.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (top / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return files


def _write_file(path: Path, reader: ChunkReader, arrays: Mapping[str, _Array]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    # The largest elements first, as the reference implementation orders them: all are aligned.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1][1].dtype.itemsize, item[0]))
    for called, (_, grid) in ordered:
        end = begin + grid.nbytes
        kind = _NAMES[grid.dtype.name]
        header[called] = {"dtype": kind, "shape": list(grid.shape), "data_offsets": [begin, end]}
        begin = end
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % _ALIGNMENT)
    unfinished = path.with_name(f"{path.name}.part")
    with unfinished.open("wb") as file:
        file.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
        for _, (name, grid) in ordered:
            array = np.ascontiguousarray(little_endian(reader.read(name, grid.whole)))
            file.write(array.reshape(-1).view(np.uint8).data)
    unfinished.replace(path)


class SafetensorsFiles(Mapping[str, Host]):
    """The arrays in a safetensors file, or in a folder of them, by name: mapped, not read.

    Args:
        path: A file, or a folder with an index or with ``*.safetensors`` files.

    Raises:
        CorruptCheckpointError: For a file that is torn, or no safetensors; it names it.
        CheckpointError: Where there is none, or an index names what is not there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._arrays: dict[str, Host] = {}
        top = Path(path)
        weight_map: dict[str, str] = {}
        if top.is_file():
            files: Iterable[Path] = [top]
        elif (top / INDEX).is_file():
            weight_map = json.loads((top / INDEX).read_text())["weight_map"]
            files = [top / name for name in dict.fromkeys(weight_map.values())]
        else:
            files = sorted(top.glob("*.safetensors"))
        for file in files:
            self._arrays.update(_map_file(file))
        if not self._arrays:
            raise CheckpointError(f"{path} is no safetensors file and has none")
        missing = [name for name in weight_map if name not in self._arrays]
        if missing:
            raise CheckpointError(
                f"{top / INDEX} names {missing[0]!r}, which is in none of its files"
            )

    def __getitem__(self, name: str) -> Host:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _map_file(path: Path) -> dict[str, Host]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= min(size - _LENGTH_BYTES, _LONGEST_HEADER):
                raise ValueError(f"its header would have {length} bytes of {size}")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        begin = _LENGTH_BYTES + length
        return {name: _map_array(path, begin, size, name, one) for name, one in header.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path} is torn, or no safetensors file: {error}") from None


def _map_array(path: Path, begin: int, size: int, name: str, one: Mapping[str, Any]) -> Host:
    if one["dtype"] not in _DTYPES:
        raise ValueError(f"{name!r} has dtype {one['dtype']!r}, which is not known")
    dtype = dtype_of(_DTYPES[one["dtype"]]).newbyteorder("<")
    shape: Sequence[int] = tuple(one["shape"])
    start, stop = one["data_offsets"]
    if stop - start != math.prod(shape) * dtype.itemsize or not 0 <= start <= stop <= size - begin:
        raise ValueError(f"{name!r} of shape {shape} has the bytes {start} to {stop}")
    if start == stop:
        return np.empty(shape, dtype)
    # Of bytes, because an array may begin anywhere.
    flat = np.memmap(path, np.uint8, "r", begin + start, (stop - start,))
    return flat.view(dtype).reshape(shape)


def import_safetensors(
    files: str | os.PathLike[str],
    path: Location,
    *,
    step: int = 0,
    rename: Callable[[str], str | None] | None = None,
) -> str:
    """Write the arrays of safetensors files as a checkpoint, which loads on any mesh.

    All ranks of the job call, and share the work; or one process without a job.

    Args:
        files: A file, or a folder with an index or several files.
        path: The folder in which the checkpoint is made.
        step: Its step.
        rename: A function that returns what an array of this name is called in the checkpoint, or
            None to leave it out.

    Returns:
        The path of the checkpoint; its tree is ``{"model": {name: array}}``.

    Raises:
        CheckpointError: Where there is no such file, or one is torn, or a name comes twice.
        OSError: If a rank cannot write.
    """
    arrays: dict[str, Host] = {}
    for name, array in SafetensorsFiles(files).items():
        called = name if rename is None else rename(name)
        if called in arrays:
            raise CheckpointError(f"rename makes two arrays {called!r}; the second is {name!r}")
        if called is not None:
            arrays[called] = array
    return save(path, {"model": arrays}, step=step)
