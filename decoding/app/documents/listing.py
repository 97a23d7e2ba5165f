"""The input documents: a folder of files, a .zip of them, one file, or JSON lines."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain, count
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from decoding.app.documents import json_lines
from decoding.app.documents.conversion import convert
from decoding.app.documents.document import Document
from decoding.app.documents.formats import kinds
from offload.errors import InvalidRequestError, TierForceError
from offload.regular_files import open_regular

MAX_DOCUMENTS = 1_000_000
PARTS_SUFFIX = ".parts"  # added to the name of a file of records: answers about parts
# in the first line of a file with results to read, which is not a document of a folder
RESULT_MARK = "Written by tierforce. Each run writes this file again from its records."
_RESULT_KINDS = (*kinds.TEXTUAL, kinds.HTML)  # names that such files may have
_HIDDEN = "hidden"
_EXCLUDED = "left out by --include"


@dataclass
class Listing:
    """The documents of a source, and what was left out."""

    documents: list[Document] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)  # names of files, by the reason
    unreadable: list[Path] = field(default_factory=list)  # folders not listed, and broken links
    # fields of JSON lines that are not read, and the number of lines
    unknown_fields: Counter[str] = field(default_factory=Counter)

    def skip(self, name: str, reason: str) -> None:
        self.skipped.setdefault(reason, []).append(name)


def find_documents(
    source: Path, outputs: Collection[Path] = (), include: Sequence[str] = ()
) -> Listing:
    """List the documents of a folder (recursively, sorted by name), of a .zip, a file or a .jsonl.

    Args:
        source: the folder or file.
        outputs: files, and folders, that may be in the folder and are left out, as is what a job
            puts beside them.
        include: patterns such as `*.py` for names or paths below `source`. Files that match are
            documents, as text if their suffix is unknown; others are left out.

    Raises TierForceError if there are no documents, the source cannot be read, or two documents
    share an id.
    """
    listing = Listing()
    try:
        if source.is_dir():
            _list_folder(source, outputs, include, listing)
        elif source.exists() and not source.is_file():
            raise TierForceError(
                f"--input {source} is a pipe or a device: give a folder or a regular file."
            )
        else:
            _list_file(source, include, listing)
    except OSError as error:
        raise TierForceError(f"--input {source} cannot be read: {error.strerror}.") from error
    _check_count(source, len(listing.documents))
    if not listing.documents:
        raise TierForceError(f"--input {source} {_nothing_found(source, listing)}")
    _check_unique_ids(source, listing.documents)
    return listing


def single_document(name: str, file: BinaryIO) -> Document:
    """Return the document that an open file is, or the only one of a .zip; `name` is a label.

    It can be read with `Document.read_from`. Raises InvalidRequestError for several, or none.
    """
    path = Path(name)
    if path.suffix.lower() == ".jsonl":
        raise InvalidRequestError("it is a list of documents: save one of them as text.")
    if kinds.kind_by_name(name) != kinds.ARCHIVE:
        return Document(name, path)
    listing = Listing()
    _list_members(file, path, "", (), listing)
    if len(listing.documents) == 1:
        return listing.documents[0]
    found = f"{len(listing.documents):,} documents" if listing.documents else "no document"
    raise InvalidRequestError(
        f"it is an archive with {found}: unpack it, and choose one file. Documents end in "
        f"{', '.join(kinds.SUFFIXES)}."
    )


def _nothing_found(source: Path, listing: Listing) -> str:
    if source.suffix.lower() == ".jsonl" and not source.is_dir():
        return "has no line: there is nothing to summarise."
    skipped = Counter({reason: len(names) for reason, names in listing.skipped.items()})
    found = "".join(f" ({count}: {reason})" for reason, count in skipped.most_common(3))
    return (
        f"has no document: there is nothing to summarise{found}. Documents end in "
        f"{', '.join(kinds.SUFFIXES)}; --include '*.py' adds others as text."
    )


def _list_file(source: Path, include: Sequence[str], listing: Listing) -> None:
    suffix = source.suffix.lower()
    if suffix == ".json":
        raise TierForceError(
            f"--input {source} is JSON, which would be read as one document: give a .jsonl "
            f"file with one object per line. To convert a list: jq -c '.[]' {source.name} > "
            f"{source.with_suffix('.jsonl').name}; if it has one object per line, rename it."
        )
    with source.open("rb"):
        size = source.stat().st_size
    is_archive = kinds.kind_by_name(source.name) == kinds.ARCHIVE
    if include and not is_archive:
        raise TierForceError("--include selects files of a folder or a .zip: leave it out.")
    if suffix == ".jsonl":
        listing.documents = _line_documents(source, listing.unknown_fields)
    elif is_archive:
        try:
            _list_archive(source, "", include, listing)
        except InvalidRequestError as error:
            raise TierForceError(f"--input {source}: {error}") from error
    else:
        listing.documents = [Document(source.name, source, size)]


def _list_folder(
    source: Path, outputs: Collection[Path], include: Sequence[str], listing: Listing
) -> None:
    own = {
        output.with_name(output.name + suffix)
        for output in map(Path.resolve, outputs)
        for suffix in ("", PARTS_SUFFIX)
    }
    files, unreadable = _walk(source, listing)
    listing.unreadable = sorted(unreadable)
    for path in sorted(files):
        name = str(path.relative_to(source))
        resolved = path.resolve()
        if not own.isdisjoint((resolved, *resolved.parents)):
            continue
        kind = _kind(name, include, listing)
        if kind == kinds.ARCHIVE:
            try:
                _list_archive(path, f"{name}/", include, listing)
            except (InvalidRequestError, OSError) as error:
                listing.documents.append(Document(name, path, problem=str(error)))
        elif kind in _RESULT_KINDS and is_result(path):
            listing.skip(name, "results of an earlier job")
        elif kind is not None:
            listing.documents.append(Document(name, path, _size(path), kind=kind))


def is_result(path: Path) -> bool:
    """Return whether a job wrote this file for people to read."""
    try:
        with open_regular(path) as file:
            return RESULT_MARK.encode() in file.read(len(RESULT_MARK) + 8)
    except OSError:  # reading it will report that
        return False


def _kind(name: str, include: Sequence[str], listing: Listing) -> str | None:
    """Return the kind of the file `name` in a source; None if it is left out, which is listed."""
    kind = kinds.kind_by_name(name)
    if kind == kinds.ARCHIVE:
        return kind
    if include:
        if any(_matches(name, pattern) for pattern in include):
            return kind or kinds.TEXT
        listing.skip(name, _EXCLUDED)
        return None
    if kind is None:
        listing.skip(name, kinds.advice(name) or "not a kind of document that is read")
    return kind


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(PurePosixPath(name).name, pattern)


def _list_archive(path: Path, prefix: str, include: Sequence[str], listing: Listing) -> None:
    """List the documents of a .zip. Raises InvalidRequestError or OSError if it cannot be read."""
    with open_regular(path) as file:
        _list_members(file, path, prefix, include, listing)


def _list_members(
    file: BinaryIO, path: Path, prefix: str, include: Sequence[str], listing: Listing
) -> None:
    """List the documents of a .zip that is open. Raises InvalidRequestError."""
    members = json.loads(convert(file, kinds.ARCHIVE)[0])
    names = {f"{prefix}{name}" for _, name, *_ in members}
    seen = set[str]()
    for index, member, size, checksum, problem in sorted(members, key=lambda member: member[1]):
        name = f"{prefix}{member}"
        if any(map(_is_hidden, member.replace("\\", "/").split("/"))):
            listing.skip(name, _HIDDEN)
            continue
        kind = _kind(name, include, listing)
        if kind == kinds.ARCHIVE:
            listing.skip(name, "an archive in an archive: unpack it")
        elif kind is not None:
            if name in seen:  # the archive has several files of this name
                name = unique_name(name, names)
            seen.add(name)
            names.add(name)
            listing.documents.append(
                Document(
                    name,
                    path,
                    size,
                    member=index,
                    checksum=checksum,
                    kind=kind,
                    problem=problem,
                )
            )


def unique_name(name: str, names: Collection[str]) -> str:
    """Return this name with the smallest number that no other has."""
    numbered = (f"{name} ({number})" for number in count(2))
    return next(each for each in chain([name], numbered) if each not in names)


def _is_hidden(name: str) -> bool:
    """Return whether a file or folder is for programs: hidden, or the lock of an Office file."""
    return name.startswith((".", "~$", "__MACOSX")) and name not in (".", "..")


def _size(path: Path) -> int:
    """Return the bytes of a file; 0 if it is gone, which reading it will report."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _walk(source: Path, listing: Listing) -> tuple[list[Path], list[Path]]:
    """Return all files below a folder, following links, and the paths that cannot be read.

    A folder reached by several paths is searched once, hidden ones are not. Raises OSError for the
    folder itself.
    """
    files, unreadable = list[Path](), list[Path]()
    visited = set[tuple[int, int]]()
    folders, links = [source], list[Path]()
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in visited:
                continue
            visited.add((status.st_dev, status.st_ino))
            entries = _visible_entries(source, folder, listing)
        except OSError:
            if folder == source:
                raise
            unreadable.append(folder)
            continue
        for entry in entries:
            path = folder / entry.name
            try:
                if entry.is_file():
                    files.append(path)
                elif entry.is_dir():
                    (links if entry.is_symlink() else folders).append(path)
                elif entry.is_symlink() and not path.exists():
                    unreadable.append(path)
                else:
                    listing.skip(str(path.relative_to(source)), "not a regular file")
            except OSError:  # a circular link
                unreadable.append(path)
    return files, unreadable


def _visible_entries(source: Path, folder: Path, listing: Listing) -> list[os.DirEntry[str]]:
    """Return the entries of a folder by name; hidden ones are listed as skipped."""
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    for entry in entries:
        if _is_hidden(entry.name):
            listing.skip(str(Path(entry.path).relative_to(source)), _HIDDEN)
    return [entry for entry in entries if not _is_hidden(entry.name)]


def _check_unique_ids(source: Path, documents: Sequence[Document]) -> None:
    seen: set[str] = set()
    for document in documents:
        if document.id in seen:
            raise TierForceError(
                f"--input {source}: the id {document.id!r} appears more than once: ids must be "
                "unique."
            )
        seen.add(document.id)


def _line_documents(source: Path, unknown: Counter[str]) -> list[Document]:
    lines = list[tuple[int, str | None, int, int]]()
    for line in json_lines.lines(source, unknown):
        lines.append(line)
        _check_count(source, len(lines))
    ids = {name for _, name, _, _ in lines if name is not None}
    documents = []
    for number, name, size, offset in lines:
        if name is None:
            name = unique_name(f"line {number}", ids)
        documents.append(Document(name, source, size, offset))
    return documents


def _check_count(source: Path, documents: int) -> None:
    if documents > MAX_DOCUMENTS:
        raise TierForceError(
            f"--input {source} has more than {MAX_DOCUMENTS:,} documents: split it into parts."
        )
