"""`plan` for the models that owners of 24 GB cards have, as published, in 4 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.commands import forked
from support.gguf_headers import PUBLISHED
from support.slow import slow_except

Range = tuple[float, float]


class Job(NamedTuple):
    """A model's job, and its row: ranges of what is predicted."""

    model: str
    hardware: str
    context: int
    weights_gb: Range  # per GPU
    host_gb: Range  # per GPU
    prefill_s: Range
    token_ms: Range
    bounds: tuple[str, str]  # those of prefill, and of a verification
    options: tuple[str, ...] = ()


OVER_LINK = ("arithmetic", "link")
ONE, TWO = "1x4090", "2x4090"
JOBS = [
    Job("Qwen3.8-27B", ONE, 262_144, (17, 18.5), (17, 21), (150, 250), (50, 110), OVER_LINK),
    Job("Gemma-3-27B", ONE, 131_072, (17, 18.5), (12, 16), (45, 80), (35, 75), OVER_LINK),
    Job(
        "gpt-oss-20b",
        ONE,
        131_072,
        (11.5, 13),
        (0, 0.5),
        (15, 30),
        (4, 10),
        ("arithmetic", "compute"),
    ),
    Job(
        "Qwen3-32B",
        ONE,
        131_072,
        (20.5, 22),
        (30, 38),
        (150, 240),
        (220, 400),
        OVER_LINK,
        ("--rope", "yarn:4"),
    ),
    Job("GLM-4.7-Flash", ONE, 131_072, (18.5, 19.8), (4, 6.5), (72, 120), (10, 30), OVER_LINK),
    Job(
        "Nemotron-3-Nano",
        TWO,
        131_072,
        (11.5, 13.5),
        (0, 1),
        (6, 14),
        (4, 10),
        ("arithmetic", "compute"),
    ),
    Job("Seed-OSS-36B", TWO, 524_288, (11, 13), (45, 56), (1100, 1900), (70, 150), OVER_LINK),
]


@pytest.mark.parametrize(
    "job",
    slow_except([pytest.param(job) for job in JOBS], 0, -1),
    ids=lambda job: f"{job.model}-{job.hardware}",
)
def test_rows(job: Job, tmp_path: Path) -> None:
    path = PUBLISHED[job.model].write(tmp_path / "model.gguf")
    options = ["--hardware", job.hardware, "--context", str(job.context), *job.options, "--json"]
    done = forked(tmp_path, "plan", "--model", str(path), *options)
    assert done.code == 0, done.err
    row: dict[str, Any] = json.loads(done.out)
    memory, forecast = row["memory"], row["forecast"]
    found = {
        "weights_gb": memory["device in prefill"]["weights"] / 1e9,
        "host_gb": memory["host"] / 1e9,
        "prefill_s": forecast["prefill_s"],
        "token_ms": forecast["token_s"] * 1e3,
    }
    for name, value in found.items():
        low, high = getattr(job, name)
        assert low <= value <= high, (name, found)
    assert (forecast["prefill_bound"], forecast["verification_bound"]) == job.bounds
    assert row["job"]["prompt"] + row["job"]["new"] == job.context
