"""A job over two ranks that is killed again and again: in the end every document has one record.

The launcher, rank 0 or rank 1 gets SIGKILL, SIGTERM or SIGINT while a prompt is read, while text is
written, or the moment a record reaches the file; then the same command resumes the job. In full: 60
kills, some 10 minutes.
"""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from support.commands import MODELS, STEADY, TARGET, Fork, forked, records, wait_for
from support.prompts import passages

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
VICTIMS = ("launcher", "rank 0", "rank 1")
MOMENTS = ("reading", "writing", "record")
STARTED = re.compile(r"context [\d,]+")  # the line that says what runs where
END_S = 90.0  # a job that takes longer to end hangs
Kind = tuple[signal.Signals, str, str]


@dataclass(frozen=True)
class Batch:
    """The command, and what its records say where nothing is killed."""

    arguments: list[str]
    folder: Path
    summaries: dict[str, str]
    reading_s: float
    writing_s: float

    @classmethod
    def run(cls, arguments: list[str], folder: Path) -> Batch:
        """Run it once without interruption."""
        output = folder / "whole.jsonl"
        done = forked(folder / "whole", *arguments, "--output", str(output))
        assert done.code == 0, done.err
        made = records(output)
        return cls(
            arguments,
            folder,
            {record["id"]: record["summary"] for record in made},
            min(record["time_to_first_token_s"] for record in made),
            min(record["decode_s"] for record in made),
        )

    def start(self, output: Path) -> Fork:
        """Start the job, or resume it."""
        return Fork(self.folder / "job", *self.arguments, "--output", str(output))

    def finished(self, output: Path) -> set[str]:
        """Return the documents with a record, each of which is there once and as it should be."""
        *lines, _ = output.read_bytes().split(b"\n") if output.exists() else [b""]
        made = [json.loads(line) for line in lines]
        summaries = {record["id"]: record.get("summary") for record in made}
        assert len(summaries) == len(made), "a document has two records"
        assert summaries.items() <= self.summaries.items(), made
        return set(summaries)


def strike(job: Fork, batch: Batch, output: Path, kind: Kind, chance: random.Random) -> bool:
    """Send the signal at its moment; return False where the job had ended before."""
    number, victim, moment = kind
    said = job.folder / "err"
    wait_for(lambda: job.has_ended() or (said.exists() and STARTED.search(said.read_text())))
    if moment == "record":
        before = _size(output)
        while _size(output) == before and not job.has_ended():
            time.sleep(0.0005)
    elif moment == "reading":
        time.sleep(chance.uniform(0, batch.reading_s))
    else:
        time.sleep(batch.reading_s + chance.uniform(0, batch.writing_s))
    with suppress(psutil.Error):
        launcher = psutil.Process(job.process.pid)
        struck = launcher if victim == "launcher" else job.rank(int(victim[-1]))
        if struck is not None and not job.has_ended():
            struck.send_signal(number)
            return True
    return False


def kill_once(batch: Batch, output: Path, kind: Kind, chance: random.Random) -> dict[str, Any]:
    """Start or resume a job and strike it; return what happened, {} where it ended before."""
    # the documents before it starts, too: starting repairs the file
    before = batch.finished(output)
    job = batch.start(output)
    try:
        was_struck = strike(job, batch, output, kind, chance)
        before |= batch.finished(output)
        since = time.monotonic()
        done = job.wait(END_S)
        wait_for(lambda: not job.processes())
    finally:
        for process in job.processes():
            process.kill()
    took = time.monotonic() - since
    assert "Traceback" not in done.err
    lost = before - batch.finished(output)
    assert not lost, f"{kind}: records of {lost} are lost"
    if not was_struck:
        assert done.code == 0, done.err
        return {}
    return {"signal": kind[0].name, "victim": kind[1], "exit_code": done.code, "s_to_end": took}


def by_kind(kills: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per signal and victim."""
    rows = []
    for kind in sorted({(kill["signal"], kill["victim"]) for kill in kills}):
        same = [kill for kill in kills if (kill["signal"], kill["victim"]) == kind]
        row = {
            "signal": kind[0],
            "victim": kind[1],
            "kills": len(same),
            "exit_codes": ", ".join(sorted({str(kill["exit_code"]) for kill in same})),
            "max_s_to_end": max(kill["s_to_end"] for kill in same),
        }
        rows.append(row)
    return rows


@pytest.mark.slow
def test_every_document_has_one_record_after_any_kill(
    tmp_path: Path, full: bool, text: Path | None, record: Callable[..., None]
) -> None:
    wanted, documents, tokens, new = (60, 4, 4096, 96) if full else (2, 2, 1000, 32)
    chance = random.Random(0)
    kinds = list(product(SIGNALS, VICTIMS, MOMENTS))
    chance.shuffle(kinds)
    folder = tmp_path / "documents"
    folder.mkdir()
    tokenizer: Any = AutoTokenizer.from_pretrained(TARGET, trust_remote_code=False)
    for number, passage in enumerate(passages(text, tokenizer, [tokens] * documents)):
        (folder / f"{number}.txt").write_text(passage, encoding="utf-8")
    batch = Batch.run(
        [
            *("summarize", *MODELS, *STEADY, "--gpus", "2"),
            *("--max-new-tokens", str(new), "--input", str(folder)),
        ],
        tmp_path,
    )
    kills, jobs = list[dict[str, Any]](), 0
    while len(kills) < wanted:
        output = tmp_path / f"{jobs}.jsonl"
        if kill := kill_once(batch, output, kinds[len(kills) % len(kinds)], chance):
            kills.append(kill)
        jobs += len(batch.finished(output)) == documents
    batch.start(tmp_path / f"{jobs}.jsonl").finish()
    for number in range(jobs + 1):
        assert batch.finished(tmp_path / f"{number}.jsonl") == batch.summaries.keys()
    record("kills", f"{len(kills)} kills over {jobs + 1} jobs", by_kind(kills))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
