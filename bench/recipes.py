"""The published experiments, each one command: published figure, prediction for that hardware, measurement here.

A recipe runs as published where its checkpoint is in the Hugging Face cache and there are GPUs enough, and with the built-in pair
at reduced size elsewhere; what was run is said in every row, and the commands at full size are printed. A reduced run tells what
the machinery does, not what a 7B model on a 4090 does: its times are to be compared with each other, not with those published.
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

from bench.data import documents
from bench.dimensions import LLAMA_7B, LLAMA_13B, LLAMA_68M, config_of
from bench.jobs import summarized
from bench.needle import needles
from bench.options import Output
from bench.overlap import ALL, OURS, STATIC
from bench.published import DRAFT, RECIPES, THIRTEEN, Options, Row
from bench.record import prepare, save, show
from bench.text import DEMO, text_tokens
from decoding import Engine, Settings
from decoding.forecast import ACCEPTANCE, INNER_ACCEPTANCE, accepted_with, forecast
from decoding.hardware import Hardware
from decoding.planning import outlook
from decoding.sizes import Sizes
from offload import TierForceError

NEEDLE = "needle"
FEW = 12  # tokens of plain decoding over an emulated link, which is slow
CHARACTERS = 5  # of a token, at most: what is cut is long enough


@dataclass(frozen=True)
class Study:
    """Where documents come from, and where commands leave their files."""

    data: str | None
    folder: Path
    console: Console

    def say(self, line: str) -> None:
        self.console.print(line, style="bold", highlight=False, markup=False, soft_wrap=True)


def here(row: Row) -> bool:
    """Whether it can be run as published on this machine."""
    cached = all(isinstance(try_to_load_from_cache(name, "config.json"), str) for name in (row.checkpoint, DRAFT))
    return cached and torch.cuda.device_count() >= row.full["gpus"]


def flags(options: Options) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def command(model: str, draft: str, mode: str, options: Options) -> list[str]:
    return ["--model", model, "--draft", draft, "--mode", mode, *flags(options)]


def published_commands(row: Row) -> list[str]:
    """What to type for it at full size."""
    kinds = [("hierarchical", row.full)] + ([("plain", row.full | row.plain_full)] if row.plain else [])
    files = ["--input", "books/", "--output", "records.jsonl"]
    return [shlex.join(["tierforce", "summarize", *command(row.checkpoint, DRAFT, *kind), *files]) for kind in kinds]


def measured(study: Study, row: Row, mode: str, books: int) -> dict[str, float | None]:
    """Medians over the books' records; {} where the row needs a checkpoint that is not here."""
    if not (full := here(row)) and row.small is None:
        return {}
    options = dict(row.full if full or row.small is None else row.small)
    model, draft = (row.checkpoint, DRAFT) if full else (str(DEMO / "target"), str(DEMO / "draft"))
    if mode == "plain":
        options |= row.plain_full if full else {}
        slow = str(options.get("link", "")).startswith("emulated")
        options["max_new_tokens"] = FEW if slow and books == 1 else options["max_new_tokens"]
    texts = documents(study.data, books, CHARACTERS * options["context"] if study.data else 1)
    records = summarized(study.folder, mode, texts, command(model, draft, mode, options), study.say)
    failed = [record["error"] for record in records if "error" in record]
    if failed:
        raise TierForceError(f"a document failed: {failed[0]}")
    return {
        "ms": statistics.median(record["ms_per_token"] for record in records),
        "first s": statistics.median(record["time_to_first_token_s"] for record in records),
        "acceptance": statistics.median(record["acceptance"].get("target", 0.0) for record in records),
        "tokens": statistics.median(record["tokens_per_verification"] or 1.0 for record in records),
    }


def predicted(row: Row, mode: str) -> float | None:
    """Ms a token on the hardware that the published figure is of, with its settings, all KV's host memory taken as there."""
    options = row.full | (row.plain_full if mode == "plain" else {})
    machine = replace(Hardware.find(row.hardware), host_memory=256e9)
    known = {name: options[name] for name in ("budget", "draft_length", "resident_layers", "chunk_size") if name in options}
    target, dtype = config_of(LLAMA_13B if row.checkpoint == THIRTEEN else LLAMA_7B), torch.float16
    sizes = Sizes(target, config_of(LLAMA_68M), mode, Settings(mode=mode, **known), dtype, options["gpus"], 1, True)
    prompt, new = options["context"] - options["max_new_tokens"], options["max_new_tokens"]
    try:
        plan, _ = outlook(sizes, machine, prompt, new)
    except TierForceError:  # other engines hold other things on the device: as many layers as fit ours, then
        sizes = replace(sizes, settings=replace(sizes.settings, resident_layers=None))
        plan, _ = outlook(sizes, machine, prompt, new)
    accepted = accepted_with(ACCEPTANCE, sizes.budget)
    return 1e3 * forecast(sizes, plan, machine, prompt, new, accepted, INNER_ACCEPTANCE).token_s


def result(study: Study, row: Row, books: int) -> dict[str, Any]:
    """One line of the table."""
    ours = measured(study, row, "hierarchical", books)
    plain = measured(study, row, "plain", books) if row.plain else {}
    said, said_plain = predicted(row, "hierarchical"), predicted(row, "plain") if row.plain else None
    return {
        "": row.name,
        "published ms": row.published,
        "plain": row.published_plain,
        "times": row.published_gain,
        "predicted ms": said,
        "plain ": said_plain,
        "times ": _ratio(said_plain, said),
        "measured here": "not here" if not ours else "as published" if here(row) else "reduced",
        "ms": ours.get("ms"),
        "plain  ": plain.get("ms"),
        "times  ": _ratio(plain.get("ms"), ours.get("ms")),
        "acceptance": ours.get("acceptance"),
        "tokens per verification": ours.get("tokens"),
        "first token s": ours.get("first s"),
    }


def _ratio(slow: float | None, fast: float | None) -> float | None:
    return slow / fast if slow and fast else None


def needle_rows(context: int) -> list[dict[str, Any]]:
    """Retrieval against StreamingLLM drafting, with the built-in target and a model made by hand that can recall."""
    engine = Engine.from_pretrained(DEMO / "target", None, Settings(dtype="float32", mode="retrieval"))
    window = next(each for each in ALL if each.policy == "window")
    tokens = text_tokens(engine.tokenizer)
    return needles(engine.models, engine.tokenizer, tokens, context, (window, STATIC, OURS))


def main(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join([*RECIPES, NEEDLE])}.")],
    data: Annotated[
        str | None, typer.Option(help="pg19, narrativeqa, or a folder of texts; by default Python's reference.")
    ] = None,
    rows: Annotated[str, typer.Option(help="Parts of the names of rows to run; all by default.")] = "",
    output: Output = Path("results/recipe.json"),
) -> None:
    """Run one published experiment, as published where this machine can, and at reduced size where it cannot."""
    prepare(0)
    if name not in (*RECIPES, NEEDLE):
        raise typer.BadParameter(f"{name} is not one of {', '.join([*RECIPES, NEEDLE])}")
    console = Console(stderr=True)
    output = output.with_stem(f"{output.stem}-{name}") if output == Path("results/recipe.json") else output
    if name == NEEDLE:
        found = needle_rows(16_384)
        show("A needle in 16,384 tokens: retrieval against a window (StreamingLLM), at a budget of 768", found)
        print("At full size: python -m bench.acceptance --parts needle --target <checkpoint> --contexts 130048 --text <a book>")
        save(output, {"recipe": name, "rows": found})
        return
    recipe = RECIPES[name]
    chosen = [row for row in recipe.rows if not rows or any(part.strip() in row.name for part in rows.split(","))]
    if not chosen:
        raise typer.BadParameter(f"no row is named like that: {', '.join(row.name for row in recipe.rows)}", param_hint="--rows")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        study = Study(data, Path(folder), console)
        try:
            for row in chosen:
                found.append(result(study, row, 3 if name == "summaries" else 1))
                save(output, {"recipe": name, "about": recipe.about, "rows": found}, quiet=True)
        except KeyboardInterrupt:
            console.print("interrupted: what is finished is kept")
        except TierForceError as error:
            console.print(f"{row.name}: {error}", highlight=False, markup=False)
            raise typer.Exit(1) from None
    if found:
        show(f"{recipe.about}. Times are ms/token: published, predicted for that hardware, measured on this machine", found)
        save(output, {"recipe": name, "about": recipe.about, "rows": found})
    print("At full size:")
    for row in chosen:
        for line in published_commands(row):
            print(f"  {line}")


if __name__ == "__main__":
    typer.run(main)
