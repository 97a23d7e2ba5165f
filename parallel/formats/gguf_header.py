"""The header of a GGUF file: what it says of a model, and where its tensors lie.

It needs nothing but Python, since a plan has to answer at once. Source of the format:
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
_VERSIONS = (2, 3)  # 1 counted in 32 bits, and is found nowhere
_SCALARS = {  # number of a metadata type: how struct reads it
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
# what no model needs, and would take minutes or all memory: a header of as many bytes, a list of
# as many elements. Vocabularies have 262,144 tokens, their merges less than twice as many
_MAX_HEADER = 128 << 20
_MAX_ELEMENTS = 1 << 22
_ALIGNMENT = 32  # of tensors, where the file says nothing
_SPLIT_NAME = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
LFS = b"version https://git-lfs"
_AGAIN = "Was the download interrupted? Fetch it again."


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in a file, and how it is stored."""

    name: str
    shape: tuple[int, ...]  # rows first; the file has the fastest dimension first
    kind: int  # ggml's number of the type
    start: int  # bytes from the file's beginning


@dataclass(frozen=True)
class GgufHeader:
    """What stands before the tensors of a file."""

    path: Path
    size: int  # bytes of the file
    data_start: int  # bytes before the first tensor
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]  # by GGUF's own names


def read_header(path: Path) -> GgufHeader:
    """Read all of a file but its tensors.

    Raises CheckpointError for what is no GGUF file, is incomplete, or one part of several.
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
        raise CheckpointError(f"{path} ends within its metadata. {_AGAIN}") from error
    except UnicodeDecodeError as error:
        raise _broken(path, "holds a name or a text that is not UTF-8") from error


def check_single_file(path: Path, parts: int = 1) -> None:
    """Raise CheckpointError for a file that is one of several, by its name or its metadata."""
    if parts > 1 or _SPLIT_NAME.search(path.name):
        raise CheckpointError(
            f"{path} is one part of a split model, which is not read: join the parts once, with "
            "llama.cpp's `llama-gguf-split --merge FIRST_PART WHOLE_FILE`."
        )


def check_lfs_pointer(path: Path, start: bytes) -> None:
    """Raise CheckpointError for what Git LFS leaves in place of a file, by its first bytes."""
    if start == LFS:
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder."
        )


def _check_magic(path: Path, start: bytes) -> None:
    """Raise CheckpointError unless a file starts as GGUF files do that are read here."""
    check_lfs_pointer(path, start)
    if start[:4] != MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it begins with {start[:4]!r}.")
    if len(start) < 8:
        raise EOFError
    (version,) = struct.unpack_from("<I", start, 4)
    if version & 0xFFFF == 0 and version:
        raise CheckpointError(
            f"{path} is a big-endian GGUF file, which is not read: convert the model again for "
            "little-endian machines."
        )
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{path} has version {version} of GGUF; versions {_VERSIONS[0]} and {_VERSIONS[1]} are "
            "read."
        )


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} {what}: the file is broken. Fetch it again.")


class _Parser:
    """A position in a mapped file, behind what was read."""

    def __init__(self, path: Path, blob: mmap.mmap):
        self.path, self.blob = path, blob
        self.end = min(len(blob), _MAX_HEADER)
        self.at = 8  # behind magic and version

    def header(self) -> GgufHeader:
        tensors, fields = self._take("<QQ")
        metadata: dict[str, Any] = {}
        for _ in range(fields):
            key = self._name()
            if key in metadata:
                raise _broken(self.path, f"gives {key} twice")
            metadata[key] = self._value(self._take("<I")[0])
        check_single_file(self.path, _count(metadata.get("split.count")))
        places = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if _count(alignment) < 1 or alignment & (alignment - 1):
            raise _broken(self.path, f"has general.alignment {alignment!r}, not a power of two")
        data_start = ceil_div(self.at, alignment) * alignment
        infos = {}
        for name, shape, kind, offset in places:
            if name in infos:
                raise _broken(self.path, f"holds tensor {name} twice")
            if offset % alignment:
                raise _broken(self.path, f"places tensor {name} at {offset}, between two places")
            infos[name] = TensorInfo(name, shape, kind, data_start + offset)
        return GgufHeader(self.path, len(self.blob), data_start, metadata, infos)

    def _take(self, format: str) -> tuple[Any, ...]:
        values = struct.unpack_from(format, self.blob, self.at)
        self.at += struct.calcsize(format)
        if self.at > self.end:
            raise self._too_long()
        return values

    def _too_long(self) -> Exception:
        """Return what is raised where the header goes on past the part of the file that is read."""
        if self.end == len(self.blob):
            return EOFError()
        return _broken(self.path, f"has a header of more than {_MAX_HEADER:,} bytes")

    def _string(self) -> str:
        (length,) = self._take("<Q")
        end = self.at + length
        if end > self.end:
            raise self._too_long()
        text = self.blob[self.at : end].decode()
        self.at = end
        return text

    def _name(self) -> str:
        """Read a name, which messages may repeat."""
        name = self._string()
        if not name.isprintable():
            raise _broken(self.path, f"holds the name {name[:80]!r}")
        return name

    def _value(self, kind: int) -> Any:
        """Read a value of metadata: a number, a truth value, a text, or a list of one of these."""
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise _broken(self.path, f"has metadata of an unknown type ({kind})")
        inner, count = self._take("<IQ")
        if count > min(_MAX_ELEMENTS, self.end - self.at):  # one takes a byte at least
            if count <= _MAX_ELEMENTS:
                raise self._too_long()
            raise _broken(self.path, f"has a list of {count:,} elements in its metadata")
        if inner in _SCALARS:
            return list(self._take(f"<{count}{_SCALARS[inner][1]}"))
        if inner != _STRING:
            raise _broken(self.path, f"has metadata of an unknown type (a list of {inner})")
        return self._strings(count)

    def _strings(self, count: int) -> list[str]:
        """Read as `_string` does, hundreds of thousands at once: a vocabulary or its merges."""
        blob, at, end = self.blob, self.at, self.end
        unpack: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(blob, at)[0]
            if at > end:
                raise self._too_long()
            texts.append(blob[start:at].decode())
        self.at = at
        return texts

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read a tensor's name, shape, type, and bytes from the first tensor on."""
        name = self._name()
        (dimensions,) = self._take("<I")
        if dimensions > _MAX_DIMENSIONS:
            raise _broken(self.path, f"gives tensor {name} {dimensions} dimensions")
        shape = self._take(f"<{dimensions}Q")[::-1]
        kind, offset = self._take("<IQ")
        return name, shape, kind, offset


def _count(value: Any) -> int:
    """Return a whole number, and 0 for anything else."""
    return value if type(value) is int else 0
