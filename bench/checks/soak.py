"""Hundreds of documents in one job: what every rank holds after fifty, and after the last.

What it holds between documents must not grow. The most that it held while it read and wrote them
is told beside it: that goes by the budgets and draft lengths of these documents, too.
Every tenth document is broken: empty, binary, not UTF-8, or longer than the context.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Annotated, Any

import psutil
import typer
from transformers import AutoTokenizer

from bench.harness.options import NewTokens, Output, Text
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

_POLL_S = 0.02
_EVERY = 10  # documents, of which the last is broken
_GROWTH = 1.02  # of resident memory, at most
_KINDS = ("empty", "binary", "not UTF-8", "too long")


@dataclass(frozen=True)
class Row:
    """What a rank held in ten documents early in the job, and in its last ten."""

    rank: int
    early_mb: float  # the least: between documents
    late_mb: float
    early_most_mb: float
    late_most_mb: float
    early_files: int
    late_files: int
    early_threads: int
    late_threads: int

    @property
    def held(self) -> bool:
        """Whether it has not grown."""
        return (
            self.late_mb <= _GROWTH * self.early_mb
            and self.late_files <= self.early_files
            and self.late_threads <= self.early_threads
        )


@dataclass(frozen=True)
class Held:
    """What one rank held in a stretch of the job.

    Files and threads are medians: a file is open for a moment now and then, and a leak is there to
    stay.
    """

    least_mb: float
    most_mb: float
    files: int
    threads: int


class Stretch:
    """What was seen of each rank in a stretch of the job."""

    def __init__(self) -> None:
        self._seen: dict[int, list[tuple[int, int, int]]] = {}

    def look(self, ranks: dict[int, psutil.Process]) -> None:
        """Add how the ranks are now."""
        for rank, process in ranks.items():
            with suppress(psutil.Error):
                now = (process.memory_info().rss, process.num_fds(), process.num_threads())
                if now[0]:  # else it has ended
                    self._seen.setdefault(rank, []).append(now)

    def held(self) -> dict[int, Held]:
        """Return what each rank held."""
        held = {}
        for rank, seen in sorted(self._seen.items()):
            memory, files, threads = zip(*seen, strict=True)
            least, most = min(memory) / 1e6, max(memory) / 1e6
            held[rank] = Held(least, most, median_high(files), median_high(threads))
        return held


def write_documents(folder: Path, count: int, texts: list[str], too_long: str) -> Counter[str]:
    """Write so many documents, of which every tenth is broken; return how many of each kind."""
    kinds: Counter[str] = Counter()
    for number in range(1, count + 1):
        path = folder / f"{number:05}.txt"
        text = texts[number % len(texts)]
        kind = "whole"
        if number % _EVERY == 0:
            kind = _KINDS[number // _EVERY % len(_KINDS)]
        kinds[kind] += 1
        contents = {
            "whole": text.encode(),
            "empty": b"",
            "binary": b"\x00\x01" + text[:1000].encode(),
            "not UTF-8": "Müller, ".encode("latin1") + text[:1000].encode(),
            "too long": too_long.encode(),
        }
        path.write_bytes(contents[kind])
    return kinds


def watch(job: Summarizing, count: int, early: int) -> tuple[Stretch, Stretch]:
    """Look at the ranks until the job ends; return the two stretches."""
    first, last = Stretch(), Stretch()
    ranks: dict[int, psutil.Process] = {}
    done, size, told = 0, 0, 0
    while job.process.poll() is None:
        if job.output.exists() and (now := job.output.stat().st_size) != size:
            size, done = now, len(whole_records(job.output))
            ranks = ranks if len(ranks) > 1 else job.ranks()
        if early - _EVERY <= done < early:
            first.look(ranks)
        elif count - _EVERY <= done < count:  # behind the last one they end
            last.look(ranks)
        if done // 50 > told:
            told = done // 50
            say(f"{done} of {count} documents")
        time.sleep(_POLL_S)
    return first, last


def complaints(records: list[dict[str, Any]], count: int, kinds: Counter[str]) -> list[str]:
    """Return what is wrong with the records of a job, in words."""
    wrong = []
    ids = Counter(record["id"] for record in records)
    if len(ids) != count or set(ids.values()) != {1}:
        wrong.append(
            f"{len(ids)} of {count} documents have records, {max(ids.values(), default=0)} at most"
        )
    failed = sum("error" in record for record in records)
    if failed != (broken := kinds["empty"] + kinds["binary"] + kinds["not UTF-8"]):
        wrong.append(f"{failed} records tell an error, but {broken} documents are broken")
    cut = sum(record.get("dropped_tokens", 0) > 0 for record in records)
    if cut != kinds["too long"]:
        wrong.append(f"{cut} documents were cut, but {kinds['too long']} are too long")
    return wrong


@benchmark
def main(
    target: Target = TARGET,
    draft: Draft = DRAFT,
    text: Text = None,
    documents: Annotated[int, typer.Option(help="How many.")] = 500,
    early: Annotated[int, typer.Option(help="Documents after which memory is settled.")] = 50,
    at_once: Annotated[
        int, typer.Option(help="Texts at once; of several it goes by chance which meet.")
    ] = 1,
    longest: Annotated[int, typer.Option(help="Tokens; the shortest have an eighth.")] = 8192,
    new_tokens: NewTokens = 32,
    output: Output = Path("results/soak.json"),
) -> None:
    """Summarise a folder over two ranks, and compare what they hold early and late."""
    if not _EVERY <= early <= documents - _EVERY:
        raise TierForceError(
            f"--early {early} must be at least {_EVERY}, and {_EVERY} less than --documents."
        )
    prepare(0)
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    # nine lengths, so that ten documents are of all of them
    lengths = [longest * step // 9 for step in range(1, _EVERY)]
    with tempfile.TemporaryDirectory(prefix="tierforce-soak-") as place:
        folder = Path(place) / "documents"
        folder.mkdir()
        *texts, too_long = pieces_of_text(text, tokenizer, [*lengths, 2 * longest])
        kinds = write_documents(folder, documents, texts, too_long)
        sizes = [
            "--texts-at-once",
            str(at_once),
            "--context",
            str(longest * 5 // 4),
            "--max-new-tokens",
            str(new_tokens),
        ]
        job = Summarizing(
            [*on_two_ranks(target, draft), *sizes, "--input", str(folder)],
            Path(place) / "out.jsonl",
            Path(place) / "log",
        )
        first, last = watch(job, documents, early)
        code = job.wait(60)
        wrong = complaints(whole_records(job.output), documents, kinds)
        if code != 1:  # which says that some have failed
            wrong.append(f"exit code {code}: {job.said()[-300:]}")
    rows = [
        Row(
            rank,
            then.least_mb,
            now.least_mb,
            then.most_mb,
            now.most_mb,
            then.files,
            now.files,
            then.threads,
            now.threads,
        )
        for rank, then in first.held().items()
        if (now := last.held().get(rank))
    ]
    if len(rows) != 2 or not all(row.held for row in rows):
        wrong.append("a rank holds more than it did early in the job, or was not seen")
    conclude(output, f"{documents} documents", rows, wrong, kinds=kinds)
