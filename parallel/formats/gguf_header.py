"""The header of a GGUF file: metadata, and the location of the tensors.

Imports only the standard library, since a plan has to be fast. Source of the format:
github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
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
_SPLIT_NAME = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
LFS = b"version https://git-lfs"
_FETCH_AGAIN = "Was the download interrupted? Fetch it again."


@dataclass(frozen=True)
class TensorInfo:
    """The location of a tensor in a file, and its type."""

    name: str
    shape: tuple[int, ...]  # rows first; in the file, the fastest dimension is first
    kind: int  # ggml's type number
    start: int  # offset in the file in bytes


@dataclass(frozen=True)
class GgufHeader:
    """The part of a file that precedes the tensors."""

    path: Path
    size: int  # bytes of the whole file
    data_start: int  # offset of the first tensor in bytes
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]  # keyed by GGUF name


def read_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file, everything but the tensor data.

    Raises CheckpointError if the file is not GGUF, is incomplete, or is one part of a split model.
    """
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


def check_single_file(path: Path, parts: int = 1) -> None:
    """Raise CheckpointError for a part of a split model, by its name or its metadata."""
    if parts > 1 or _SPLIT_NAME.search(path.name):
        raise CheckpointError(
            f"{path} is one part of a split model, which is not supported: join the parts once, "
            "with llama.cpp's `llama-gguf-split --merge FIRST_PART WHOLE_FILE`."
        )


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
        check_single_file(self.path, _count(metadata.get("split.count")))
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
            infos[name] = TensorInfo(name, shape, kind, data_start + offset)
        return GgufHeader(self.path, len(self.blob), data_start, metadata, infos)

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
        kind, offset = self._unpack("<IQ")
        return name, shape, kind, offset


def _count(value: Any) -> int:
    """Return an int as it is, 0 for anything else."""
    return value if type(value) is int else 0
