"""A real document through a real model: the same tokens, with and without speculation.

SmolLM2 answers one question about a chapter of Python's language reference twice, with its whole KV
cache in host memory and a slow link: with drafts from the retrieval cache and prompt lookup, and by
plain decoding. The demo fails unless both generate the same tokens. `python -m demo.run` (or
`make demo`) needs no GPU and no download: the model is in a package that `make` installs.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

OUT = Path(__file__).parent / "out"
CHAPTER, CHARACTERS = "compound", 20_000  # about 5,000 tokens of the 8,192 in SmolLM2's context
LINK_GB_S = 0.1  # per rank
QUESTION = "Summarize the text above in a few sentences."
OPTIONS = (
    *("--chat", "--deterministic"),
    *("--gpus", "2", "--device", "cpu"),
    *("--gpu-kv-layers", "0", "--link", f"emulated:{LINK_GB_S}"),
    *("--max-new-tokens", "48"),
)
MODES = ("retrieval", "plain")
COLUMNS = {
    "first token, s": lambda stats: f"{stats['time_to_first_token_s']:.1f}",
    "ms/token": lambda stats: f"{stats['ms_per_token']:.1f}",
    "tokens per verification": lambda stats: f"{stats['tokens_per_verification']:.2f}",
    "link MB/token": lambda stats: f"{stats['link_bytes_per_token'] / 1e6:.1f}",
}
Stats = Mapping[str, Any]  # as `tierforce generate --stats` writes them


def main(
    model: Annotated[str, typer.Option(help="A folder, a GGUF file, or a name.")] = "smollm2",
) -> None:
    """Answer the question in both modes, compare the tokens, and show the cost of each mode."""
    started = time.perf_counter()
    console = Console(width=None if sys.stdout.isatty() else 120)
    prompt = OUT / "prompt.txt"
    OUT.mkdir(exist_ok=True)
    prompt.write_text(f"{topics[CHAPTER][:CHARACTERS]}\n\n{QUESTION}", encoding="utf-8")
    console.print(
        "The document: the chapter on compound statements in Python's language reference.\n"
        "The machine: two CPU ranks take the place of GPUs. All KV is in host memory, and a link "
        f"of {LINK_GB_S} GB/s per rank is emulated.\nThe model: {model}. With 135 million "
        "parameters, as SmolLM2 has, expect English, not wisdom.\n"
    )
    runs = {mode: generate(model, mode, prompt, console) for mode in MODES}
    count = count_same_tokens(runs)
    console.print(tiers(runs))
    table = Table(title=f"The same {count} tokens", title_justify="left")
    table.add_column("")
    for heading in COLUMNS:
        table.add_column(heading, justify="right")
    for mode, stats in runs.items():
        table.add_row(mode, *(show(stats) for show in COLUMNS.values()))
    console.print(table)
    ratio = runs["plain"]["ms_per_token"] / runs["retrieval"]["ms_per_token"]
    rates = ", ".join(
        f"{level} {rate:.2f}"
        for level, rate in runs["retrieval"]["acceptance"].items()
        if rate is not None  # no draft reached this level
    )
    console.print(
        f"Drafting from the retrieval cache was {ratio:.1f} times as fast as plain decoding, for "
        f"the same {count} tokens; acceptance rates: {rates}.\n"
        f"Prompt and stats are in demo/out. The demo took {time.perf_counter() - started:.0f} s."
    )


def generate(model: str, mode: str, prompt: Path, console: Console) -> Stats:
    """Run `tierforce generate` in this mode, which streams its output; return its stats.

    Raises SystemExit if the command fails.
    """
    path = OUT / f"{mode}.json"
    files = ("--prompt-file", str(prompt), "--stats", str(path))
    words = ("--model", model, *OPTIONS, "--mode", mode, *files)
    console.print(
        "$ " + shlex.join(["tierforce", "generate", *words]),
        style="bold",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    code = subprocess.run([sys.executable, "-m", "decoding.cli", "generate", *words]).returncode
    if code:
        sys.exit(f"tierforce generate failed with exit code {code}; its message is above.")
    console.print()
    stats: Stats = json.loads(path.read_text(encoding="utf-8"))
    return stats


def count_same_tokens(runs: Mapping[str, Stats]) -> int:
    """Return the number of new tokens, the same in both modes.

    Raises SystemExit if they differ anywhere, or if there are too few to time.
    """
    drafted, plain = (runs[mode]["token_ids"] for mode in MODES)
    if drafted != plain:
        pairs = zip(drafted, plain, strict=False)
        equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        sys.exit(
            f"The two modes generated different tokens: {len(drafted)} and {len(plain)}, of which "
            f"the first {equal} are equal. That is a bug."
        )
    if len(plain) < 2:
        sys.exit(f"The model ended its answer after {len(plain)} tokens: there is nothing to time.")
    return len(plain)


def tiers(runs: Mapping[str, Stats]) -> Table:
    """Draw where rank 0's KV was in each mode, and how much crossed its link during decoding."""
    largest = max(map(decoding_bytes, runs.values()))
    grid = Table.grid(padding=(0, 2))
    prompt_tokens = runs["plain"]["prompt_tokens"]
    grid.title = (
        f"Rank 0, {prompt_tokens:,} prompt tokens: where its KV was, and how much crossed its "
        "link during decoding"
    )
    grid.title_justify = "left"
    grid.add_row("", *(f"[bold]{mode}" for mode in runs))
    hosts, links, devices = [], [], []
    for stats in runs.values():
        nbytes, forwards = decoding_bytes(stats), stats["forwards"]["target"]
        offloaded = stats["traffic"]["target"]["link_out"]
        hosts.append(Panel(f"all layers' KV: {offloaded / 1e6:,.1f} MB"))
        bar = ProgressBar(total=largest, completed=nbytes, width=30)
        links.append(Group(f"{nbytes / 1e6:,.0f} MB in {forwards} verifications", bar))
        budget = stats["retrieval_budget"]
        cache = f"retrieval cache: {budget:,} tokens per head" if budget else "no retrieval cache"
        devices.append(Panel(f"recent tokens; {cache}"))
    grid.add_row("\nhost memory", *hosts)
    grid.add_row("link", *links)
    grid.add_row("\ndevice", *devices)
    return grid


def decoding_bytes(stats: Stats) -> float:
    """Return the bytes transferred to the device after the first token."""
    new_tokens: int = stats["new_tokens"] - 1  # the first token belongs to prefill
    nbytes: float = stats["link_bytes_per_token"] * new_tokens
    return nbytes


if __name__ == "__main__":
    typer.run(main)
