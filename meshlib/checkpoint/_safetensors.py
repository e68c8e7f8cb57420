"""Export to and import from safetensors files, with Hugging Face's names, shards and index.

A file (https://github.com/huggingface/safetensors#format) has three parts. The first 8 bytes are
the length of the header, little-endian. The header is JSON: for each array its ``dtype``, ``shape``
and ``data_offsets``, the begin and end in the data. The data are the elements of all arrays, in C
order, little-endian, without gaps. If there are several files, ``weight_map`` in
``model.safetensors.index.json`` names the file of each array, and only these files are read. Shards
without an index are left over from a killed export, and are an error.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshlib.checkpoint._checkpointer import save
from meshlib.checkpoint._errors import CheckpointError, CorruptCheckpointError
from meshlib.checkpoint._files.folder import find
from meshlib.checkpoint._files.locations import Location
from meshlib.checkpoint._files.zarr import ChunkGrid, dtype_of, little_endian
from meshlib.checkpoint._leaves import Host
from meshlib.checkpoint._loading import ChunkReader

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LENGTH_BYTES = 8
_ALIGNMENT = 8
_LONGEST_HEADER = 100_000_000  # the reference implementation's limit
_SHARD = re.compile(r"model-[0-9]{5,}-of-[0-9]{5,}\.safetensors")
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
    """Write the arrays of a checkpoint as safetensors files. Call it on one process only.

    Holds one array in memory at a time.

    Args:
        path: A checkpoint, or a folder of them.
        folder: The target folder, created if necessary. It gets ``model.safetensors``, or several
            files (``model-00001-of-00002.safetensors``) with an index. Files of an earlier export
            are replaced or removed; other files remain.
        step: The step of the checkpoint in a folder; by default the newest.
        prefix: Export only arrays whose names begin with it, such as ``"model/"``. It is cut from
            the names, and each other ``/`` becomes ``.``.
        rename: A function from an array's name to its name in the files, or None to omit the array.
        max_shard_bytes: The largest size of the arrays in one file.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: If there is no checkpoint, no array below ``prefix``, a repeated name, or a
            dtype that safetensors lacks.
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
"""An array to write: its name in the checkpoint, and its grid there."""


def _write_files(
    folder: str | os.PathLike[str],
    reader: ChunkReader,
    arrays: Mapping[str, _Array],
    max_shard_bytes: int,
) -> list[str]:
    """Write ``arrays`` into one or more files, and an index for several; return their names."""
    shards: list[dict[str, _Array]] = [{}]
    size = 0
    for name, (_, grid) in arrays.items():
        if grid.dtype.name not in _NAMES:
            raise CheckpointError(
                f"array {name!r} has dtype {grid.dtype}, which safetensors does not have"
            )
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
        _write_file(_unfinished(top / file), reader, shard)
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    total = sum(grid.nbytes for _, grid in arrays.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _unfinished(top / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    _replace(top, files)
    return files


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _replace(top: Path, files: Sequence[str]) -> None:
    """Replace the files of an earlier export by the written ones.

    At any moment, readers see files of one export only: the old one, the new one, or none.
    """
    if len(files) > 1:
        # Shards without an index are not read.
        (top / SINGLE).unlink(missing_ok=True)
        (top / INDEX).unlink(missing_ok=True)
    for file in files:
        _unfinished(top / file).replace(top / file)
    if len(files) > 1:
        _unfinished(top / INDEX).replace(top / INDEX)
    else:
        (top / INDEX).unlink(missing_ok=True)  # now the single file is read
        _unfinished(top / INDEX).unlink()
    for path in top.iterdir():
        if _SHARD.fullmatch(path.name) and path.name not in files:
            path.unlink()


def _write_file(path: Path, reader: ChunkReader, arrays: Mapping[str, _Array]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    # Largest elements first, as in the reference implementation, so that all are aligned.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1][1].dtype.itemsize, item[0]))
    for called, (_, grid) in ordered:
        end = begin + grid.nbytes
        kind = _NAMES[grid.dtype.name]
        header[called] = {"dtype": kind, "shape": list(grid.shape), "data_offsets": [begin, end]}
        begin = end
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
        for _, (name, grid) in ordered:
            array = np.ascontiguousarray(little_endian(reader.read(name, grid.whole)))
            file.write(array.reshape(-1).view(np.uint8).data)


class SafetensorsFiles(Mapping[str, Host]):
    """The arrays in a safetensors file, or in a folder of them, by name; mapped into memory.

    Args:
        path: A file, or a folder with an index, with ``model.safetensors``, or with
            ``*.safetensors`` files of other names.

    Raises:
        CorruptCheckpointError: For a file that is torn or not safetensors; the message names it.
        CheckpointError: If there is no file, an index names a missing file, or shards have no
            index.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._arrays: dict[str, Host] = {}
        top = Path(path)
        if (top / INDEX).is_file():
            self._arrays = _map_indexed(top, _weight_map(top / INDEX))
        else:
            for file in _files_without_index(top):
                self._arrays.update(_map_file(file))
        if not self._arrays:
            raise CheckpointError(f"{path} is not a safetensors file and contains none")

    def __getitem__(self, name: str) -> Host:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _files_without_index(top: Path) -> list[Path]:
    if top.is_file():
        return [top]
    if (top / SINGLE).is_file():
        return [top / SINGLE]
    files = sorted(top.glob("*.safetensors"))
    shards = [file.name for file in files if _SHARD.fullmatch(file.name)]
    if shards:
        raise CheckpointError(f"{top} has {shards[0]}, but no {INDEX}: its export was not finished")
    return files


def _weight_map(path: Path) -> dict[str, str]:
    """Return the file name of each array from an index; raise CheckpointError for other folders."""
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        wrong = [
            (name, file)
            for name, file in weight_map.items()
            if not isinstance(file, str) or Path(file).name != file or "\0" in file
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is torn or not an index: {error}") from None
    if wrong:
        name, file = wrong[0]
        raise CheckpointError(
            f"{path} says that {name!r} is in {file!r}; expected a file name in the same folder"
        )
    return weight_map


def _map_indexed(top: Path, weight_map: Mapping[str, str]) -> dict[str, Host]:
    files = {file: _map_file(top / file) for file in dict.fromkeys(weight_map.values())}
    missing = [name for name, file in weight_map.items() if name not in files[file]]
    if missing:
        name = missing[0]
        raise CheckpointError(
            f"{top / INDEX} says that {name!r} is in {weight_map[name]!r}, which lacks it"
        )
    return {name: files[file][name] for name, file in weight_map.items()}


def _map_file(path: Path) -> dict[str, Host]:
    if not path.is_file():  # a pipe would block the call
        raise CheckpointError(f"{path} is missing or not a file")
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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is torn or not a safetensors file: {error}") from None


def _map_array(path: Path, begin: int, size: int, name: str, one: Mapping[str, Any]) -> Host:
    if one["dtype"] not in _DTYPES:
        raise ValueError(f"{name!r} has the unknown dtype {one['dtype']!r}")
    dtype = dtype_of(_DTYPES[one["dtype"]]).newbyteorder("<")
    shape: Sequence[int] = tuple(one["shape"])
    start, stop = one["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"{name!r} has the shape {shape} and the bytes {start} to {stop}")
    if stop - start != math.prod(shape) * dtype.itemsize or not 0 <= start <= stop <= size - begin:
        raise ValueError(f"{name!r} of shape {shape} has the bytes {start} to {stop}")
    if start == stop:
        return np.empty(shape, dtype)
    # Map bytes, because an array may begin at any offset.
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

    All ranks of the job must call it and share the work. Without a job, one process calls it.

    Args:
        files: A file, or a folder with an index or several files.
        path: The folder that gets the checkpoint.
        step: The checkpoint's step.
        rename: A function from an array's name to its name in the checkpoint, or None to omit the
            array.

    Returns:
        The path of the checkpoint; its tree is ``{"model": {name: array}}``.

    Raises:
        CheckpointError: If a file is missing or torn, or a name is repeated.
        OSError: On every rank, if one cannot write.
    """
    arrays: dict[str, Host] = {}
    for name, array in SafetensorsFiles(files).items():
        called = name if rename is None else rename(name)
        if called in arrays:
            raise CheckpointError(f"rename makes two arrays {called!r}; the second is {name!r}")
        if called is not None:
            arrays[called] = array
    return save(path, {"model": arrays}, step=step)
