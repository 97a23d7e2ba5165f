"""Benchmarks by short names: `python -m bench NAME [options]`; without a name they are listed."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from decoding.app.environment import set_environment_defaults

COMMANDS = {  # name: module, and what it measures
    "gpu": ("bench.gpu.day", "what only a GPU can tell: its tests, kernels, link and passes"),
    "compare": ("bench.peers.compare", "TierForce beside transformers, DeepSpeed, llama.cpp"),
    "grid": ("bench.speed.grid", "decoding speed over any grid of settings, links included"),
    "forwards": ("bench.speed.forwards", "cost of one forward of each level, by context"),
    "concurrency": ("bench.speed.concurrency", "concurrent requests compared with one at a time"),
    "conversation": ("bench.speed.conversation", "questions about a document, one by one"),
    "reopening": ("bench.speed.reopening", "a document that is kept on disk, opened again"),
    "prefill": ("bench.speed.prefill", "tokens a second and peak memory of prefill"),
    "transfer": ("bench.speed.transfer", "whether copies hide behind compute"),
    "acceptance": ("bench.drafts.acceptance", "how often proposals stand, by policy and budget"),
    "needle": ("bench.drafts.needle", "whether what drafts still knows what was said early"),
    "recipes": ("bench.paper.recipes", "the published experiments, at full or reduced size"),
    "loss": ("bench.checks.loss", "the loss per token along a text, and with stretched RoPE"),
    "fidelity": ("bench.checks.fidelity", "texts and laws beside plain decoding's"),
    "predictions": ("bench.checks.predictions", "predicted times beside measured ones"),
    "memory": ("bench.checks.memory", "plans held to the memory that they ask for"),
    "report": ("bench.harness.report", "the tables of README and docs/results, filled in anew"),
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
