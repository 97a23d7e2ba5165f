"""A long job over two ranks: what each rank holds between documents does not grow.

Every tenth document is broken: empty, binary, not UTF-8, or longer than the context. The largest
resident size while documents are processed is recorded too; it depends on their budgets and draft
lengths, so it is not asserted. In full: 500 documents, half an hour.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from support.commands import MODELS, TARGET, Fork, lines, records
from support.prompts import passages

BROKEN = ("empty", "binary", "not UTF-8", "too long")


@dataclass(frozen=True)
class Size:
    """How many documents, after how many memory has settled, tokens, and the growth allowed."""

    documents: int
    early: int
    longest: int
    new: int
    growth: float


SHORT = Size(documents=40, early=20, longest=400, new=8, growth=1.25)  # it has not settled by then
FULL = Size(documents=500, early=50, longest=8192, new=32, growth=1.02)


def write_documents(folder: Path, count: int, texts: list[str], too_long: str) -> Counter[str]:
    """Write documents of which every tenth is broken; return how many there are of each kind."""
    kinds: Counter[str] = Counter()
    for number in range(1, count + 1):
        text = texts[number % len(texts)]
        kind = BROKEN[number // 10 % len(BROKEN)] if number % 10 == 0 else "whole"
        kinds[kind] += 1
        contents = {
            "whole": text.encode(),
            "empty": b"",
            "binary": b"\x00\x01" + text[:1000].encode(),
            "not UTF-8": "Müller, ".encode("latin1") + text[:1000].encode(),
            "too long": too_long.encode(),
        }
        (folder / f"{number:05}.txt").write_bytes(contents[kind])
    return kinds


def watch(job: Fork, output: Path, size: Size) -> dict[int, dict[str, float]]:
    """Sample both ranks until the job ends: ten documents before `early`, and the last ten.

    Returns by rank the least and the largest resident size, and the median numbers of open files
    and threads: a file may be open for a moment, but a leak stays.
    """
    seen: dict[tuple[int, str], list[tuple[int, int, int]]] = {}
    job.wait_for(lambda: job.rank(0) and job.rank(1))
    ranks = {number: job.rank(number) for number in (0, 1)}
    while not job.has_ended():
        done = lines(output)
        when = {size.early // 10 - 1: "early", size.documents // 10 - 1: "deferred"}.get(done // 10)
        for rank, process in ranks.items() if when and done < size.documents else ():
            with suppress(psutil.Error):
                now = (process.memory_info().rss, process.num_fds(), process.num_threads())
                if now[0]:  # a process that has ended has none
                    seen.setdefault((rank, when), []).append(now)
        time.sleep(0.02)
    held: dict[int, dict[str, float]] = {0: {}, 1: {}}
    for (rank, when), samples in seen.items():
        memory, files, threads = zip(*samples, strict=True)
        held[rank] |= {
            f"{when}_mb": min(memory) / 1e6,
            f"{when}_most_mb": max(memory) / 1e6,
            f"{when}_files": median_high(files),
            f"{when}_threads": median_high(threads),
        }
    return held


@pytest.mark.slow
def test_ranks_hold_no_more_late_in_a_job_than_early(
    tmp_path: Path, full: bool, text: Path | None, record: Callable[..., None]
) -> None:
    size = FULL if full else SHORT
    folder, output = tmp_path / "documents", tmp_path / "out.jsonl"
    folder.mkdir()
    tokenizer: Any = AutoTokenizer.from_pretrained(TARGET, trust_remote_code=False)
    lengths = [size.longest * step // 9 for step in range(1, 10)]  # ten documents have all of them
    *texts, too_long = passages(text, tokenizer, [*lengths, 2 * size.longest])
    kinds = write_documents(folder, size.documents, texts, too_long)
    job = Fork(
        tmp_path / "job",
        *("summarize", *MODELS, "--gpus", "2", "--input", str(folder), "--output", str(output)),
        *("--context", str(size.longest * 5 // 4), "--max-new-tokens", str(size.new)),
    )
    try:
        held = watch(job, output, size)
    finally:
        finished = job.finish()
    rows = [{"rank": rank, **each} for rank, each in held.items()]
    record("soak", f"{size.documents} documents", rows, kinds=kinds)

    assert finished.code == 1, finished.err  # some documents fail
    made = records(output)
    assert len({each["id"] for each in made}) == len(made) == size.documents
    broken = kinds["empty"] + kinds["binary"] + kinds["not UTF-8"]
    assert sum("error" in each for each in made) == broken
    assert sum(each.get("truncated_tokens", 0) > 0 for each in made) == kinds["too long"]
    for row in rows:
        assert 100 < row["early_mb"] <= row["early_most_mb"]
        assert 100 < row["late_mb"] <= row["late_most_mb"]
        assert row["late_mb"] <= size.growth * row["early_mb"]
        assert row["late_files"] <= row["early_files"]
        assert row["late_threads"] <= row["early_threads"]
