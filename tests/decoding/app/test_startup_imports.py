"""Commands that need no model start fast: they import nothing that takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from offload.dtypes import DTYPES, dtype_of, dtype_spec
from support.commands import DRAFT, TARGET
from support.gguf import convert

HEAVY = {"torch", "transformers", "numpy", "accelerate", "huggingface_hub", "safetensors"}
MAX_MODULES = 800  # --help imports some 500, torch alone 1,000 more


def imported_modules(*arguments: str) -> set[str]:
    """Run the command, and return the modules it has imported by its end."""
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
    modules = imported_modules(*arguments.split())
    assert "decoding.app.commands" in modules
    assert not modules & HEAVY
    assert len(modules) < MAX_MODULES


def test_the_public_names_are_imported_on_first_use() -> None:
    code = (
        "import sys, tierforce; print(*sys.modules); tierforce.Settings(); print(tierforce.Engine)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules, engine = run.stdout.splitlines()
    assert not set(modules.split()) & HEAVY
    assert "decoding.engine.engine.Engine" in engine


@pytest.mark.parametrize("more", [(), ("--draft", str(DRAFT), "--json")], ids=["alone", "pair"])
def test_a_plan_imports_neither_torch_nor_transformers(more: tuple[str, ...]) -> None:
    modules = imported_modules("plan", "--model", str(TARGET), "--hardware", "1x4090", *more)
    assert "decoding.planning.requirements" in modules
    assert not modules & HEAVY


def test_plan_of_gguf_file_imports_nothing_heavy(tmp_path: Path) -> None:
    path = convert(TARGET, tmp_path / "target.gguf")
    modules = imported_modules("plan", "--model", str(path), "--hardware", "1x4090")
    assert "parallel.formats.gguf.header" in modules
    assert not modules & {*HEAVY, "gguf"}


def test_results_are_shown_without_the_model(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"id": "a", "summary": "Of a.", "versions": {}}\n')
    modules = imported_modules("show", str(path))
    assert "decoding.app.results.show" in modules
    assert not modules & HEAVY


def test_generate_imports_no_compiler() -> None:
    """torch._dynamo takes a second to import, and nothing is compiled."""
    modules = imported_modules(
        "generate", "--model", str(TARGET), "--prompt", "It", "--max-new-tokens", "1"
    )
    assert "decoding.engine.engine" in modules
    assert "torch._dynamo" not in modules


@pytest.mark.parametrize("name", DTYPES)
def test_dtype_spec_itemsize_matches_torch(name: str) -> None:
    assert dtype_spec(name).itemsize == dtype_of(name).itemsize
