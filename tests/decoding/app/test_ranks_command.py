"""Two ranks that cannot start print one line, whichever fails or is slower; no process is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil

from support.commands import DRAFT, MODELS, TORCHRUN, Fork, forked, records, refused, variant

GENERATE = ("generate", "--prompt", "It was", "--gpus", "2")


def summarize(folder: Path, *more: str) -> tuple[str, ...]:
    (folder / "a.txt").write_text("It was. " * 2000)
    return "summarize", *MODELS, "--gpus", "2", "--input", str(folder / "a.txt"), *more


def test_error_on_all_ranks_is_one_line(tmp_path: Path) -> None:
    model = variant(
        tmp_path / "model", edit=lambda tensors: tensors.pop("model.layers.3.mlp.up_proj.weight")
    )
    line = refused(forked(tmp_path, *GENERATE, *model))
    assert "model.layers.3.mlp.up_proj.weight is missing" in line


def test_more_ranks_than_heads_is_an_error(tmp_path: Path) -> None:
    model = variant(
        tmp_path / "model", hidden_size=192, num_attention_heads=3, num_key_value_heads=1
    )
    line = refused(forked(tmp_path, *GENERATE, *model))
    assert "1 key/value heads cannot be split over 2 ranks" in line


def test_error_on_rank_0_alone_is_one_line(tmp_path: Path) -> None:
    output = tmp_path / "missing/out.jsonl"
    line = refused(forked(tmp_path, *summarize(tmp_path, "--output", str(output))))
    assert "--output" in line
    assert "No such file or directory" in line


def test_error_on_rank_1_alone_is_recorded(tmp_path: Path) -> None:
    command = summarize(tmp_path, "--output", str(tmp_path / "out.jsonl"))
    result = forked(tmp_path, *command, before=_little_memory_on_rank_1)
    assert result.code == 1
    (record,) = records(tmp_path / "out.jsonl")
    line = record["error"]
    assert line in result.err
    assert "GB of device memory" in line
    assert "0.004 GB are available" in line  # 90% of half of it


def _little_memory_on_rank_1() -> None:
    if os.environ.get("RANK") == "1":
        memory = psutil.virtual_memory()
        psutil.virtual_memory = lambda: memory._replace(available=10_000_000)


def test_error_before_rendezvous_is_reported_by_rank_0(tmp_path: Path) -> None:
    line = refused(
        forked(tmp_path, *GENERATE, *MODELS, "--device", "abacus", before=_slow_start_of_rank_0)
    )
    assert "abacus" in line


def _slow_start_of_rank_0() -> None:
    if os.environ.get("RANK") == "0":
        time.sleep(3)


def test_error_under_torchrun_is_one_line(tmp_path: Path) -> None:
    variant(tmp_path / "draft", DRAFT, vocab_size=2000)
    options = ("--draft", str(tmp_path / "draft"))
    result = Fork(tmp_path, *GENERATE, *MODELS, *options, command=TORCHRUN).finish()
    assert result.code == 1
    # torchrun's own report follows our line
    line, _, report = result.err.partition("Traceback")
    assert "decoding.cli FAILED" in report
    assert line.count("tierforce: ") == 1
    assert "config.json implies (2000, 128)" in line
    assert "tierforce: " not in report


def test_ranks_exit_when_launcher_is_killed(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    job = Fork(
        tmp_path, *summarize(tmp_path, "--output", str(output), "--max-new-tokens", "100000")
    )
    job.wait_for(lambda: job.rank(0) and job.rank(1) and output.exists())
    ranks = [rank for number in (0, 1) if (rank := job.rank(number)) is not None]
    job.send_signal(signal.SIGKILL)
    gone, alive = psutil.wait_procs(ranks, timeout=20)
    assert (len(gone), alive) == (2, [])


def test_job_exits_despite_a_stopped_rank(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    job = Fork(
        tmp_path, *summarize(tmp_path, "--output", str(output), "--max-new-tokens", "100000")
    )
    job.wait_for(lambda: job.rank(1) and output.exists())
    rank = job.rank(1)
    assert rank is not None
    rank.suspend()
    job.send_signal(signal.SIGINT)
    assert job.finish(20).code == 130  # torch's launcher kills what does not end after 30 s
