"""Files of questions, templates of prompts, and JSON schemas, which options name."""

from __future__ import annotations

import json
from pathlib import Path

from decoding.app.documents.document import Document
from decoding.app.documents.formats.kinds import TEXT
from decoding.text.instructions import PromptFormat
from offload.errors import InvalidRequestError, TierForceError, one_line


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


def read_schema(path: Path) -> str:
    """Return the JSON schema in a file, in one line. Raises TierForceError."""
    from decoding.grammars.grammar import Grammar

    text = _read("--schema", path)
    try:
        grammar = Grammar(json.dumps(json.loads(text), ensure_ascii=False))
        grammar.check()
    except (ValueError, RecursionError) as error:
        raise TierForceError(f"--schema {path} is not JSON ({one_line(error)}).") from error
    except InvalidRequestError as error:
        raise TierForceError(f"--schema {path}: {error}") from error
    return grammar.source


def _read(option: str, path: Path) -> str:
    """Return the text of a file that an option names. Raises TierForceError."""
    try:
        return Document(path.name, path, kind=TEXT).read().text
    except InvalidRequestError as error:
        raise TierForceError(f"{option} {path}: {error}") from error
