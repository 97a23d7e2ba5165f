"""Texts at once beside one by one: tokens a second of all of them, and documents an hour.

Both go through the engine as a batch job does, prefill included. Beside them stands transformers'
`generate` on one padded batch of the same prompts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import GenerationConfig

from bench.harness.options import (
    SMOLLM2,
    Context,
    Draft,
    Dtype,
    NewTokens,
    Output,
    Repeats,
    Target,
    Temperature,
    Text,
    Threads,
    TopP,
    integers,
)
from bench.harness.record import benchmark, prepare, publish
from bench.harness.tables import say
from bench.harness.text import prompts, text_tokens, tokenizer_of
from bench.peers.hugging_face import Clock, load_transformers, warped
from decoding import Engine, Sampling, Settings
from decoding.engine.request import Request
from parallel.model.loading import resolve
from parallel.ranks.process_group import Group

RESIDENT = "resident"  # in place of a link: all KV stays in device memory
PADDED = "transformers: a padded batch"
EARLY = ", prompts read early"


@dataclass(frozen=True)
class Row:
    """Texts of one kind, so many at once; times are medians of all runs."""

    way: str  # mode, and the link of its KV
    at_once: int
    read_early: float  # the share of all prompts that was read in passes of other texts
    tokens_s: float  # of all texts together, while any is decoded
    ms_per_token: float  # of a text, as its reader sees it
    prefill_s: float  # of all texts
    decode_s: float
    documents_hour: float
    tokens_per_verification: float | None = None
    verification_s: float | None = None  # the median of all


@dataclass(frozen=True)
class Run:
    """Seconds of one batch, reading and decoding apart, and what was counted."""

    prefill_s: float
    decode_s: float
    tokens: int  # new ones of all texts, but for the first of each
    text_ms: float
    tokens_per_verification: float | None = None
    read_early: float = 0.0
    verification_s: float | None = None


def write(engine: Engine, asked: Sequence[Request], at_once: int, early: bool = False) -> Run:
    """Read and continue all texts, maybe with each prompt read in passes of those before."""
    started = time.perf_counter()
    texts = list(engine.write(asked, at_once, early))
    wall = time.perf_counter() - started
    for text in texts:
        if text.error is not None:
            raise text.error
    stats = [text.stats for text in texts]
    prefill = sum(each.first_token_s for each in stats)
    per_token = [each.ms_per_token or 0.0 for each in stats]
    tops = [each.levels[0].stats for each in stats]
    passes = sum(top.passes for top in tops)
    verifications = [each.verify_s for text in stats for each in text.rounds if each.drafted]
    return Run(
        prefill,
        wall - prefill,
        sum(each.new_tokens - 1 for each in stats),
        statistics.mean(per_token),
        sum(top.produced for top in tops) / passes if passes else None,
        statistics.mean(each.read_early for each in stats),
        statistics.median(verifications) if verifications else None,
    )


def write_padded(model: Any, asked: Sequence[Request]) -> Run:
    """Do the same by `generate`: all prompts are as long, so there is nothing to pad."""
    clock, first = Clock(), asked[0]
    torch.manual_seed(first.sampling.seed)
    batch = torch.tensor([request.prompt for request in asked])
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=first.new,
            logits_processor=[_Noting(clock)],
            **warped(first.sampling),
        )
    ended = time.perf_counter()
    made = out.shape[1] - batch.shape[1] - 1
    decode = ended - clock.times[0]
    return Run(clock.times[0] - started, decode, len(asked) * made, 1e3 * decode / made)


class _Noting:
    """A logits processor that notes when logits come: streamers take no batches."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.clock.put(None)
        return scores


def row(way: str, at_once: int, texts: int, runs: Sequence[Run]) -> Row:
    """Return the row of some runs of the same batch of texts."""
    prefill = statistics.median(run.prefill_s for run in runs)
    decode = statistics.median(run.decode_s for run in runs)
    return Row(
        way,
        at_once,
        runs[-1].read_early,
        statistics.median(run.tokens / run.decode_s for run in runs),
        statistics.median(run.text_ms for run in runs),
        prefill,
        decode,
        3600 * texts / (prefill + decode),
        runs[-1].tokens_per_verification,
        runs[-1].verification_s,
    )


def settings_of(mode: str, link: str, dtype: str) -> Settings:
    """Return the settings of one way to decode."""
    if link == RESIDENT:
        near = "auto" if torch.cuda.is_available() else "view"
        return Settings(mode=mode, dtype=dtype, link=near)
    return Settings(mode=mode, dtype=dtype, link=link, resident_layers=0)


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return how much faster texts are that share passes, or time, by what they are beside."""
    claims = _early_ratios(rows)
    rows = [row for row in rows if EARLY not in row.way]
    for way in dict.fromkeys(row.way for row in rows if row.way != PADDED):
        alone, *shared = [row for row in rows if row.way == way]
        for each in shared:
            claim = f"{way}: tokens a second of {each.at_once} at once, times those one by one"
            claims[claim] = each.tokens_s / alone.tokens_s
            for other in rows:
                if other.way == PADDED and other.at_once == each.at_once:
                    claim = f"{way}: tokens a second of {each.at_once} at once, times {PADDED}'s"
                    claims[claim] = each.tokens_s / other.tokens_s
    return claims


def _early_ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return how many times as many documents are done where prompts are read early."""
    claims = {}
    for early in rows:
        for each in rows:
            if early.way == each.way + EARLY and early.at_once == each.at_once:
                beside = f"{each.way}, {each.at_once} at once, prompts read early"
                ratio = early.documents_hour / each.documents_hour
                claims[f"{beside}: documents an hour, times those without"] = ratio
    return claims


@benchmark
def main(
    target: Target = SMOLLM2,
    draft: Draft = None,
    text: Text = None,
    context: Context = 4096,
    texts: Annotated[int, typer.Option(help="Texts, taken from all over the text.")] = 6,
    at_once: Annotated[
        str, typer.Option(help="Texts at once, separated by commas; 1 comes first.")
    ] = "1,6",
    modes: Annotated[str, typer.Option(help="Modes, separated by commas.")] = "plain,retrieval",
    links: Annotated[
        str, typer.Option(help=f"{RESIDENT}, or links that all KV comes over, separated by commas.")
    ] = f"{RESIDENT},emulated:0.25",
    early: Annotated[
        bool, typer.Option(help="Over links also with each prompt read in passes of others.")
    ] = True,
    padded: Annotated[bool, typer.Option(help="Also transformers' generate.")] = True,
    new_tokens: NewTokens = 128,
    dtype: Dtype = "bfloat16",
    temperature: Temperature = 0.6,
    top_p: TopP = 0.9,
    threads: Threads = 0,
    repeats: Repeats = 1,
    output: Output = Path("results/texts.json"),
) -> None:
    """Decode some texts one by one and at once, in every mode and over every link.

    Over links also with the next prompt read in passes that wait.
    """
    prepare(threads)
    every = text_tokens(tokenizer_of(target), text)
    law = Sampling(temperature, top_p=top_p)
    asked = [
        Request(prompt, new_tokens, law) for prompt in prompts(every, context, texts, new_tokens)
    ]
    counts, rows = integers(at_once), list[Row]()
    ways = [(mode, link) for mode in modes.split(",") for link in links.split(",")]
    for mode, link in ways:
        engine = Engine.from_pretrained(target, draft, settings_of(mode, link, dtype))
        engine.stop_tokens = frozenset()  # all make as many tokens
        kinds = [(count, False) for count in counts]
        if early and link != RESIDENT:
            kinds += [(count, True) for count in counts if count < texts]
        runs: dict[tuple[int, bool], list[Run]] = {kind: [] for kind in kinds}
        for _ in range(repeats):
            for kind in kinds:
                runs[kind].append(write(engine, asked, *kind))
        engine.close()
        for count, is_early in kinds:
            way = f"{mode}, {link}" + (EARLY if is_early else "")
            rows.append(row(way, count, texts, runs[count, is_early]))
            say(f"{rows[-1].way}, {count} at once: {rows[-1].tokens_s:.1f} tokens/s")
    if padded:
        model = load_transformers(
            resolve(target, Group()), dtype, output.parent / "converted", None
        )
        model.generation_config = GenerationConfig(pad_token_id=0)
        found = [write_padded(model, asked) for _ in range(repeats)]
        rows.append(row(PADDED, texts, texts, found))
    title = (
        f"{texts} texts of {context:,} tokens, {new_tokens} new ones each, {dtype}, "
        f"T {temperature}, top-p {top_p}, {torch.get_num_threads()} threads"
    )
    publish(output, title, rows, ratios(rows))
