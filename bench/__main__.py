"""Benchmarks by short names: `python -m bench NAME [options]`; without a name they are listed."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from decoding.app.environment import set_environment_defaults

COMMANDS = {  # name: module, summary
    "gpu": ("bench.gpu.day", "what only a GPU can show: tests, kernels, link and forwards"),
    "compare": (
        "bench.peers.compare",
        "TierForce compared with transformers, DeepSpeed and llama.cpp",
    ),
    "grid": ("bench.speed.grid", "decoding speed over a grid of settings and links"),
    "forwards": ("bench.speed.forwards", "cost of one forward of each level, by context"),
    "concurrency": ("bench.speed.concurrency", "concurrent requests compared with one at a time"),
    "conversation": ("bench.speed.conversation", "questions about a document, one after another"),
    "serve": ("bench.speed.serve", "a server with several clients at once"),
    "schema": ("bench.speed.schema", "answers in JSON under a schema compared with free ones"),
    "reopening": ("bench.speed.reopening", "a document loaded from the prompt cache"),
    "prefill": ("bench.speed.prefill", "tokens/s and peak memory of prefill"),
    "transfer": ("bench.speed.transfer", "overlap of transfers and compute"),
    "acceptance": ("bench.drafts.acceptance", "acceptance of drafts by policy and budget"),
    "split": (
        "bench.drafts.split",
        "acceptance of drafts from split layers, by exact keys",
    ),
    "needle": ("bench.drafts.needle", "whether drafts recall a sentence planted early"),
    "recipes": ("bench.paper.recipes", "the published experiments, at full or reduced size"),
    "loss": ("bench.checks.loss", "loss by position, with and without RoPE scaling"),
    "fidelity": ("bench.checks.fidelity", "outputs and distributions compared with plain decoding"),
    "predictions": ("bench.checks.predictions", "predicted and measured times"),
    "memory": ("bench.checks.memory", "whether runs fit in their planned memory"),
    "report": ("bench.harness.report", "regenerate the tables of README and docs/results"),
}


def main(arguments: list[str]) -> None:
    """Run the benchmark that the first argument names, with the others."""
    set_environment_defaults()  # as the command line does, before torch is imported
    if not arguments or arguments[0] in ("-h", "--help"):
        print("python -m bench NAME [options], where NAME is one of")
        for name, (_, summary) in COMMANDS.items():
            print(f"  {name:12} {summary}")
        return
    name, *options = arguments
    if name not in COMMANDS:
        print(
            f"python -m bench: {name} is not a benchmark: it is one of {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        sys.exit(2)
    module, _ = COMMANDS[name]
    app = typer.Typer(add_completion=False)
    app.command()(import_module(module).main)
    app(options, prog_name=f"python -m bench {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
