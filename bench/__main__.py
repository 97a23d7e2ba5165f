"""Benchmarks by short names: `python -m bench NAME [options]` runs one, `python -m bench` lists
them.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path

import typer

COMMANDS = {
    "gpu": "bench.gpu",
    "compare": "bench.peers.compare",
    "memory": "bench.checks.memory",
    "predictions": "bench.checks.predictions",
    "acceptance": "bench.drafts.acceptance",
    "report": "bench.harness.report",
    "recipes": "bench.paper.recipes",
    "decode": "bench.speed.decode",
    "lengths": "bench.speed.lengths",
    "passes": "bench.speed.passes",
    "prefill": "bench.speed.prefill",
    "refresh": "bench.speed.refresh",
    "transfer": "bench.speed.transfer",
    "tune": "bench.speed.tune",
}


def summary(module: str) -> str:
    """The first line of its docstring; it is not imported."""
    path = Path(__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def main(arguments: list[str]) -> None:
    """Run the benchmark that the first argument names, with the others."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("python -m bench NAME [options], where NAME is one of")
        for name, module in COMMANDS.items():
            print(f"  {name:12} {summary(module)}")
        return
    name, *options = arguments
    if name not in COMMANDS:
        print(
            f"python -m bench: {name} is not a benchmark: it is one of {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        sys.exit(2)
    app = typer.Typer(add_completion=False)
    app.command()(import_module(COMMANDS[name]).main)
    app(options, prog_name=f"python -m bench {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
