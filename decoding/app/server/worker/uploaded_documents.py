"""Documents that clients send: their text, read as `summarize` reads a file, and its tokens."""

from __future__ import annotations

import re
from typing import Any, BinaryIO

from decoding.app.documents.listing import single_document
from decoding.app.server.worker import limits
from decoding.app.server.worker.prompts import Prompts
from offload.errors import InvalidRequestError

_UNNAMED = "document"


def label_of(name: str) -> str:
    """Return the last part of a file's name, without control characters, as a label.

    Its end is kept if it is too long, since the suffix chooses the format.
    """
    own = re.split(r"[/\\]", name)[-1]
    label = "".join(char for char in own if char.isprintable())[-limits.DOCUMENT_NAME :]
    return label if label.strip(" .") else _UNNAMED


def read_upload(label: str, file: BinaryIO, prompts: Prompts) -> dict[str, Any]:
    """Return the answer to a document in an open regular file.

    Of a text of more than twice the context, only the beginning that was counted is returned.
    Raises InvalidRequestError if the document cannot be read.
    """
    try:
        document = single_document(label, file).read_from(file)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{label}: {error}") from error
    text, notes = document.text, [document.warning] if document.warning else []
    tokens, counted = prompts.count(text)
    if counted < len(text):
        notes.append(
            f"more than twice the context: only the first {counted:,} of {len(text):,} characters "
            "are here"
        )
    return {
        "name": label,
        "text": text[:counted],
        "characters": len(text),
        "tokens": tokens,
        "notes": notes,
    }
