"""A real document through a real model, end to end: two ranks, and a slow link between tiers.

The same question about a chapter of Python's language reference is answered twice by SmolLM2: once
drafted from prompt lookup and the retrieval cache, once by plain decoding. Both draw from the same
law; one needs a fraction of the link's bytes and time. `python -m demo.run` (or `make demo`) needs
no GPU, and no download: the model is in a package that `make` installs.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

OUT = Path(__file__).parent / "out"
CHAPTER, CHARACTERS = "compound", 26_000  # some 6,500 tokens: SmolLM2 was trained for 8,192
QUESTION = "Summarize the text above in a few sentences."
OPTIONS = {
    "chat": None,
    "gpus": "2",
    "device": "cpu",
    "resident-layers": "0",
    "link": "emulated:0.1",
    "max-new-tokens": "48",
}
COLUMNS = {
    "first token, s": lambda stats: f"{stats['time_to_first_token_s']:.1f}",
    "ms/token": lambda stats: f"{stats['ms_per_token']:.1f}",
    "tokens per verification": lambda stats: f"{stats['tokens_per_verification']:.2f}",
    "link MB/token, per rank": lambda stats: f"{stats['link_bytes_per_token'] / 1e6:.1f}",
}


def answer(model: str, mode: str, prompt: Path, console: Console) -> dict[str, Any]:
    """Run `tierforce generate` in this mode, which streams its text; return what it took."""
    stats = OUT / f"{mode}.json"
    files = {"prompt-file": str(prompt), "stats": str(stats)}
    options = {"model": model, **OPTIONS, "mode": mode, **files}
    words = [word for name, value in options.items() for word in (f"--{name}", value) if word]
    console.print(
        "$ " + shlex.join(["tierforce", "generate", *words]),
        style="bold",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    code = subprocess.run([sys.executable, "-m", "decoding.cli", "generate", *words]).returncode
    if code:
        sys.exit(f"tierforce generate ended with exit code {code}; what it said is above.")
    console.print()
    took: dict[str, Any] = json.loads(stats.read_text(encoding="utf-8"))
    return took


def main(
    model: Annotated[str, typer.Option(help="A folder, a GGUF file, or a name.")] = "smollm2",
) -> None:
    """Answer the question in both modes, and compare what they took."""
    started = time.perf_counter()
    console = Console(width=None if sys.stdout.isatty() else 120)
    prompt = OUT / "prompt.txt"
    OUT.mkdir(exist_ok=True)
    prompt.write_text(f"{topics[CHAPTER][:CHARACTERS]}\n\n{QUESTION}", encoding="utf-8")
    console.print(
        "The document: the chapter on compound statements in Python's language reference.\n"
        "The machine: two CPU ranks; no KV stays on the 'device', and a thread a rank plays the "
        f"link at 0.1 GB/s.\nThe model: {model}. With 135 million parameters, as SmolLM2 has, "
        "expect English, not wisdom.\n"
    )
    took = {mode: answer(model, mode, prompt, console) for mode in ("retrieval", "plain")}
    table = Table(title="The same question, model and sampling law", title_justify="left")
    table.add_column("")
    for heading in COLUMNS:
        table.add_column(heading, justify="right")
    for mode, stats in took.items():
        table.add_row(mode, *(show(stats) for show in COLUMNS.values()))
    console.print(table)
    ratio = took["plain"]["ms_per_token"] / took["retrieval"]["ms_per_token"]
    rates = ", ".join(
        f"{level} {rate:.2f}"
        for level, rate in took["retrieval"]["acceptance"].items()
        if rate is not None  # a level that was asked for nothing has none
    )
    console.print(
        f"Drafting from the retrieval cache was {ratio:.1f} times as fast; acceptance rates: "
        f"{rates}.\nWhat both took is in demo/out. The demo took "
        f"{time.perf_counter() - started:.0f} s."
    )


if __name__ == "__main__":
    typer.run(main)
