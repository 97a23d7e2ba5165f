"""The header of a GGUF file: metadata, and the location of the tensors.

Imports only the standard library, since a plan has to be fast. Source of the format:
github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from offload.layout import ceil_div
from parallel.errors import CheckpointError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # version 1 has 32-bit counts, and is not in use
_SCALARS = {  # struct formats by metadata type
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
# Limits that no model exceeds, against headers that would take minutes or all memory to read: bytes
# of a header, elements of a list. The largest vocabularies have 262,144 tokens and fewer than twice
# as many merges.
MAX_HEADER = 128 << 20
_MAX_ELEMENTS = 1 << 22
_ALIGNMENT = 32  # default alignment of tensors in bytes
_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
LFS = b"version https://git-lfs"
_PARTS, _PART = "split.count", "split.no"  # metadata of a split model: files, and which this is
_FETCH_AGAIN = "Was the download interrupted? Fetch it again."


@dataclass(frozen=True)
class TensorInfo:
    """The location of a tensor in a file, and its type."""

    name: str
    shape: tuple[int, ...]  # rows first; in the file, the fastest dimension is first
    kind: int  # ggml's type number
    start: int  # offset in the file in bytes
    path: Path  # its file


@dataclass(frozen=True)
class GgufHeader:
    """The part of a file that precedes the tensors; of a split model, that of its first part."""

    path: Path
    sizes: dict[Path, int]  # bytes of the whole file, and of a split model's other parts
    data_start: int  # offset of the first tensor in bytes
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]  # keyed by GGUF name, of all parts

    @property
    def mtp_layers(self) -> int:
        """The number of layers for multi-token prediction, the last of those it counts."""
        count = self._field("nextn_predict_layers")
        return count if type(count) is int else 0

    @property
    def model_tensors(self) -> dict[str, TensorInfo]:
        """The tensors without those of layers for multi-token prediction."""
        end = self._model_layers
        return {name: each for name, each in self.tensors.items() if _layer_of(name) < end}

    @property
    def prediction_tensors(self) -> dict[str, TensorInfo]:
        """The tensors of layers for multi-token prediction."""
        end = self._model_layers
        return {name: each for name, each in self.tensors.items() if _layer_of(name) >= end}

    @property
    def _model_layers(self) -> float:
        """The number of layers before those for multi-token prediction, infinite without any."""
        layers, mtp_layers = self._field("block_count"), self.mtp_layers
        return layers - mtp_layers if type(layers) is int and 0 < mtp_layers < layers else inf

    def _field(self, name: str) -> Any:
        """Return a field of the file's architecture; None without it."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{name}")


def _layer_of(name: str) -> int:
    """Return the layer that a tensor belongs to; -1 for one that belongs to none."""
    head, _, rest = name.partition(".")
    index, _, part = rest.partition(".")
    is_layer = head == "blk" and index.isdecimal() and len(index) < 8 and part
    return int(index) if is_layer else -1


def read_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file, everything but the tensor data.

    `path` may be the first part of a split model, whose tensors are those of all parts. Raises
    CheckpointError if a file is not GGUF or incomplete, and for another part.
    """
    header = read_part(path)
    parts = part_files(path)
    count = _count(header.metadata.get(_PARTS))
    if count < 2 and len(parts) == 1:
        return header
    if count != len(parts):
        raise CheckpointError(
            f"{path} is part of a split model of {count} files, but its name is that of one of "
            f"{len(parts)}: give it the name that it was published with, such as "
            f"model-00001-of-{count:05}.gguf."
        )
    tensors, sizes = dict(header.tensors), dict(header.sizes)
    for index, part in enumerate(parts[1:], 1):
        other = read_part(part)
        if _count(other.metadata.get(_PARTS)) != count or other.metadata.get(_PART) != index:
            raise CheckpointError(f"{part} does not belong to {path}. Fetch both again.")
        for name, info in other.tensors.items():
            if name in tensors:
                raise _broken_error(part, f"holds tensor {name}, as another part does")
            tensors[name] = info
        sizes |= other.sizes
    return replace(header, tensors=tensors, sizes=sizes)


def part_files(path: Path) -> list[Path]:
    """Return the files of a model: the file itself, or if it is a split one's first part, all.

    Raises CheckpointError if some are missing, or if it is another part.
    """
    parts = part_paths(path)
    missing = [part for part in parts if not part.is_file()]
    if missing and len(parts) > 1:
        raise CheckpointError(
            f"{path}: {len(missing)} of the model's {len(parts)} parts are missing, first "
            f"{missing[0].name}. Fetch them into the same folder."
        )
    if path != parts[0]:
        raise CheckpointError(f"{path} is a part of a split model: name its first, {parts[0]}.")
    return parts


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts of a split model, by the name of one; else the path itself."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    stem, _, count, suffix = match.groups()
    names = [f"{stem}-{index + 1:05}-of-{count}{suffix}" for index in range(int(count))]
    return [path.with_name(name) for name in names] or [path]


def read_part(path: Path) -> GgufHeader:
    """Read the header of one file, as `read_header`; of a split model, of this part alone."""
    try:
        with path.open("rb") as file:
            start = file.read(len(LFS))
            _check_magic(path, start)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
                return _Parser(path, blob).header()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except (struct.error, EOFError) as error:
        raise CheckpointError(f"{path} ends within its metadata. {_FETCH_AGAIN}") from error
    except UnicodeDecodeError as error:
        raise _broken_error(path, "holds a name or a string that is not UTF-8") from error


def check_lfs_pointer(path: Path, start: bytes) -> None:
    """Raise CheckpointError if the first bytes are those of a Git LFS pointer."""
    if start == LFS:
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder."
        )


def _check_magic(path: Path, start: bytes) -> None:
    """Raise CheckpointError unless the first bytes are those of a supported GGUF version."""
    check_lfs_pointer(path, start)
    if start[:4] != MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it begins with {start[:4]!r}.")
    if len(start) < 8:
        raise EOFError
    (version,) = struct.unpack_from("<I", start, 4)
    if version & 0xFFFF == 0 and version:
        raise CheckpointError(
            f"{path} is a big-endian GGUF file, which is not supported: convert the model again "
            "for little-endian machines."
        )
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{path} has GGUF version {version}; versions {_VERSIONS[0]} and {_VERSIONS[1]} are "
            "supported."
        )


def _broken_error(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path} {problem}: the file is broken. Fetch it again.")


class _Parser:
    """A read position in a mapped file."""

    def __init__(self, path: Path, blob: mmap.mmap):
        self.path, self.blob = path, blob
        self.end = min(len(blob), MAX_HEADER)
        self.position = 8  # after magic and version

    def header(self) -> GgufHeader:
        tensors, fields = self._unpack("<QQ")
        metadata: dict[str, Any] = {}
        for _ in range(fields):
            key = self._name()
            if key in metadata:
                raise _broken_error(self.path, f"gives {key} twice")
            metadata[key] = self._value(self._unpack("<I")[0])
        entries = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if _count(alignment) < 1 or alignment & (alignment - 1):
            raise _broken_error(
                self.path, f"has general.alignment {alignment!r}, not a power of two"
            )
        data_start = ceil_div(self.position, alignment) * alignment
        infos = {}
        for name, shape, kind, offset in entries:
            if name in infos:
                raise _broken_error(self.path, f"holds tensor {name} twice")
            if offset % alignment:
                raise _broken_error(
                    self.path, f"places tensor {name} at {offset}, which is not aligned"
                )
            infos[name] = TensorInfo(name, shape, kind, data_start + offset, self.path)
        return GgufHeader(self.path, {self.path: len(self.blob)}, data_start, metadata, infos)

    def _unpack(self, format: str) -> tuple[Any, ...]:
        values = struct.unpack_from(format, self.blob, self.position)
        self.position += struct.calcsize(format)
        if self.position > self.end:
            raise self._end_error()
        return values

    def _end_error(self) -> Exception:
        """Return the exception for a header that extends past the readable part of the file."""
        if self.end == len(self.blob):
            return EOFError()
        return _broken_error(self.path, f"has a header of more than {MAX_HEADER:,} bytes")

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        end = self.position + length
        if end > self.end:
            raise self._end_error()
        string = self.blob[self.position : end].decode()
        self.position = end
        return string

    def _name(self) -> str:
        """Read a name; it must be printable, since it may appear in messages."""
        name = self._string()
        if not name.isprintable():
            raise _broken_error(self.path, f"holds the name {name[:80]!r}")
        return name

    def _value(self, kind: int) -> Any:
        """Read a metadata value: a number, a boolean, a string, or a list of one of these."""
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise _broken_error(self.path, f"has metadata of an unknown type ({kind})")
        inner, count = self._unpack("<IQ")
        # each element takes at least one byte
        if count > min(_MAX_ELEMENTS, self.end - self.position):
            if count <= _MAX_ELEMENTS:
                raise self._end_error()
            raise _broken_error(self.path, f"has a list of {count:,} elements in its metadata")
        if inner in _SCALARS:
            return list(self._unpack(f"<{count}{_SCALARS[inner][1]}"))
        if inner != _STRING:
            raise _broken_error(self.path, f"has metadata of an unknown type (a list of {inner})")
        return self._strings(count)

    def _strings(self, count: int) -> list[str]:
        """Read many strings, as `_string` but faster: the tokens of a vocabulary or its merges."""
        blob, position, end = self.blob, self.position, self.end
        unpack: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            start = position + 8
            position = start + unpack(blob, position)[0]
            if position > end:
                raise self._end_error()
            strings.append(blob[start:position].decode())
        self.position = position
        return strings

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read a tensor's name, shape, type, and offset from the first tensor in bytes."""
        name = self._name()
        (dimensions,) = self._unpack("<I")
        if dimensions > _MAX_DIMENSIONS:
            raise _broken_error(self.path, f"gives tensor {name} {dimensions} dimensions")
        shape = self._unpack(f"<{dimensions}Q")[::-1]
        if name.endswith("exp_probs_b.bias") and len(shape) == 2 and shape[0] == 1:
            shape = shape[1:]  # the converter leaves ERNIE's like that
        kind, offset = self._unpack("<IQ")
        return name, shape, kind, offset


def _count(value: Any) -> int:
    """Return an int as it is, 0 for anything else."""
    return value if type(value) is int else 0
