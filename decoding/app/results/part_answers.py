"""Answers to some of the tasks of documents, on disk until the documents' records are."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from decoding.app.documents.formats.encodings import MAX_BYTES
from decoding.app.documents.listing import PARTS_SUFFIX
from decoding.app.results.durable import PADDING, write_all
from decoding.prefix_cache.files import sync_folder
from offload.errors import TierForceError
from offload.regular_files import bounded_lines, open_regular

# the counts of a request that are kept
FIELDS = (
    "prompt_tokens",
    "reused_tokens",
    "loaded_tokens",
    "new_tokens",
    "concurrency",
    "finish_reason",
    "time_to_first_token_s",
    "decode_s",
    "ms_per_token",
    "tokens_per_verification",
    "link_bytes_per_token",
    "mode",
)
SUMS = (
    "prompt_tokens",
    "reused_tokens",
    "loaded_tokens",
    "new_tokens",
    "time_to_first_token_s",
    "decode_s",
)
DEVICE_FIELDS = ("dtype", "device", "ranks")
_MAX_COUNT = 1e15
_BEGINNING = b'{"digest": "'  # the first characters of a line


class PartAnswers:
    """A JSONL file of answers, each found again by a digest of everything that determines it.

    It is deleted once the records of all its documents are on disk. The lock on the file of records
    protects it, too. Raises TierForceError if it cannot be read or written, or holds anything else.
    """

    def __init__(self, records: Path, mode: int = 0o600):
        """Read the answers of an earlier job with the same file of records.

        `mode` is that file's, for a new one.
        """
        self._mode = mode
        self.path = records.with_name(records.name + PARTS_SUFFIX)
        self._answers: dict[str, dict[str, Any]] = {}
        self._digests: dict[str, set[str]] = {}  # digests of answers by document without a record
        self._users: Counter[str] = Counter()  # how many of these documents have each digest
        self._file: FileIO | None = None
        self._size = 0  # bytes up to the end of the last whole line
        self._exists = True
        self._is_own = False  # it holds answers, or was created here
        try:
            self._load()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
                raise self._unusable("cannot be read", error) from error
            self._exists = False

    @property
    def count(self) -> int:
        """Return the number of answers for documents without a record."""
        return len(self._users)

    def get(self, digest: str, document: str) -> dict[str, Any] | None:
        """Return the answer with this digest for a document, if there is one.

        Raises TierForceError as `add`.
        """
        answer = self._answers.get(digest)
        if answer is not None and digest not in self._digests.get(document, ()):
            self.add(digest, document, answer)  # it was for another document
        return answer

    def add(self, digest: str, document: str, answer: dict[str, Any]) -> None:
        """Write an answer, and wait until it is on disk. Raises TierForceError if that fails."""
        answer = {name: answer[name] for name in ("summary", *FIELDS, *DEVICE_FIELDS)}
        line = json.dumps({"digest": digest, "id": document, "answer": answer}, allow_nan=False)
        file = self.open()
        try:
            write_all(file, line.encode() + b"\n")
        except OSError as error:
            raise self._unusable("cannot be written", error) from error
        self._keep(digest, document, answer)

    def open(self) -> FileIO:
        """Return the file, open at the end of its last whole line. Raises TierForceError."""
        if self._file is None:
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
                with open_regular(self.path, flags) as file:
                    self._file = FileIO(os.dup(file.fileno()), "r+")
                self._file.truncate(self._size)
                self._file.seek(self._size)
                if not self._exists:  # summaries in it are as private as in the records
                    os.fchmod(self._file.fileno(), self._mode)
                self._exists = self._is_own = True
                sync_folder(self.path.parent)
            except OSError as error:
                raise self._unusable("cannot be written", error) from error
        return self._file

    def finish(self, document: str) -> None:
        """Note that the record of a document is on disk."""
        if (digests := self._digests.pop(document, None)) is None:
            return
        for digest in digests:
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]
                self._answers.pop(digest, None)
        if not self._digests:
            self.close()

    def close(self) -> None:
        """Close the file; delete it if the records of all its documents are on disk."""
        with suppress(OSError):
            if self._file is not None:
                self._file.close()
                self._file = None
            if self._is_own and self._exists and not self._digests:
                self._exists, self._size = False, 0
                self.path.unlink(missing_ok=True)

    def _load(self) -> None:
        with open_regular(self.path, os.O_RDONLY | os.O_NOFOLLOW) as file:
            for number, (offset, line) in enumerate(bounded_lines(file, MAX_BYTES), 1):
                content, is_whole = line.strip(PADDING), line.endswith(b"\n")
                is_torn = not is_whole and _BEGINNING.startswith(content[: len(_BEGINNING)])
                if is_torn and len(line) <= MAX_BYTES:  # the last line, perhaps padding alone
                    return
                if content:
                    self._remember(content if is_whole else b"", number)
                self._size = offset + len(line)

    def _remember(self, line: bytes, number: int) -> None:
        """Keep the answer in a line. Raises TierForceError if there is none."""
        try:
            value = json.loads(line)
            digest, document, answer = value["digest"], value["id"], value["answer"]
            is_answer = isinstance(answer["summary"], str)
        except (ValueError, KeyError, TypeError, RecursionError):
            is_answer = False
        if not is_answer:
            raise TierForceError(
                f"{self.path} exists, but its line {number} is not an answer about a part of a "
                "document: move the file away, or choose another --output."
            )
        self._is_own = True
        self._digests.setdefault(str(document), set())
        answer = {"reused_tokens": 0, **answer}  # an older version's have none
        if _is_complete(answer):  # those of another version may not be
            self._keep(str(digest), str(document), answer)

    def _keep(self, digest: str, document: str, answer: dict[str, Any]) -> None:
        self._answers[digest] = answer
        own = self._digests.setdefault(document, set())
        if digest not in own:
            own.add(digest)
            self._users[digest] += 1

    def _unusable(self, what: str, error: OSError) -> TierForceError:
        return TierForceError(
            f"{self.path}, for parts of documents, {what}: {error.strerror}. Finished records are "
            "safe."
        )


def _is_complete(answer: dict[str, Any]) -> bool:
    """Return whether a record can be made of an answer."""
    numbers = [answer.get(name) for name in (*SUMS, "concurrency")]
    # NaN compares as false
    has_numbers = all(isinstance(each, int | float) and abs(each) < _MAX_COUNT for each in numbers)
    try:
        json.dumps(answer, allow_nan=False)
    except ValueError:
        return False
    return has_numbers and {*FIELDS, *DEVICE_FIELDS} <= answer.keys()
