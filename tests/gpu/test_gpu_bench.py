"""`python -m bench gpu` runs completely in a rehearsal, and continues after a part fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from bench.gpu import day, worker
from bench.gpu.choices import Choices, Context
from bench.gpu.day import NAMES, main
from bench.gpu.models import (
    fit_context,
    load_models,
    max_prompt,
    planned_memory,
    usable_bytes,
    weight_bytes,
)
from bench.harness import process
from decoding.config.settings import Settings
from decoding.models.runtime import Runtime
from decoding.planning.hardware_profile import HardwareProfile
from offload.memory.cuda_link import CudaLink
from parallel.config.model_config import ModelConfig
from parallel.errors import ConfigError
from standin import standin
from support.engines import DEMO

ROOT = Path(__file__).parents[2]
app = typer.Typer()
app.command()(main)


def dies(context: Context) -> None:
    context.add("before", 1.0)
    os._exit(3)


def fails(_: Context) -> None:
    {}["missing"]


def frees(context: Context) -> None:
    sys.stderr = sys.__stderr__  # a fork inherits `CliRunner`'s
    link = CudaLink(context.device)
    host = link.host_empty(64, torch.float32)
    device = torch.zeros(64, device=context.device)
    link.copy([(device, host)])
    del device
    link.close()


PARTS = {
    "dies": (dies, 60),
    "fails": (fails, 60),
    "hangs": (lambda _: time.sleep(600), 1),
    "works": (lambda context: context.add("pid", os.getpid()), 60),
    "frees": (frees, 60),
}


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run parts, including `PARTS`, in forks of this process, which has already loaded torch."""
    monkeypatch.setattr(process, "_START", "fork")
    monkeypatch.setattr(day, "NAMES", [*NAMES, *PARTS])
    for name, part in PARTS.items():
        monkeypatch.setitem(worker.PARTS, name, part)


def run(output: Path, *arguments: str) -> tuple[dict[tuple[str, str], Any], str, int]:
    """Run the command in this process; return values by part and name, output, and exit code."""
    result = CliRunner().invoke(app, [*arguments, "--output", str(output)])
    if not output.exists():
        return {}, result.output, result.exit_code
    rows = json.loads(output.read_text())["rows"]
    values = {(row["part"], row["what"]): row["value"] for row in rows}
    return values, result.output, result.exit_code


@pytest.mark.slow
def test_a_rehearsal_runs_every_part(tmp_path: Path) -> None:
    """On a stand-in if there is no GPU, in a process that has not imported these tests."""
    output = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "bench", "gpu", "--rehearse", "--output", str(output)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    document = json.loads(output.read_text())
    assert document["environment"]["command"] == "python -m bench gpu --rehearse --output gpu.json"
    rows = {(row["part"], row["what"]): row["value"] for row in document["rows"]}
    assert list(dict.fromkeys(part for part, _ in rows)) == list(NAMES)
    assert not [part for part, what in rows if what == "failed"]
    assert rows["tests", "pytest -m cuda"].startswith("1 passed")
    assert rows["machine", "short forwards can be captured as CUDA graphs"] == "yes"
    for part in ("resident", "plan"):
        assert rows[part, "CUDA graphs: replayed"] > 0
        assert rows[part, "CUDA graphs: refused"] == 0
    assert rows["resident", "resident layers"] == 3
    assert rows["streamed", "resident layers"] == 0
    assert rows["streamed", "target 33: wall / max(link, compute)"] > 0
    assert rows["split", "bytes of a verification"] > 0
    assert rows["deterministic", "any number of resident layers"] == "the same bits"
    for phase in ("prefill", "forwards", "rounds"):
        peak = rows["plan", f"peak in {phase}, without weights"]
        assert 0 < peak <= rows["plan", "planned, without weights"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a stand-in")
@pytest.mark.usefixtures("forks")
def test_a_rehearsal_runs_on_a_stand_in(tmp_path: Path) -> None:
    rows, output, code = run(tmp_path / "gpu.json", "--rehearse", "--parts", "machine,resident")
    assert code == 0, output
    assert list(dict.fromkeys(part for part, _ in rows)) == ["machine", "resident"]
    assert rows["machine", "short forwards can be captured as CUDA graphs"] == "yes"
    assert rows["resident", "CUDA graphs: replayed"] > 0
    assert rows["resident", "CUDA graphs: refused"] == 0
    assert rows["resident", "resident layers"] == 3


@pytest.mark.usefixtures("forks")
def test_a_part_that_dies_fails_or_hangs_does_not_end_others(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    parts = "works,dies,fails,hangs,works,works"
    options = ["--parts", parts, "--device", "cpu", "--output", str(output)]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "parts that failed: dies, fails, hangs."
    rows = [
        (row["part"], row["what"], row["value"]) for row in json.loads(output.read_text())["rows"]
    ]
    reasons = [(part, value) for part, what, value in rows if what == "failed"]
    assert reasons[0] == ("dies", "its process exited with code 3")
    assert reasons[1][1].startswith("KeyError: 'missing'")
    assert reasons[2] == ("hangs", "killed after 1 s: the time limit was reached")
    assert ("dies", "before", 1.0) in rows
    first, second, third = (value for _, what, value in rows if what == "pid")
    assert first != second == third  # parts share a process until one fails


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a stand-in")
@pytest.mark.usefixtures("forks")
def test_a_fault_of_a_stand_in_fails_its_part(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, output, code = run(tmp_path / "gpu.json", "--rehearse", "--parts", "frees")
    assert code == 1
    assert "parts that failed: frees." in output
    assert "was freed before stream" in capfd.readouterr().err


@pytest.mark.usefixtures("forks")
def test_a_failing_part_reports_the_place_of_its_error(tmp_path: Path) -> None:
    rows, output, code = run(
        tmp_path / "gpu.json",
        *("--device", "cpu", "--target", str(tmp_path), "--parts", "streamed,machine"),
    )
    assert code == 1
    assert "has no config.json" in rows["streamed", "failed"]
    assert "(parallel/" in rows["streamed", "failed"]
    assert rows["machine", "device"] == "cpu"
    assert "parts that failed: streamed." in output.splitlines()


def test_no_part_starts_after_the_time_limit(tmp_path: Path) -> None:
    rows, _, code = run(tmp_path / "gpu.json", "--limit", "0", "--parts", "pin,tests")
    assert code == 1
    assert {part for part, what in rows if what == "failed"} == {"pin", "tests"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parts", "pin,nothing"), "--parts nothing: use some of machine,pin,link"),
        (("--mode", "fast"), "--mode fast: use one of hierarchical, retrieval"),
    ],
)
def test_unknown_names_are_rejected(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    _, output, code = run(tmp_path / "gpu.json", *arguments)
    assert code == 1
    assert message in output
    assert output.count("\n") == 1


@pytest.mark.usefixtures("forks")
@pytest.mark.slow
def test_forwards_on_a_cpu_wait_for_an_emulated_link(tmp_path: Path) -> None:
    rows, output, code = run(
        tmp_path / "gpu.json",
        *("--target", "tiny", "--parts", "machine,link,plan", "--gpu-kv-layers", "1"),
        *("--context", "400"),
        # small: a CPU's device memory is host memory
        *("--device", "cpu", "--device-memory", "1", "--link", "emulated:1"),
    )
    assert code == 0, output
    assert rows["machine", "short forwards can be captured as CUDA graphs"] == "no"
    assert rows["plan", "CUDA graphs: replayed"] == 0
    assert rows["plan", "resident layers"] == 1
    assert 0 < rows["link", "131,072 KiB, pinned host to device"] <= 1.1
    for name in ("target 1", "target 17", "target 33", "target 33 refresh"):
        assert 0 < rows["plan", f"{name}: share of the copy rate"] <= 1.1
    assert rows["plan", "tokens per verification (meaningless with random weights)"] >= 1


@pytest.mark.usefixtures("forks")
@pytest.mark.slow
def test_a_verification_copies_the_same_without_a_retrieval_cache(tmp_path: Path) -> None:
    """Except for some of the last tokens. Also tests that the output folder is created."""
    copied = list[float]()
    for mode in ("plain", "hierarchical"):
        rows, output, code = run(
            tmp_path / "results" / mode / "gpu.json",
            *("--target", "tiny", "--parts", "streamed", "--mode", mode, "--context", "600"),
            *("--device", "cpu", "--link", "emulated:20"),
        )
        assert code == 0, output
        copied.append(rows["streamed", "bytes of a verification"])
    assert copied[0] == pytest.approx(copied[1], rel=0.1)


def test_a_prompt_leaves_room_within_the_context() -> None:
    config = replace(ModelConfig.from_pretrained(DEMO / "target"), dense_positions=8192)
    assert max_prompt(config) == 8192 - 1024
    with pytest.raises(ConfigError, match="a context of 1,024 tokens, and new tokens need"):
        max_prompt(replace(config, dense_positions=1024))


@pytest.mark.usefixtures("forks")
def test_a_named_model_runs_on_real_text_without_a_draft(tmp_path: Path) -> None:
    rows, output, code = run(
        tmp_path / "gpu.json",
        *("--target", str(DEMO / "target"), "--parts", "resident"),
        *("--context", "600", "--device", "cpu", "--mode", "retrieval", "--no-int8"),
    )
    assert code == 0, output
    assert rows["resident", "retrieval 2"] > 0
    assert ("resident", "draft 1") not in rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a stand-in")
def test_a_larger_gpu_makes_the_plan_of_a_4090() -> None:
    assert usable_bytes(24) == HardwareProfile.from_name("1x4090").device_memory

    def planned(memory: int, emulates: bool) -> int:
        with standin(memory=memory), torch.inference_mode():
            context = Context(Choices(target="tiny"), lambda *_: None)
            weights = weight_bytes(context)
            limit = planned_memory(24, weights) if emulates else None
            target, draft, _ = load_models(context.choices, context.group)
            settings = Settings(mode="hierarchical", device_memory=limit)
            runtime = Runtime.create(target, draft, "hierarchical", settings)
            runtime.link.close()
            return runtime.memory().device

    # the weights' allocations are rounded up by some kilobytes
    assert planned(80 << 30, True) == pytest.approx(planned(int(25.2e9), False), abs=1 << 16)


def test_the_context_is_limited_by_free_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_pretrained(DEMO / "target")
    layout = config.kv_layout(1, torch.bfloat16)
    monkeypatch.setattr("bench.gpu.models.host_available", lambda: 10 * 1024 * layout.bytes(1))
    assert fit_context(config, torch.bfloat16, 100_000) == 9 * 1024
    assert fit_context(config, torch.bfloat16, 2_000) == 2_000
