"""Batch summaries: documents in, one durable record each out."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from decoding.documents import Document
from decoding.engine import Engine
from decoding.progress import Display
from decoding.prompt import Template
from decoding.records import Records
from decoding.sampling import Sampling
from decoding.stream import describe
from offload import DocumentError, TierForceError
from parallel import RankLost


def longest_prompt(engine: Engine, documents: Sequence[Document], template: Template, new: int) -> int:
    """Prompt tokens of the largest document: what the memory has to hold. Unreadable ones do not count."""
    for document in sorted(documents, key=lambda document: document.size, reverse=True):
        try:
            return len(template.fill(engine.tokenizer, document.read(), engine.context - new)[0])
        except DocumentError:
            continue
    return 1


def summarize(
    engine: Engine,
    documents: Sequence[Document],
    records: Records,
    template: Template,
    new: int,
    sampling: Sampling,
    display: Display,
) -> int:
    """Summarise, in up to `new` tokens, the documents whose ids have no finished record yet; on rank 0. Returns how many failed.

    A document that cannot be processed gets a record with `error` in place of `summary`, and the batch goes on.
    """
    failed = 0
    for document in documents:
        if document.id in records.finished:
            display.end(f"{document.id}: finished before, skipped")
            continue
        display.begin(document.id)
        try:
            record = _summary(engine, document, template, new, sampling, display)
            line = describe(engine.stats)
        except RankLost:
            raise
        except TierForceError as error:
            record = {"id": document.id, "error": str(error), "kind": type(error).__name__, "versions": versions()}
            line = f"failed: {error}"
            failed += 1
        records.append(record)
        display.end(f"{document.id}: {line}")
    return failed


def _summary(
    engine: Engine, document: Document, template: Template, new: int, sampling: Sampling, display: Display
) -> dict[str, Any]:
    prompt, dropped = template.fill(engine.tokenizer, document.read(), engine.context - new)
    if dropped:
        display.warn(f"{document.id}: longer than the context of {engine.context} tokens; the last {dropped} tokens were dropped")
    tokens = []
    for token in engine.generate(prompt, new, sampling, display.prefill):
        tokens.append(token)
        display.decode(engine.stats, new)
    return {
        "id": document.id,
        "summary": engine.tokenizer.decode(tokens, skip_special_tokens=True).strip(),
        **engine.stats.as_dict(),
        "dropped_tokens": dropped,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "ranks": engine.group.size,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of what the numbers and the text depend on."""
    found = {}
    for name in ("tierforce", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
