"""Options that benchmarks share, with defaults of their own."""

from pathlib import Path
from typing import Annotated

import typer

SMOLLM2 = "smollm2"  # default target of all benchmarks
NATIVE = 7424  # prompt tokens that leave room for an answer in SmolLM2's 8,192

_NAMES = "a Hugging Face folder, a GGUF file, a name on the hub, or smollm2"
Target = Annotated[str, typer.Option(help=f"Target model: {_NAMES}.")]
Draft = Annotated[str | None, typer.Option(help="Draft model, specified likewise; default: none.")]
Rope = Annotated[
    str | None, typer.Option(help="RoPE scaling beyond the model's limit, such as yarn:4.")
]
Text = Annotated[
    Path | None,
    typer.Option(help="Text file or folder; default: Python's language reference."),
]
Books = Annotated[
    list[Path] | None,
    typer.Option(
        "--text",
        help="Text file, or folder of them; may be repeated; default: Python's language reference.",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(help="pg19, narrativeqa, or a folder of text files; default: Python's reference."),
]
Context = Annotated[int, typer.Option(help="Prompt tokens.")]
Longest = Annotated[int, typer.Option(help="Tokens of the longest prompt.")]
Contexts = Annotated[str, typer.Option(help="Prompt tokens, separated by commas.")]
NewTokens = Annotated[int, typer.Option(help="Tokens per run.")]
Budget = Annotated[int, typer.Option(help="Retrieval budget, tokens per head.")]
Variants = Annotated[
    str, typer.Option(help="Modes with their links, as mode@link, separated by commas.")
]
Rates = Annotated[str, typer.Option(help="Emulated links, GB/s.")]
Dtype = Annotated[str, typer.Option(help="bfloat16 or float32.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus.")]
Threads = Annotated[int, typer.Option(help="CPU threads; 0: all cores.")]
Repeats = Annotated[int, typer.Option(help="Runs of each kind, interleaved; medians are reported.")]
First = Annotated[int, typer.Option(help="Number of settings to run.")]
Output = Annotated[Path, typer.Option(help="JSON document.")]


def integers(text: str) -> list[int]:
    """Return the integers of a comma-separated list."""
    return [int(part) for part in text.split(",")]


def decimals(text: str) -> list[float]:
    """Return the numbers of a comma-separated list."""
    return [float(part) for part in text.split(",")]
