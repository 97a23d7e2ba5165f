"""Files of questions, and templates of prompts, which options name."""

from __future__ import annotations

from pathlib import Path

from decoding.app.documents.document import Document
from decoding.app.documents.formats.kinds import TEXT
from decoding.text.instructions import PromptFormat
from offload.errors import InvalidRequestError, TierForceError


def read_questions(path: Path) -> tuple[str, ...]:
    """Return the lines of a file that are not blank. Raises TierForceError."""
    lines = map(str.strip, _read("--questions", path).split("\n"))
    return tuple(line for line in lines if line)


def read_template(path: Path) -> str:
    """Return the template in a file, without the end of its last line. Raises TierForceError."""
    text = _read("--template", path).removesuffix("\n").removesuffix("\r")
    try:
        PromptFormat(text)
    except TierForceError as error:
        raise TierForceError(f"--template {path}: {error}") from error
    return text


def _read(option: str, path: Path) -> str:
    """Return the text of a file that an option names. Raises TierForceError."""
    try:
        return Document(path.name, path, kind=TEXT).read().text
    except InvalidRequestError as error:
        raise TierForceError(f"{option} {path}: {error}") from error
