"""The published experiments: published, predicted and measured times.

A recipe runs at full size if its checkpoint is in the Hugging Face cache and there are enough GPUs,
else at reduced size with a small model; every row says which, with its settings, and the commands
at full size are printed. Without a draft model, a reduced run drafts by prompt lookup and the
retrieval cache alone. Reduced runs show how the modes compare, not how fast a 7B model is on a
4090: compare their times with each other, not with the published ones. Predictions assume one
acceptance rate for all temperatures and chunk sizes: the one implied by the first published row.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from huggingface_hub import try_to_load_from_cache

from bench.harness import options as opt
from bench.harness.dimensions import LLAMA_7B, LLAMA_13B, LLAMA_68M, config_of
from bench.harness.experiment import Measurement, Row, benchmark
from bench.harness.tables import say
from bench.harness.text import documents
from bench.paper.published import DRAFT, RECIPES, THIRTEEN, Experiment, Options
from decoding import Settings
from decoding.planning.cost_model import CostModel
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.planner import Planner
from decoding.planning.requirements import Requirements
from decoding.planning.round_cost import Acceptance
from offload.errors import TierForceError

FEW = 12  # new tokens of plain decoding over an emulated link, which is slow
CHARACTERS = 5  # maximum per token, so that documents are long enough to be truncated
Measured = dict[str, float | None]  # medians over records, by field


@dataclass(frozen=True)
class Study:
    """The models of reduced runs, and the source of documents."""

    target: str
    draft: str | None
    data: str | None
    books: int
    stretch: int = 1  # factor of contexts and budgets of reduced runs, with YaRN

    def row(self, experiment: Experiment) -> Row:
        """Return an experiment's row: measured here, and predicted. Raises TierForceError."""
        drafting = "hierarchical" if self.draft or is_here(experiment) else "retrieval"
        ours = self.measure(experiment, drafting)
        plain = self.measure(experiment, "plain") if experiment.plain else {}
        predicted_ms, assumed_acceptance = predict(experiment, "hierarchical")
        predicted_plain_ms = predict(experiment, "plain")[0] if experiment.plain else None
        ms, plain_ms = ours.get("ms_per_token"), plain.get("ms_per_token")
        settings = {"mode": drafting} | (options_here(experiment, drafting, self.stretch) or {})
        return {
            "name": experiment.name,
            "published_ms": experiment.published,
            "published_plain_ms": experiment.published_plain,
            "published_gain": experiment.published_gain,
            "plain_is_of": experiment.baseline,
            "predicted_ms": predicted_ms,
            "predicted_plain_ms": predicted_plain_ms,
            "predicted_gain": _ratio(predicted_plain_ms, predicted_ms),
            "assumed_acceptance": assumed_acceptance,
            "run": "not here" if not ours else "full size" if is_here(experiment) else "reduced",
            "ms_per_token": ms,
            "plain_ms_per_token": plain_ms,
            "gain": _ratio(plain_ms, ms),
            "acceptance": ours.get("acceptance"),
            "tokens_per_verification": ours.get("tokens_per_verification"),
            "first_token_s": ours.get("time_to_first_token_s"),
            "settings": ", ".join(f"{name} {value}" for name, value in settings.items() if ours),
        }

    def measure(self, experiment: Experiment, mode: str) -> Measured:
        """Return medians over all documents; {} if the experiment cannot run here."""
        if (options := options_here(experiment, mode, self.stretch)) is None:
            return {}
        models = self.target, self.draft
        if is_here(experiment):
            models = experiment.checkpoint, DRAFT
        books = documents(self.data, self.books, CHARACTERS * options["context"])
        records = summarize(books, arguments_of(*models, mode, options))
        for record in records:
            record["acceptance"] = record["acceptance"].get("target")
        names = ("ms_per_token", "time_to_first_token_s", "acceptance", "tokens_per_verification")
        known = {
            name: [record[name] for record in records if record[name] is not None] for name in names
        }
        return {key: statistics.median(values) if values else None for key, values in known.items()}


def _ratio(slow: float | None, fast: float | None) -> float | None:
    return slow / fast if slow and fast else None


def summarize(books: Mapping[str, str], options: list[str]) -> list[dict[str, Any]]:
    """Return the records of `tierforce summarize` with these options over documents by title.

    Raises TierForceError if the command fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        inputs, output = Path(folder, "documents"), Path(folder, "records.jsonl")
        inputs.mkdir()
        for number, (title, text) in enumerate(books.items()):
            path = inputs / f"{number:03}-{title.replace('/', '-')}.txt"
            path.write_text(text, encoding="utf-8")
        arguments = ["summarize", *options, "--input", str(inputs), "--output", str(output)]
        say("$ " + shlex.join(["tierforce", *arguments]))
        code = subprocess.run([sys.executable, "-m", "decoding.cli", *arguments]).returncode
        if code:
            raise TierForceError(
                f"tierforce summarize ended with exit code {code}; its messages are above."
            )
        return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def is_here(experiment: Experiment) -> bool:
    """Return whether it can run at full size here: checkpoints are cached, and GPUs suffice."""

    def cached(name: str) -> bool:
        files = ("model.safetensors", "model.safetensors.index.json")
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)

    enough = torch.cuda.device_count() >= experiment.full["gpus"]
    return enough and cached(experiment.checkpoint) and cached(DRAFT)


def arguments_of(model: str, draft: str | None, mode: str, options: Options) -> list[str]:
    """Return the arguments of `tierforce summarize`, without input and output.

    A book longer than the context is cut, so that it is one prompt as in the paper.
    """
    arguments = ["--model", model, *(["--draft", draft] if draft else []), "--mode", mode]
    arguments += ["--long", "cut"]
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    return arguments


def published_commands(experiment: Experiment) -> list[str]:
    """Return the commands that run an experiment at full size."""
    modes = ["hierarchical", "plain"] if experiment.plain else ["hierarchical"]
    files = ["--input", "books/", "--output", "records.jsonl"]
    lines = []
    for mode in modes:
        options = experiment.options(mode)
        arguments = arguments_of(experiment.checkpoint, DRAFT, mode, options)
        lines.append(shlex.join(["tierforce", "summarize", *arguments, *files]))
    return lines


def options_here(experiment: Experiment, mode: str, stretch: int) -> Options | None:
    """Return the options of a run here; None if it needs a checkpoint that is not cached."""
    if is_here(experiment):
        return experiment.options(mode)
    if experiment.small is None:
        return None
    options = experiment.small
    if mode == "plain" and str(options.get("link")).startswith("emulated"):
        options = options | {"max_new_tokens": FEW}
    if stretch > 1:
        longer = {name: stretch * options[name] for name in ("context", "retrieval_budget")}
        options = options | longer | {"rope": f"yarn:{stretch}"}
    return options


def predict(experiment: Experiment, mode: str) -> tuple[float, float]:
    """Return predicted ms/token on the published hardware and settings, and the acceptance rate.

    Memory is assumed to suffice for the host store and for the layers that are set.
    """
    options = experiment.options(mode)
    machine = HardwareProfile.from_name(experiment.hardware)
    machine = replace(machine, host_memory=256e9, device_memory=128e9)
    names = ("retrieval_budget", "num_draft_tokens", "gpu_kv_layers", "chunk_size")
    known = {name: options[name] for name in names if name in options}
    requirements = Requirements(
        target=config_of(LLAMA_13B if experiment.checkpoint == THIRTEEN else LLAMA_7B),
        draft=config_of(LLAMA_68M),
        mode=mode,
        settings=Settings(mode=mode, graphs=True, **known),
        dtype=torch.float16,
        ranks=options["gpus"],
        draft_ranks=1,
        copies=True,
    )
    max_new_tokens = options["max_new_tokens"]
    costs, prompt = CostModel(machine), options["context"] - max_new_tokens
    plan = Planner(requirements, costs).plan(prompt, max_new_tokens, options["concurrency"])
    return 1e3 * costs.token_s(plan), Acceptance().rate(plan)


@benchmark("Recipe {name}, times in ms/token", hidden=["settings"])
def main(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(RECIPES)}.")],
    target: opt.Target = opt.SMOLLM2,
    draft: opt.Draft = None,
    data: opt.Data = None,
    rows: Annotated[
        str, typer.Option(help="Rows to run, by parts of their names; default: all.")
    ] = "",
    stretch: Annotated[
        int,
        typer.Option(
            min=1,
            help="Factor of the contexts and budgets of reduced runs, with YaRN; names of rows "
            "have them without it.",
        ),
    ] = 1,
    output: opt.Output = Path("results/recipe-{name}.json"),
) -> Measurement:
    """Run one published experiment, at full size if this machine can, else at reduced size."""
    if name not in RECIPES:
        raise typer.BadParameter(f"{name} is not one of {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    parts = [part.strip() for part in rows.split(",")]
    selected = [row for row in recipe.rows if any(part in row.name for part in parts)]
    if not selected:
        known = ", ".join(row.name for row in recipe.rows)
        raise typer.BadParameter(f"no row matches; rows are {known}", param_hint="--rows")
    commands = {f"{row.name}, at full size": "; ".join(published_commands(row)) for row in selected}
    finished = list[Row]()
    study = Study(target, draft, data, recipe.books, stretch)
    for experiment in selected:
        try:
            finished.append(study.row(experiment))
        except TierForceError as error:
            raise TierForceError(f"{experiment.name}: {error}") from error
        yield {"recipe": name, "about": recipe.about, "rows": finished, "full_size": commands}
