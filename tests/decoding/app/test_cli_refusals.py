"""Errors before a job starts: invalid options, too little memory, the hub, weights and outputs."""

from __future__ import annotations

import shlex
import shutil
import socket
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

import parallel.formats.hub
from decoding.app.results.records import Records
from support.commands import MODELS, TARGET, Fork, forked, records, refused, variant

GENERATE = ("generate", "--prompt", "It was")


def summarize(folder: Path, output: Path, *more: str) -> tuple[str, ...]:
    source = folder / "a.txt"
    source.write_text("It was. " * 2000)
    return "summarize", *MODELS, "--input", str(source), "--output", str(output), *more


OPTIONS = {
    "--temperature -1": "temperature",
    "--temperature nan": "temperature",
    "--temperature 1e-40": "at least 1e-30",
    "--gpus 65": "at most 64",
    "--gpus 64": "--gpus 4 or less",
    "--link emulated:1e-6": "at least 0.001",
    "--rope x": "yarn",
    "--top-p 2": "top-p",
    "--top-p 0": "top-p",
    "--top-k -1": "top-k",
    "--top-p 1e-46": "at least 1e-30",
    "--seed -1": "seed",
    "--mode x": "hierarchical",
    "--mode speculative": "--draft",
    "--link x": "emulated:RATE",
    "--link emulated:0": "GB/s, at least 0.001",
    "--gpu-kv-layers 99": "6 layers",
    "--gpu-kv-layers -1": "0 or more",
    "--device x": "cuda",
    "--dtype float64": "bfloat16",
    "--dtype float16": "float32",
    "--retrieval-budget 0": "at least 1",
    "--retrieval-budget 4": "chunk of 8 tokens",
    "--context 0": "at least 1",
    "--num-draft-tokens 0": "at least 1",
    "--num-draft-tokens 600": "at most 512",
    "--prompt-lookup-ngram -1": "0 (off)",
    "--device-memory 0": "above 0 GB",
    "--device-memory nan": "above 0 GB",
    "--prompt-file a": "either --prompt-file or --prompt",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_invalid_option_error_names_the_option(option: str, tmp_path: Path) -> None:
    line = refused(
        forked(tmp_path, *GENERATE, "--model", str(TARGET), "--device", "cpu", *option.split())
    )
    assert option.split()[0].removeprefix("--") in line
    assert OPTIONS[option] in line


@pytest.mark.parametrize("blank", ["", " \t\n", "\u00a0"])
def test_empty_prompt_is_rejected(blank: str, tmp_path: Path) -> None:
    model = ("--model", "nowhere")  # the prompt is checked first
    assert "the question is empty" in refused(forked(tmp_path, "ask", *model, blank))
    line = refused(forked(tmp_path, "generate", *model, "--prompt", blank))
    assert "--prompt is empty" in line


@pytest.mark.parametrize("mode", ["plain", "hierarchical"])
def test_missing_draft_is_an_error_in_any_mode(mode: str, tmp_path: Path) -> None:
    command = (*GENERATE, "--model", str(TARGET), "--draft", "./nowhere", "--mode", mode)
    line = refused(forked(tmp_path, *command))
    assert line == "tierforce: ./nowhere: there is no such folder or file.\n"


def test_full_standard_output_is_an_error(tmp_path: Path) -> None:
    command = (*GENERATE, "--model", str(TARGET), "--device", "cpu", "--max-new-tokens", "4")
    result = Fork(tmp_path, *command, out=Path("/dev/full")).finish()
    assert result.code == 1
    assert result.err.splitlines()[-1] == (
        "tierforce: standard output cannot be written: No space left on device."
    )


def test_full_standard_output_of_plan_is_an_error(tmp_path: Path) -> None:
    for more in ((), ("--json",)):
        command = ("plan", "--model", str(TARGET), *more)
        result = Fork(tmp_path, *command, out=Path("/dev/full")).finish()
        assert result.code == 1
        assert result.err == (
            "tierforce: standard output cannot be written: No space left on device.\n"
        )


def test_unwritable_plot_is_an_error_at_once(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/full")):
        command = ("plan", "--model", str(TARGET), "--plot", str(path))
        assert "is not a regular file" in refused(forked(tmp_path, *command))
    assert not tmp_path.with_suffix(".png").exists()


def test_pickle_weights_error_has_a_working_conversion_command(
    tmp_path: Path,
) -> None:
    model = variant(tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    torch.save(load_file(weights), tmp_path / "model/pytorch_model.bin")
    weights.unlink()
    line = refused(forked(tmp_path, *GENERATE, *model))
    assert "pickle" in line
    program, option, code = shlex.split(line[line.index("python -c") :])
    assert (program, option) == ("python", "-c")
    exec(code, {})
    assert forked(tmp_path, *GENERATE, *model, "--max-new-tokens", "2").code == 0


def test_host_memory_error_has_required_and_available_size(tmp_path: Path) -> None:
    job = summarize(tmp_path, tmp_path / "out.jsonl", "--dtype", "float32", "--gpu-kv-layers", "0")
    result = forked(tmp_path, *job, "--device-memory", "0.3", before=_small_host)
    assert result.code == 1
    (record,) = records(tmp_path / "out.jsonl")
    line = record["error"]
    assert line in result.err
    assert "needs 0.08 GB of host memory" in line
    assert "0.01 GB are available" in line


def _small_host() -> None:
    memory = psutil.virtual_memory()
    # 0.275 of it is device memory, minus the weights
    psutil.virtual_memory = lambda: memory._replace(available=280_000_000)


def test_device_memory_option_above_available_is_harmless(tmp_path: Path) -> None:
    result = forked(
        tmp_path, *GENERATE, *MODELS, "--max-new-tokens", "2", "--device-memory", "1000000"
    )
    assert result.code == 0, result.err


def test_foreign_output_file_is_left_unchanged(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "a", "text": "one line of somebody\'s data, without a newline"}')
    before = other.read_bytes()
    refused(forked(tmp_path, *summarize(tmp_path, other)))
    assert other.read_bytes() == before


def test_output_file_locked_by_another_job_is_rejected(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with Records(output):
        line = refused(forked(tmp_path, *summarize(tmp_path, output)))
        assert output.read_bytes() == b""
    assert "being written by another job" in line


def test_hub_connection_times_out(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub = _Hub(tmp_path, silent.getsockname()[1])
        assert "timed out" in refused(
            forked(tmp_path, *GENERATE, "--model", "someone/nothing", before=hub)
        )
        model = tmp_path / "models--some--model"  # as downloaded earlier
        shutil.copytree(TARGET, model / "snapshots/0123")
        (model / "refs").mkdir()
        (model / "refs/main").write_text("0123")
        assert (
            forked(
                tmp_path, *GENERATE, "--model", "some/model", "--max-new-tokens", "2", before=hub
            ).code
            == 0
        )


class _Hub:
    """Redirect the hub to a local port and another cache, with a short timeout."""

    def __init__(self, cache: Path, port: int):
        self.cache, self.port = cache, port

    def __call__(self) -> None:
        from huggingface_hub import constants

        constants.ENDPOINT = f"http://127.0.0.1:{self.port}"
        constants.HF_HUB_CACHE = str(self.cache)
        # A cached list: otherwise the hub is asked for it first, for three seconds.
        harnesses = self.cache / "harnesses.json"
        harnesses.write_text('{"standardEnvVars": [], "harnesses": {}}')
        constants.AGENT_HARNESSES_PATH = str(harnesses)
        parallel.formats.hub._TIMEOUT_S = 0.5
