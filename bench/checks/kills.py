"""A job that is killed again and again, each time gone on with: every document once in the end.

Launcher, rank 0 or rank 1 gets SIGKILL, SIGTERM or SIGINT while a prompt is read, while text is
written, or the moment that a record reaches the file.
"""

from __future__ import annotations

import random
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from transformers import AutoTokenizer

from bench.harness.options import Output, Text
from bench.harness.record import benchmark, prepare
from bench.harness.summarizing import (
    DRAFT,
    TARGET,
    Draft,
    Summarizing,
    Target,
    conclude,
    on_two_ranks,
    pieces_of_text,
    whole_records,
)
from bench.harness.tables import say
from offload.errors import TierForceError

_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_VICTIMS = ("launcher", "rank 0", "rank 1")
_MOMENTS = ("reading", "writing", "record")
_BEGUN = re.compile(r"context [\d,]+")  # the line that says what runs where
_END_S = 90.0  # after which a job that was to end hangs


@dataclass
class Row:
    """What kills of one kind came to."""

    signal: str
    victim: str
    kills: int = 0
    exit_codes: str = ""
    max_s_to_end: float = 0.0
    lost: int = 0  # records that were whole before


@dataclass(frozen=True)
class Batch:
    """The documents, how they are to be summarised, and what comes of them uninterrupted."""

    arguments: list[str]
    place: Path
    texts: dict[str, str]
    reading_s: float
    writing_s: float

    @classmethod
    def make(cls, arguments: list[str], place: Path) -> Batch:
        """Summarise them once. Raises TierForceError where that fails."""
        job = Summarizing(arguments, place / "whole.jsonl", place / "log")
        if job.wait(600):
            raise TierForceError(f"the job fails without any kill: {job.said()[-300:]}")
        records = whole_records(job.output)
        return cls(
            arguments,
            place,
            {record["id"]: record["summary"] for record in records},
            min(record["time_to_first_token_s"] for record in records),
            min(record["decode_s"] for record in records),
        )

    def start(self, output: Path) -> Summarizing:
        """Begin, or go on with, a job."""
        return Summarizing(self.arguments, output, self.place / "log")

    def complaints(self, output: Path) -> list[str]:
        """Return what is wrong with the records so far: none may be there twice, or differ."""
        wrong, seen = [], set[str]()
        for record in whole_records(output):
            name = record["id"]
            if name in seen:
                wrong.append(f"{name} has two records")
            if record.get("summary") != self.texts[name]:
                wrong.append(f"{name} has another text, or an error: {record.get('error')}")
            seen.add(name)
        return wrong


def strike(
    job: Summarizing, batch: Batch, kind: tuple[signal.Signals, str, str], chance: random.Random
) -> bool:
    """Wait for the moment, and send the signal; tell whether it came to that."""
    number, victim, moment = kind
    until = time.monotonic() + _END_S
    while not _BEGUN.search(job.said()):
        if job.process.poll() is not None or time.monotonic() > until:
            return False
        time.sleep(0.01)
    ranks = job.ranks()
    if moment == "record":
        before = _size(job.output)
        while _size(job.output) == before and job.process.poll() is None:
            if time.monotonic() > until:
                return False
            time.sleep(0.0005)
    elif moment == "reading":
        time.sleep(chance.uniform(0, batch.reading_s))
    else:
        time.sleep(batch.reading_s + chance.uniform(0, batch.writing_s))
    struck = job.process if victim == "launcher" else ranks.get(int(victim[-1]))
    if struck is None or job.process.poll() is not None:
        return False
    with suppress(psutil.Error):
        struck.send_signal(number)
        return True
    return False


def once(
    batch: Batch, output: Path, kind: tuple[signal.Signals, str, str], chance: random.Random
) -> tuple[Row | None, list[str]]:
    """Begin or go on with a job and strike it. Return what came of it, and what is wrong."""
    before = _finished(output)  # which the job repairs when it starts
    job = batch.start(output)
    struck = strike(job, batch, kind, chance)
    before |= _finished(output)
    since = time.monotonic()
    code = job.wait(_END_S)
    wrong = batch.complaints(output)
    if code is None:
        wrong.append(f"{kind[0].name} to {kind[1]}: the job hung; {job.said()[-300:]}")
    if "Traceback" in job.said():
        wrong.append(f"{kind[0].name} to {kind[1]}: a traceback")
    if not struck:
        if code:
            wrong.append(f"a job that nobody struck ended with {code}: {job.said()[-300:]}")
        return None, wrong
    lost = len(before - _finished(output))
    took = time.monotonic() - since
    return Row(kind[0].name, kind[1], 1, str(code), took, lost), wrong


def _finished(output: Path) -> set[str]:
    return {record["id"] for record in whole_records(output)}


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def summed(rows: Sequence[Row]) -> list[Row]:
    """Return a row for every signal and victim."""
    kinds: dict[tuple[str, str], Row] = {}
    for row in rows:
        kind = kinds.setdefault((row.signal, row.victim), Row(row.signal, row.victim))
        kind.kills += row.kills
        codes = {*filter(None, kind.exit_codes.split(", ")), row.exit_codes}
        kind.exit_codes = ", ".join(sorted(codes))
        kind.max_s_to_end = max(kind.max_s_to_end, row.max_s_to_end)
        kind.lost += row.lost
    return [kinds[kind] for kind in sorted(kinds)]


@benchmark
def main(
    target: Target = TARGET,
    draft: Draft = DRAFT,
    text: Text = None,
    kills: Annotated[int, typer.Option(help="How many.")] = 60,
    documents: Annotated[int, typer.Option(help="Of a job.")] = 4,
    tokens: Annotated[int, typer.Option(help="Of a document.")] = 4096,
    new_tokens: Annotated[int, typer.Option(help="To write for each.")] = 96,
    seed: Annotated[int, typer.Option(help="Of order and moments.")] = 0,
    output: Output = Path("results/kills.json"),
) -> None:
    """Kill a job of two ranks, go on with it, and look at its records each time."""
    prepare(0)
    chance = random.Random(seed)
    every = list(product(_SIGNALS, _VICTIMS, _MOMENTS))
    chance.shuffle(every)
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    rows, wrong, jobs = list[Row](), list[str](), 0
    with tempfile.TemporaryDirectory(prefix="tierforce-kills-") as name:
        place = Path(name)
        (place / "documents").mkdir()
        for number, piece in enumerate(pieces_of_text(text, tokenizer, [tokens] * documents)):
            (place / f"documents/{number}.txt").write_text(piece, encoding="utf-8")
        batch = Batch.make(
            [
                *on_two_ranks(target, draft),
                *("--dtype", "float32", "--temperature", "0"),
                *("--max-new-tokens", str(new_tokens), "--input", str(place / "documents")),
            ],
            place,
        )
        while len(rows) < kills and not wrong:
            kind: Any = every[len(rows) % len(every)]
            row, wrong = once(batch, place / f"{jobs}.jsonl", kind, chance)
            if row is not None:
                rows.append(row)
                say(f"kill {len(rows)} of {kills}: {row.signal} to {row.victim} while {kind[2]}")
            if len(whole_records(place / f"{jobs}.jsonl")) == documents:
                jobs += 1
        if not wrong:
            batch.start(place / f"{jobs}.jsonl").wait(600)
        for number in range(jobs + 1):
            wrong += batch.complaints(place / f"{number}.jsonl")
            if len(whole_records(place / f"{number}.jsonl")) != documents:
                wrong.append(f"job {number} has not all of its {documents} records")
    wrong += [f"{row.lost} records lost by {row.signal}" for row in rows if row.lost]
    conclude(output, f"{len(rows)} kills over {jobs + 1} jobs", summed(rows), wrong)
