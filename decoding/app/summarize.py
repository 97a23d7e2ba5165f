"""Batch summaries: documents in, one durable record each out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from decoding.app.documents import Document
from decoding.app.job import Job
from decoding.app.progress import Display
from decoding.app.prompt import Template
from decoding.app.records import Records
from decoding.app.stream import describe
from decoding.engine import Engine
from offload.errors import DocumentError, TierForceError
from parallel.environment import RankLost


@dataclass(frozen=True)
class Longest:
    """The document that asks most of memory."""

    name: str
    tokens: int  # of its prompt, cut to the context


def longest_prompt(
    engine: Engine, documents: Sequence[Document], template: Template, new: int
) -> Longest | None:
    """Find the largest document that can be read; None where none can."""
    for document in sorted(documents, key=lambda document: document.size, reverse=True):
        try:
            return Longest(
                document.id,
                len(template.fill(engine.tokenizer, document.read(), engine.context - new)[0]),
            )
        except DocumentError:
            continue
    return None


def due_documents(documents: Sequence[Document], records: Records, job: Job) -> list[Document]:
    """Return those without a finished record of this very job: the same text, asked of the same
    model, by the same law.
    """
    due = []
    for document in documents:
        if (finished := records.finished.get(document.id)) is not None:
            try:
                if finished.digest in (None, job.digest(document.read())):
                    continue
            except DocumentError:  # it could be read once; its new record will tell
                pass
        due.append(document)
    return due


def summarize(
    engine: Engine,
    documents: Sequence[Document],
    due: Sequence[Document],
    records: Records,
    template: Template,
    job: Job,
    display: Display,
) -> int:
    """Summarise, of all the documents, those that are due; on rank 0. Returns how many failed.

    A document that cannot be processed gets a record with `error` in place of `summary`, and the
    batch goes on.
    """
    failed, wanted = 0, {document.id for document in due}
    for document in documents:
        if document.id not in wanted:
            display.end(f"{document.id}: finished before, skipped")
            continue
        display.begin(document.id)
        try:
            record = _summary(engine, document, template, job, display)
            line = describe(engine.stats)
        except RankLost:
            raise
        except TierForceError as error:
            record = {
                "id": document.id,
                "error": str(error),
                "kind": type(error).__name__,
                "date": _now(),
                "versions": versions(),
            }
            line = f"failed: {error}"
            failed += 1
        records.append(record)
        display.end(f"{document.id}: {line}")
    return failed


def _summary(
    engine: Engine, document: Document, template: Template, job: Job, display: Display
) -> dict[str, Any]:
    text, new = document.read(), job.max_new_tokens
    prompt, dropped = template.fill(engine.tokenizer, text, engine.context - new)
    if dropped:
        display.warn(
            f"{document.id}: longer than the context of {engine.context} tokens; the last {dropped}"
            " tokens were dropped"
        )
    tokens = []
    for token in engine.generate(prompt, new, job.sampling, display.prefill):
        tokens.append(token)
        display.decode(engine.stats, new)
    device = engine.group.device
    return {
        "id": document.id,
        "summary": engine.tokenizer.decode(tokens, skip_special_tokens=True).strip(),
        **engine.stats.as_dict(),
        "dropped_tokens": dropped,
        **job.as_dict(),
        "dtype": str(engine.runtime.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "ranks": engine.group.size,
        "date": _now(),
        "digest": job.digest(text),
        "versions": versions(),
    }


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Of what the numbers and the text depend on."""
    found = {}
    for name in ("tierforce", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
