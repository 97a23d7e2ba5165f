"""ZIP archives of untrusted origin, read in memory: nothing in them becomes a path on disk."""

from __future__ import annotations

import io
import stat
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO
from zipfile import ZipFile, ZipInfo

from offload.errors import InvalidRequestError

MAX_MEMBERS = 100_000
MAX_MEMBER_BYTES = 512 << 20  # unpacked: a document with its pictures


class Archive:
    """An opened ZIP archive. What zipfile raises for damaged ones is passed on."""

    def __init__(self, file: BinaryIO):
        self._zip = ZipFile(file)
        self._infos = self._zip.infolist()
        if len(self._infos) > MAX_MEMBERS:
            raise InvalidRequestError(
                f"the archive has more than {MAX_MEMBERS:,} members: split it into parts."
            )
        self.names = {info.filename for info in self._infos}

    def members(self) -> Iterator[tuple[int, str, int, int, str | None]]:
        """Yield the index, name, bytes and CRC-32 of each file, and why it cannot be read if so."""
        for index, info in enumerate(self._infos):
            if not info.is_dir() or info.file_size:
                yield index, info.filename, info.file_size, info.CRC, _problem(info)

    def open(self, index: int, size: int, checksum: int) -> BinaryIO:
        """Return the content of a listed member. Raises as `read` does, and if it has changed."""
        info = self._infos[index] if index < len(self._infos) else None
        if info is None or (info.file_size, info.CRC) != (size, checksum):
            raise InvalidRequestError("the archive has changed since it was listed.")
        return io.BytesIO(self._read(info))

    def read(self, name: str, is_optional: bool = False) -> bytes:
        """Return a member of at most MAX_MEMBER_BYTES, whatever the archive says of its size.

        Raises InvalidRequestError if it is larger, encrypted, leads out of the archive, or is
        missing; an optional one is empty then.
        """
        if name in self.names:
            return self._read(self._zip.getinfo(name))
        if is_optional:
            return b""
        raise InvalidRequestError(f"{name} is missing in the archive.")

    def _read(self, info: ZipInfo) -> bytes:
        if (problem := _problem(info)) is not None:
            raise InvalidRequestError(problem)
        with self._zip.open(info) as member:
            content = member.read(MAX_MEMBER_BYTES + 1)
        if len(content) > MAX_MEMBER_BYTES:
            raise InvalidRequestError(
                f"{info.filename} in the archive is larger than {MAX_MEMBER_BYTES >> 20} MiB."
            )
        return content


def parse_xml(content: bytes, name: str) -> Any:
    """Return the root of XML. Raises InvalidRequestError if it is invalid or unsafe."""
    from defusedxml import DefusedXmlException
    from defusedxml.ElementTree import ParseError, fromstring

    try:
        return fromstring(content)
    except ParseError as error:
        raise InvalidRequestError(f"{name} in it is not valid XML ({error}).") from error
    except DefusedXmlException as error:
        raise InvalidRequestError(f"{name} in it has XML entities, which are unsafe.") from error


def _problem(info: ZipInfo) -> str | None:
    path = PurePosixPath(info.filename.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts:
        return "its name leads out of the archive."
    if stat.S_ISLNK(info.external_attr >> 16):
        return "it is a symbolic link in the archive."
    if info.flag_bits & 1:
        return "it is encrypted: unpack the archive with its password first."
    return None
