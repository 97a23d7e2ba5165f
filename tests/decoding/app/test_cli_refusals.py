"""What else keeps a job from starting: options, memory, the hub, weights and outputs of another
kind.
"""

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
from decoding.app.batch.records import Records
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
def test_an_impossible_option_is_refused_by_name(option: str, tmp_path: Path) -> None:
    line = refused(
        forked(tmp_path, *GENERATE, "--model", str(TARGET), "--device", "cpu", *option.split())
    )
    assert option.split()[0].removeprefix("--") in line
    assert OPTIONS[option] in line


@pytest.mark.parametrize("blank", ["", " \t\n", "\u00a0"])
def test_nothing_is_not_asked(blank: str, tmp_path: Path) -> None:
    model = ("--model", "nowhere")  # which is not looked for
    assert "the question is empty" in refused(forked(tmp_path, "ask", *model, blank))
    line = refused(forked(tmp_path, "generate", *model, "--prompt", blank))
    assert "--prompt is empty" in line


@pytest.mark.parametrize("mode", ["plain", "hierarchical"])
def test_a_draft_that_is_not_there_is_told_in_any_mode(mode: str, tmp_path: Path) -> None:
    command = (*GENERATE, "--model", str(TARGET), "--draft", "./nowhere", "--mode", mode)
    line = refused(forked(tmp_path, *command))
    assert line == "tierforce: ./nowhere: there is no such folder or file.\n"


def test_standard_output_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    command = (*GENERATE, "--model", str(TARGET), "--device", "cpu", "--max-new-tokens", "4")
    result = Fork(tmp_path, *command, out=Path("/dev/full")).finish()
    assert result.code == 1
    assert result.err.splitlines()[-1] == (
        "tierforce: standard output cannot be written: No space left on device."
    )


def test_a_plan_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    for more in ((), ("--json",)):
        command = ("plan", "--model", str(TARGET), *more)
        result = Fork(tmp_path, *command, out=Path("/dev/full")).finish()
        assert result.code == 1
        assert result.err == (
            "tierforce: standard output cannot be written: No space left on device.\n"
        )


def test_a_picture_that_cannot_be_drawn_is_told_beforehand(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/full")):
        command = ("plan", "--model", str(TARGET), "--plot", str(path))
        assert "is not a regular file" in refused(forked(tmp_path, *command))
    assert not tmp_path.with_suffix(".png").exists()


def test_pickle_weights_are_not_read_but_the_line_has_the_command_that_converts_them(
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


def test_host_memory_that_is_too_small_is_told_with_both_sizes(tmp_path: Path) -> None:
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
    # 0.275 of it is the device's, less weights
    psutil.virtual_memory = lambda: memory._replace(available=280_000_000)


def test_leave_to_use_more_device_memory_than_there_is_changes_nothing(tmp_path: Path) -> None:
    result = forked(
        tmp_path, *GENERATE, *MODELS, "--max-new-tokens", "2", "--device-memory", "1000000"
    )
    assert result.code == 0, result.err


def test_an_output_file_of_another_kind_is_left_as_it_is(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(
        '{"id": "a", "text": "one line of somebody\'s data, and no newline behind it"}'
    )
    before = other.read_bytes()
    refused(forked(tmp_path, *summarize(tmp_path, other)))
    assert other.read_bytes() == before


def test_an_output_file_that_another_job_holds_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with Records(output):
        line = refused(forked(tmp_path, *summarize(tmp_path, output)))
        assert output.read_bytes() == b""
    assert "being written by another job" in line


def test_a_hub_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub = _Hub(tmp_path, silent.getsockname()[1])
        assert "timed out" in refused(
            forked(tmp_path, *GENERATE, "--model", "nobody/nothing", before=hub)
        )
        model = tmp_path / "models--some--model"  # as it was fetched before
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
    """A hub at a local port, waited for shortly, and an own cache of it."""

    def __init__(self, cache: Path, port: int):
        self.cache, self.port = cache, port

    def __call__(self) -> None:
        from huggingface_hub import constants

        constants.ENDPOINT = f"http://127.0.0.1:{self.port}"
        constants.HF_HUB_CACHE = str(self.cache)
        # a list that is kept: the hub would be asked for it first, for three seconds
        kept = self.cache / "harnesses.json"
        kept.write_text('{"standardEnvVars": [], "harnesses": {}}')
        constants.AGENT_HARNESSES_PATH = str(kept)
        parallel.formats.hub._TIMEOUT_S = 0.5
