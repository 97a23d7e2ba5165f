"""The published experiments, each one command: published figure, prediction for that hardware,
measurement here.

A recipe runs at full size where its checkpoint is in the Hugging Face cache and there are GPUs
enough, and with the built-in pair at reduced size elsewhere; every row says which, with its
settings, and the commands at full size are printed. A reduced run tells what the machinery does,
not what a 7B model on a 4090 does: its times are to be compared with each other, not with those
published. Predictions assume one acceptance rate, whatever the temperature or chunk size: the one
that the first published row implies.
"""

from __future__ import annotations

import shlex
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from huggingface_hub import try_to_load_from_cache
from rich.console import Console

from bench.drafts.needle import needles
from bench.drafts.overlap import ALL, OURS, STATIC
from bench.harness.data import documents
from bench.harness.dimensions import LLAMA_7B, LLAMA_13B, LLAMA_68M, config_of
from bench.harness.options import Output
from bench.harness.record import benchmark, prepare, save, show
from bench.harness.text import DEMO, text_tokens
from bench.paper.jobs import summarized
from bench.paper.published import DRAFT, RECIPES, THIRTEEN, Options, Row
from decoding import Engine, Settings
from decoding.planning.cost import Acceptance
from decoding.planning.needs import TextNeeds
from decoding.planning.outlook import look_ahead
from decoding.planning.profile import HardwareProfile
from offload.errors import TierForceError

NEEDLE = "needle"
FEW = 12  # tokens of plain decoding over an emulated link, which is slow
CHARACTERS = 5  # of a token, at most: what is cut is long enough
SETTINGS = "settings here"
MEASURED = ("ms_per_token", "time_to_first_token_s", "acceptance", "tokens_per_verification")


@dataclass(frozen=True)
class Study:
    """Where documents come from, and where commands leave their files."""

    data: str | None
    folder: Path
    console: Console

    def say(self, line: str) -> None:
        self.console.print(line, style="bold", highlight=False, markup=False, soft_wrap=True)


def here(row: Row) -> bool:
    """Whether it can be run at full size on this machine: both checkpoints' weights in the cache,
    and GPUs enough.
    """

    def cached(name: str) -> bool:
        files = ("model.safetensors", "model.safetensors.index.json")
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)

    return (
        cached(row.checkpoint) and cached(DRAFT) and torch.cuda.device_count() >= row.full["gpus"]
    )


def flags(options: Options) -> list[str]:
    return [
        word
        for name, value in options.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def command(model: str, draft: str, mode: str, options: Options) -> list[str]:
    return ["--model", model, "--draft", draft, "--mode", mode, *flags(options)]


def published_commands(row: Row) -> list[str]:
    """What to type for it at full size."""
    kinds = [("hierarchical", row.full)] + (
        [("plain", row.full | row.plain_full)] if row.plain else []
    )
    files = ["--input", "books/", "--output", "records.jsonl"]
    return [
        shlex.join(["tierforce", "summarize", *command(row.checkpoint, DRAFT, *kind), *files])
        for kind in kinds
    ]


def options_here(row: Row, mode: str) -> Options | None:
    """What is run on this machine; None where the row needs a checkpoint that is not here."""
    if here(row):
        return row.full | (row.plain_full if mode == "plain" else {})
    if row.small is None:
        return None
    few = mode == "plain" and str(row.small.get("link")).startswith("emulated")
    return row.small | ({"max_new_tokens": FEW} if few else {})


def measured(study: Study, row: Row, mode: str, books: int) -> dict[str, float | None]:
    """Medians over the books' records; {} where it cannot be run. Raises TierForceError."""
    if (options := options_here(row, mode)) is None:
        return {}
    model, draft = (
        (row.checkpoint, DRAFT) if here(row) else (str(DEMO / "target"), str(DEMO / "draft"))
    )
    texts = documents(study.data, books, CHARACTERS * options["context"])
    records = summarized(study.folder, mode, texts, command(model, draft, mode, options), study.say)
    found = {
        name: [record[name] for record in records if record[name] is not None] for name in MEASURED
    }
    found["acceptance"] = [
        rates["target"] for rates in found["acceptance"] if rates.get("target") is not None
    ]
    return {name: statistics.median(values) if values else None for name, values in found.items()}


def predicted(row: Row, mode: str) -> tuple[float, float]:
    """Ms a token on the hardware that the published figure is of, with its settings, and the
    acceptance rate assumed for it.

    Layers that are set, and host memory, are taken as there.
    """
    options = row.full | (row.plain_full if mode == "plain" else {})
    machine = replace(HardwareProfile.find(row.hardware), host_memory=256e9, device_memory=128e9)
    known = {
        name: options[name]
        for name in ("budget", "draft_length", "resident_layers", "chunk_size")
        if name in options
    }
    target, dtype = config_of(LLAMA_13B if row.checkpoint == THIRTEEN else LLAMA_7B), torch.float16
    needs = TextNeeds(
        target=target,
        draft=config_of(LLAMA_68M),
        mode=mode,
        settings=Settings(mode=mode, **known),
        dtype=dtype,
        ranks=options["gpus"],
        draft_ranks=1,
        copies=True,
    )
    prompt, new = options["context"] - options["max_new_tokens"], options["max_new_tokens"]
    ahead = look_ahead(needs, machine, prompt, new)
    return 1e3 * ahead.forecast.token_s, Acceptance().of(ahead.needs)


def result(study: Study, row: Row, books: int) -> dict[str, Any]:
    """One line of the table."""
    ours = measured(study, row, "hierarchical", books)
    plain = measured(study, row, "plain", books) if row.plain else {}
    said, assumed = predicted(row, "hierarchical")
    said_plain = predicted(row, "plain")[0] if row.plain else None
    return {
        "": row.name,
        "published ms": row.published,
        "plain": row.published_plain,
        "times": row.published_gain,
        "plain is of": row.baseline,
        "predicted ms": said,
        "plain ": said_plain,
        "times ": _ratio(said_plain, said),
        "acceptance assumed": assumed,
        "measured here": "not here" if not ours else "full size" if here(row) else "reduced",
        "ms": ours.get("ms_per_token"),
        "plain  ": plain.get("ms_per_token"),
        "times  ": _ratio(plain.get("ms_per_token"), ours.get("ms_per_token")),
        "acceptance": ours.get("acceptance"),
        "tokens per verification": ours.get("tokens_per_verification"),
        "first token s": ours.get("time_to_first_token_s"),
        SETTINGS: ", ".join(
            f"{name} {value}" for name, value in (options_here(row, "hierarchical") or {}).items()
        ),
    }


def _ratio(slow: float | None, fast: float | None) -> float | None:
    return slow / fast if slow and fast else None


def needle_rows(context: int) -> list[dict[str, Any]]:
    """Retrieval against StreamingLLM drafting, with the built-in target and a model made by hand
    that can recall.
    """
    engine = Engine.from_pretrained(
        DEMO / "target", None, Settings(dtype="float32", mode="retrieval")
    )
    window = next(each for each in ALL if each.policy == "window")
    tokens = text_tokens(engine.tokenizer)
    return needles(engine.runtime, engine.tokenizer, tokens, context, (window, STATIC, OURS))


@benchmark
def main(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join([*RECIPES, NEEDLE])}.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="pg19, narrativeqa, or a folder of texts; by default Python's reference."
        ),
    ] = None,
    rows: Annotated[
        str, typer.Option(help="Parts of the names of rows to run; all by default.")
    ] = "",
    output: Output = Path("results/recipe.json"),
) -> None:
    """Run one published experiment, at full size where this machine can, and at reduced size where
    it cannot.
    """
    prepare(0)
    if name not in (*RECIPES, NEEDLE):
        raise typer.BadParameter(f"{name} is not one of {', '.join([*RECIPES, NEEDLE])}")
    console = Console(stderr=True)
    output = (
        output.with_stem(f"{output.stem}-{name}")
        if output == Path("results/recipe.json")
        else output
    )
    if name == NEEDLE:
        found = needle_rows(16_384)
        show(
            "A needle in 16,384 tokens: retrieval against a window (StreamingLLM), at a budget "
            "of 768",
            found,
        )
        print(
            "At full size: python -m bench acceptance --parts needle --target <checkpoint> "
            "--contexts 130048 --text <a book>"
        )
        save(output, {"recipe": name, "rows": found})
        return
    recipe = RECIPES[name]
    chosen = [
        row
        for row in recipe.rows
        if not rows or any(part.strip() in row.name for part in rows.split(","))
    ]
    if not chosen:
        raise typer.BadParameter(
            f"no row is named like that: {', '.join(row.name for row in recipe.rows)}",
            param_hint="--rows",
        )
    found = []
    with tempfile.TemporaryDirectory() as folder:
        study = Study(data, Path(folder), console)
        try:
            for row in chosen:
                found.append(result(study, row, recipe.books))
                save(output, {"recipe": name, "about": recipe.about, "rows": found}, quiet=True)
        except KeyboardInterrupt:
            console.print("interrupted: what is finished is kept")
        except TierForceError as error:
            console.print(f"{row.name}: {error}", highlight=False, markup=False)
            raise typer.Exit(1) from None
    if found:
        title = (
            f"{recipe.about}. Times are ms/token: published, predicted for that hardware, measured "
            "on this machine"
        )
        show(
            title,
            [{name: value for name, value in each.items() if name != SETTINGS} for each in found],
        )
        for each in found:
            if each[SETTINGS]:
                print(f"{each['']}, settings here: {each[SETTINGS]}")
        save(output, {"recipe": name, "about": recipe.about, "rows": found})
    print("At full size:")
    for row in chosen:
        for line in published_commands(row):
            print(f"  {line}")
