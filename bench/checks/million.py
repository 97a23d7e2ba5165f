"""A text of 1,048,576 tokens, read and continued over a link, beside equations of their own.

The model has two layers and one key/value head, so that this machine can; what it counts, where it
writes and which positions it turns by are those of a long text all the same. Its weights are
random, and such that a row attends to some hundred keys of the whole text. Keys and values of both
layers are compared where they lie at the end, at some positions, and the logits that tokens were
drawn from. All keys of the first layer are the equations' own; behind it they attend to what the
cache holds. What the run takes is held to its plan, as in `bench memory`.
"""

from __future__ import annotations

import gc
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.checks.equations import Equations
from bench.checks.memory import limit_memory, planned_bytes
from bench.harness.decode_loop import decode_loop
from bench.harness.options import Budget, NewTokens, Output, Text
from bench.harness.process import Died, call_in_process
from bench.harness.record import benchmark, prepare
from bench.harness.summarizing import TARGET, conclude
from bench.harness.tables import say, show
from bench.harness.text import prompt_tokens
from decoding import Engine, Sampling, Settings
from decoding.engine.session import Session
from decoding.models.loading import load_tokenizer
from offload.tiered.kv_file import Excerpt

_LAYERS, _HEADS, _WIDTH, _HIDDEN, _INNER = 2, 2, 64, 128, 256
_THETA = 5e6  # turns slowly enough that a million positions differ
# deviations of scores, and of what attention adds to a row of deviation 1
_SCORES, _ADDED = 3.0, 0.5
_CLOSE = {"float32": 100, "bfloat16": 50_000}  # ppm
_MOST_BYTES = 1.01  # times those expected: the boundary moves
_POSITIONS = 200


@dataclass(frozen=True)
class Job:
    """What is read and how, for a process of its own."""

    folder: Path
    tokens: int
    new: int
    rate: float
    budget: int
    text: Path | None


@dataclass(frozen=True)
class Row:
    """How far something is from the equations, at the worst of the positions."""

    dtype: str
    what: str
    positions: int
    last_position: int
    error_ppm: float
    allowed_ppm: float

    @property
    def held(self) -> bool:
        return self.error_ppm <= self.allowed_ppm


@dataclass(frozen=True)
class Run:
    """What a run took. GB are 1e9 bytes."""

    dtype: str
    prefill_s: float
    ms_per_token: float
    verifications: int
    tokens_per_verification: float | None
    link_gb: float  # while decoding
    link_share: float  # of what its verifications should have asked for
    planned_gb: float  # device and host, which are one here
    kv_gb: float


def write_model(folder: Path, positions: int) -> None:
    """Write a model of random weights, with the tokenizer of the built-in pair."""
    tokenizer = load_tokenizer(Path(TARGET))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=_HIDDEN,
        intermediate_size=_INNER,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=1,
        head_dim=_WIDTH,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": _THETA},
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    of_scores = (_SCORES / _HIDDEN) ** 0.5  # of queries and keys, whose product is over sqrt(D)
    deviations = {"q_proj": of_scores, "k_proj": of_scores, "embed_tokens": 1.0}
    # a row attends to some hundred of a million keys: their mean has a tenth of their deviation
    deviations["o_proj"] = _ADDED / (0.1 * (_HEADS * _WIDTH) ** 0.5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = name.split(".")[-2]
            deviation = deviations.get(part, parameter.shape[-1] ** -0.5)
            if "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
    # the very same numbers in both dtypes
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def places(tokens: int, ends: int, count: int) -> Tensor:
    """Return `count` positions of a text: its beginning, powers of two, its end, and between.

    `ends` are the positions at its end that all belong to it.
    """
    powers = [side + (1 << power) for power in range(tokens.bit_length()) for side in (-1, 0)]
    chosen = {0, *range(tokens - ends, tokens)} | {each for each in powers if each < tokens}
    spread = torch.linspace(0, tokens - 1, count).round().long().tolist()
    for each in sorted(spread, key=lambda place: place * 7919 % count):
        if len(chosen) >= count:
            break
        chosen.add(each)
    return torch.tensor(sorted(chosen))


def furthest(found: Tensor, right: Tensor) -> float:
    """Return how far rows (P, N) are from the right ones, in ppm of their length, at the worst."""
    apart = (found.double() - right).norm(dim=1)
    return 1e6 * float((apart / right.norm(dim=1)).max())


@torch.inference_mode()
def compared(dtype: str, job: Job) -> tuple[list[Row], Run]:
    """Read the text and go on with it, within its plan; compare it with the equations."""
    settings = Settings(
        mode="hierarchical",
        dtype=dtype,
        link=f"emulated:{job.rate:g}",
        resident_layers=0,
        budget=job.budget,
        context=job.tokens + job.new,
    )
    folder = str(job.folder)
    engine = Engine.from_pretrained(folder, folder, settings, device="cpu")
    list(engine.generate([1] * 300, 20))  # threads and their memory
    prompt = prompt_tokens(engine.tokenizer, job.tokens, job.text)
    gc.collect()
    place = engine.runtime.plan(len(prompt), job.new)
    with limit_memory(place, 1.0):
        session = Session(engine.runtime, prompt, job.new)
        started = time.perf_counter()
        logits = [session.prefill()]
        prefill_s = time.perf_counter() - started
        first, before = int(logits[0].argmax()), session.target.traffic.link_in
        decoder, seconds = decode_loop(
            session,
            first,
            Sampling(1.0, top_p=1),
            observe=lambda more: logits.append(more.float().clone()),
        )
        decoder.sync([])
    target, text = session.target, decoder.text.since(0)
    link = target.traffic.link_in - before
    kv = target.shape.layout.bytes(target.boundary, _LAYERS)
    run = Run(
        dtype,
        prefill_s,
        1e3 * seconds / decoder.stats.produced,
        decoder.stats.passes,
        decoder.stats.tokens_per_pass,
        link / 1e9,
        link / (kv * decoder.stats.passes),
        planned_bytes(place) / 1e9,
        kv / 1e9,
    )
    rows = _against_equations(session, text, torch.cat(logits), job, dtype)
    session.close()
    return rows, run


def _against_equations(
    session: Session, text: list[int], logits: Tensor, job: Job, dtype: str
) -> list[Row]:
    """Compare what the target's cache holds of a text, and the logits (N, V) behind its prompt."""
    equations, tokens = Equations(job.folder), torch.tensor(text)
    held, last = session.target.length, job.tokens - 1  # of the prompt
    at = places(held, held - last, _POSITIONS)
    rows = []

    def compare(what: str, positions: Tensor, found: Tensor, right: Tensor) -> None:
        error, end = furthest(found, right), int(positions[-1])
        rows.append(Row(dtype, what, len(positions), end, error, _CLOSE[dtype]))

    hidden = equations.embed(tokens[at])
    for layer, excerpt in enumerate(session.target.excerpts()):
        there = torch.cat([excerpt(0, place, place + 1) for place in at.tolist()], dim=1)
        for what, found, right in zip(
            ("keys", "values"), there, equations.kv(layer, hidden, at), strict=True
        ):
            compare(f"{what} of layer {layer}", at, found, right)

        def computed(start: int, end: int) -> tuple[Tensor, Tensor]:
            embedded = equations.embed(tokens[start:end])
            return equations.kv(0, embedded, torch.arange(start, end))

        def kept(start: int, end: int, excerpt: Excerpt = excerpt) -> tuple[Tensor, Tensor]:
            keys, values = excerpt(0, start, end)
            return keys, values

        hidden = equations.layer(layer, hidden, at, kept if layer else computed)
    behind = at >= last
    compare("logits", at[behind], logits[at[behind] - last], equations.logits(hidden[behind]))
    return rows


def complaints(rows: list[Row], runs: list[Run]) -> list[str]:
    """Return what is wrong, in words."""
    wrong = [
        f"{row.dtype}: {row.what} are off by {row.error_ppm:.1f} ppm, and {row.allowed_ppm} are "
        "allowed"
        for row in rows
        if not row.held
    ]
    for run in runs:
        if not 1 / _MOST_BYTES < run.link_share < _MOST_BYTES:
            wrong.append(
                f"{run.dtype}: {run.link_share:.3f} times the bytes of its verifications came over "
                "the link"
            )
    return wrong


@benchmark
def main(
    text: Text = None,
    tokens: Annotated[int, typer.Option(help="Prompt tokens.")] = 1 << 20,
    new_tokens: NewTokens = 48,
    dtypes: Annotated[str, typer.Option(help="Separated by commas.")] = "bfloat16,float32",
    rate: Annotated[float, typer.Option(help="Emulated link, GB/s.")] = 1.0,
    budget: Budget = 4096,
    output: Output = Path("results/million.json"),
) -> None:
    """Read a very long text hierarchically over a link, and compare it with equations."""
    prepare(0)
    rows, runs, wrong = list[Row](), list[Run](), list[str]()
    with tempfile.TemporaryDirectory(prefix="tierforce-million-") as place:
        write_model(Path(place), tokens + 2 * new_tokens)
        job = Job(Path(place), tokens, new_tokens, rate, budget, text)
        for dtype in dtypes.split(","):
            say(f"{tokens} tokens in {dtype}")
            found, peak = call_in_process(compared, dtype, job)
            if isinstance(found, Died):
                wrong.append(f"{dtype}: {found}")
                continue
            rows += found[0]
            runs.append(found[1])
            say(f"at most {peak:.2f} GB")
    show("What it took", runs)
    title = f"{tokens} tokens beside equations of their own"
    conclude(output, title, rows, wrong + complaints(rows, runs), runs=runs)
