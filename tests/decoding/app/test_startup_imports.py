"""What needs no model answers at once: nothing that takes seconds to import is imported for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from offload.dtypes import DTYPES, dtype_of, dtype_spec
from support.commands import DRAFT, TARGET
from support.gguf import convert

HEAVY = {"torch", "transformers", "numpy", "accelerate", "huggingface_hub", "safetensors"}
MAX_MODULES = 800  # a command line with its help takes some 500, torch alone 1,000 more


def modules(*arguments: str) -> set[str]:
    """Run the command, and return the modules it had imported when it was done."""
    code = (
        "import os, sys; sys.argv = ['tierforce', *sys.argv[1:]]\n"
        "def leave(code):\n"
        "    print('\\n'.join(['LOADED', *sys.modules]), file=sys.__stdout__, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "os._exit = leave\n"
        "from decoding.app.main import main\n"
        "main()\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )
    assert "LOADED" in run.stdout, run.stderr
    return set(run.stdout.split("LOADED\n")[1].split())


@pytest.mark.parametrize(
    "arguments", ["--help", "summarize --help", "generate --flux 1", "--version"]
)
def test_help_and_a_mistyped_option_import_nothing_heavy(arguments: str) -> None:
    loaded = modules(*arguments.split())
    assert "decoding.app.commands" in loaded
    assert not loaded & HEAVY
    assert len(loaded) < MAX_MODULES


@pytest.mark.parametrize("more", [(), ("--draft", str(DRAFT), "--json")], ids=["alone", "pair"])
def test_a_plan_imports_neither_torch_nor_transformers(more: tuple[str, ...]) -> None:
    loaded = modules("plan", "--model", str(TARGET), "--hardware", "1x4090", *more)
    assert "decoding.planning.memory_requirements" in loaded
    assert not loaded & HEAVY


def test_nor_does_a_plan_of_a_gguf_file(tmp_path: Path) -> None:
    path = convert(TARGET, tmp_path / "target.gguf")
    loaded = modules("plan", "--model", str(path), "--hardware", "1x4090")
    assert "parallel.formats.gguf_header" in loaded
    assert not loaded & {*HEAVY, "gguf"}


def test_writing_imports_no_compiler() -> None:
    """It takes a second to import, and nothing is compiled."""
    loaded = modules("generate", "--model", str(TARGET), "--prompt", "It", "--max-new-tokens", "1")
    assert "decoding.engine.engine" in loaded
    assert "torch._dynamo" not in loaded


@pytest.mark.parametrize("name", DTYPES)
def test_a_counted_number_takes_the_bytes_of_torch(name: str) -> None:
    assert dtype_spec(name).itemsize == dtype_of(name).itemsize
