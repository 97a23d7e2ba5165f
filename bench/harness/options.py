"""What most benchmarks can be told, once: each takes those it needs, with defaults of its own."""

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[Path, typer.Option(help="Target model folder.")]
Draft = Annotated[Path, typer.Option(help="Draft model folder.")]
Text = Annotated[
    Path | None, typer.Option(help="Text to read; Python's language reference by default.")
]
Context = Annotated[int, typer.Option(help="Prompt tokens.")]
Rates = Annotated[str, typer.Option(help="Emulated links, GB/s.")]
Dtype = Annotated[str, typer.Option(help="bfloat16 or float32.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus.")]
Threads = Annotated[int, typer.Option(help="CPU threads; 0: all cores.")]
Output = Annotated[Path, typer.Option(help="JSON document.")]
