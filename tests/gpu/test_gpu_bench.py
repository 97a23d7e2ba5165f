"""`python -m bench gpu` runs whole with tiny dimensions, on a CPU and on a GPU or a stand-in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from bench.gpu import context_that_fits, main
from parallel.config import ModelConfig
from support.engines import DEMO

app = typer.Typer()
app.command()(main)


def test_every_part_is_run_and_kept(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    arguments = [
        *("--target", "tiny", "--context", "1024", "--budget", "256", "--no-tests"),
        # small, for a CPU's device memory is taken from the host's
        *("--device", "cpu", "--device-memory", "1"),
        *("--link", "emulated:1", "--resident-layers", "1", "--output", str(output)),
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    rows = {
        (row["part"], row["what"]): row["value"] for row in json.loads(output.read_text())["rows"]
    }
    parts = {"device", "link", "slices", "identical", "prefill", "passes", "rounds"}
    assert {part for part, _ in rows} == parts
    assert rows["device", "short passes can be recorded as CUDA graphs"] == "no"
    assert rows["rounds", "kinds of short passes: replayed"] == 0
    assert rows["prefill", "resident layers"] == 1
    assert 0 < rows["link", "pinned host to device"] <= 1.1
    for name in ("target 1", "target 17", "target 33", "target 33 refresh"):
        assert 0 < rows["passes", f"{name}: share of the copy rate"] <= 1.1
    assert rows["rounds", "tokens per verification (drawn weights say nothing)"] >= 1


@pytest.fixture
def whole_memory(gpu: object) -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.cuda
@pytest.mark.usefixtures("whole_memory")
def test_every_part_runs_on_a_gpu_with_short_passes_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # too large for a stand-in
    monkeypatch.setattr("bench.gpu.matmul_rate", lambda device, dtype: 1e12)
    output = tmp_path / "gpu.json"
    arguments = [
        *("--target", "tiny", "--context", "1024", "--budget", "256", "--no-tests"),
        *("--resident-layers", "1", "--device-memory", "1", "--output", str(output)),
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    rows = {
        (row["part"], row["what"]): row["value"] for row in json.loads(output.read_text())["rows"]
    }
    assert rows["device", "short passes can be recorded as CUDA graphs"] == "yes"
    assert rows["rounds", "kinds of short passes: replayed"] > 0
    assert rows["rounds", "kinds of short passes: refused"] == 0
    assert 0 < rows["prefill", "peak memory"] < 1


def test_a_named_model_reads_real_text(tmp_path: Path) -> None:
    arguments = [
        *("--target", str(DEMO / "target"), "--context", "600", "--budget", "128", "--no-tests"),
        *("--device", "cpu", "--device-memory", "1", "--link", "emulated:8"),
        *("--resident-layers", "1", "--output", str(tmp_path / "gpu.json")),
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    rows = {row["what"]: row["value"] for row in found}
    assert rows["retrieval 2"] > 0
    assert "draft 1" not in rows
    done = CliRunner().invoke(app, ["--target", str(tmp_path), "--device", "cpu", "--link", "view"])
    assert done.exit_code == 1
    assert "has no config.json" in done.output


def test_the_text_is_cut_to_the_host_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_pretrained(Path(__file__).parents[2] / "demo" / "target")
    layout = config.kv_layout(1, torch.bfloat16)
    monkeypatch.setattr("bench.gpu.host_available", lambda: 10 * 1024 * layout.bytes(1))
    assert context_that_fits(config, torch.bfloat16, 100_000) == 9 * 1024
    assert context_that_fits(config, torch.bfloat16, 2_000) == 2_000
