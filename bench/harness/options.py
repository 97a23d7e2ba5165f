"""What most benchmarks can be told: each takes those it needs, with defaults of its own."""

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[Path, typer.Option(help="Target model folder.")]
Draft = Annotated[Path, typer.Option(help="Draft model folder.")]
Text = Annotated[
    Path | None, typer.Option(help="Text to read; Python's language reference by default.")
]
Context = Annotated[int, typer.Option(help="Prompt tokens.")]
Contexts = Annotated[str, typer.Option(help="Prompt tokens, separated by commas.")]
NewTokens = Annotated[int, typer.Option(help="Tokens per run.")]
Budget = Annotated[int, typer.Option(help="Retrieval budget, tokens a head.")]
Rates = Annotated[str, typer.Option(help="Emulated links, GB/s.")]
Dtype = Annotated[str, typer.Option(help="bfloat16 or float32.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus.")]
Threads = Annotated[int, typer.Option(help="CPU threads; 0: all cores.")]
Repeats = Annotated[int, typer.Option(help="Runs of each kind, interleaved; the median counts.")]
Output = Annotated[Path, typer.Option(help="JSON document.")]


def integers(text: str) -> list[int]:
    """Return the whole numbers of a list separated by commas."""
    return [int(each) for each in text.split(",")]


def decimals(text: str) -> list[float]:
    """Return the numbers of a list separated by commas."""
    return [float(each) for each in text.split(",")]
