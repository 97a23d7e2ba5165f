"""The options that benchmarks share. Each takes those it needs, with defaults of its own."""

from pathlib import Path
from typing import Annotated

import typer

SMOLLM2 = "smollm2"  # the target of every benchmark that is told no other
NATIVE = 7424  # tokens of a prompt that SmolLM2's 8,192 positions have room for, with an answer

_NAMES = "a Hugging Face folder, a GGUF file, a name on the hub, or smollm2"
Target = Annotated[str, typer.Option(help=f"Target model: {_NAMES}.")]
Draft = Annotated[str | None, typer.Option(help="Draft model, likewise; by default none.")]
Rope = Annotated[
    str | None, typer.Option(help="Stretch positions: yarn:4, for texts beyond the model's limit.")
]
Text = Annotated[
    Path | None,
    typer.Option(help="File or folder of text; Python's language reference by default."),
]
Data = Annotated[
    str | None,
    typer.Option(help="pg19, narrativeqa, or a folder of texts; by default Python's reference."),
]
Context = Annotated[int, typer.Option(help="Prompt tokens.")]
Longest = Annotated[int, typer.Option(help="Prompt tokens of the longest.")]
Contexts = Annotated[str, typer.Option(help="Prompt tokens, separated by commas.")]
NewTokens = Annotated[int, typer.Option(help="Tokens per run.")]
Budget = Annotated[int, typer.Option(help="Retrieval budget, tokens a head.")]
Ways = Annotated[
    str, typer.Option(help="Modes with their links, as mode@link, separated by commas.")
]
Rates = Annotated[str, typer.Option(help="Emulated links, GB/s.")]
Dtype = Annotated[str, typer.Option(help="bfloat16 or float32.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus.")]
Threads = Annotated[int, typer.Option(help="CPU threads; 0: all cores.")]
Repeats = Annotated[int, typer.Option(help="Runs of each kind, interleaved; the median counts.")]
First = Annotated[int, typer.Option(help="How many of the settings.")]
Output = Annotated[Path, typer.Option(help="JSON document.")]


def integers(text: str) -> list[int]:
    """Return the whole numbers of a list separated by commas."""
    return [int(each) for each in text.split(",")]


def decimals(text: str) -> list[float]:
    """Return the numbers of a list separated by commas."""
    return [float(each) for each in text.split(",")]
