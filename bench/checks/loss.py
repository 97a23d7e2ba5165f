"""Loss per token by position, compared with transformers, with and without RoPE scaling.

This shows up to which length a model is usable, that `--rope yarn:FACTOR` works, and that our
logits agree with transformers' at any length. A text is processed once, in chunks; the loss at a
length is the mean of -log p over the last tokens before it. Finished rows are saved, so that an
interrupted run leaves its results.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from transformers import DynamicCache

from bench.harness import options as opt
from bench.harness.experiment import Measurement, Row, benchmark
from bench.harness.tables import say
from bench.harness.text import prompt_tokens
from bench.peers.hugging_face import load_transformers
from decoding import Engine, Settings
from decoding.engine.session import SequenceState
from parallel.model.loading import resolve
from parallel.ranks.process_group import TensorParallelGroup

CHUNK = 512  # tokens per forward


def our_logits(engine: Engine, tokens: list[int]) -> Iterator[Tensor]:
    """Yield our logits (T, V), chunk by chunk."""
    session = SequenceState(engine.runtime, tokens, 1)
    model, cache = engine.runtime.target, session.target
    for part in session.prompt.split(CHUNK):
        yield model(part, cache, len(part))
        cache.advance(len(part))


@torch.inference_mode()
def their_logits(model: Any, tokens: list[int]) -> Iterator[Tensor]:
    """Yield transformers' logits (T, V), chunk by chunk."""
    cache = DynamicCache(config=model.config)
    for part in torch.tensor([tokens]).split(CHUNK, dim=1):
        yield model(part, past_key_values=cache).logits[0].float()


def losses(logits: Iterator[Tensor], tokens: list[int], name: str) -> Tensor:
    """Return -log p of each token except the first, (T - 1,)."""
    next_tokens, parts = torch.tensor(tokens[1:]), list[Tensor]()
    started, done = time.perf_counter(), 0
    for part in logits:
        targets = next_tokens[done : done + len(part)]
        parts.append(F.cross_entropy(part[: len(targets)], targets, reduction="none"))
        done += len(part)
        if done % (8 * CHUNK) == 0:
            say(f"{name}: {done:,} tokens, {time.perf_counter() - started:.0f} s")
    return torch.cat(parts)


@benchmark("Loss of the last {last:,} tokens before each length, nats/token, {dtype}")
def main(
    target: opt.Target = opt.SMOLLM2,
    text: opt.Text = None,
    contexts: opt.Contexts = "4096,8192,16384,32768",
    ropes: Annotated[
        str, typer.Option(help="RoPE scalings, separated by commas; none: the model's own.")
    ] = "none,yarn:4",
    last: Annotated[int, typer.Option(help="Tokens whose loss is averaged per length.")] = 1024,
    peer: Annotated[bool, typer.Option(help="Also run transformers.")] = True,
    dtype: opt.Dtype = "float32",
    threads: opt.Threads = 0,
    output: opt.Output = Path("results/loss.json"),
) -> Measurement:
    """Measure the loss per token at each length of one text."""
    lengths, rows = opt.integers(contexts), list[Row]()
    for rope in ropes.split(","):
        # the draft length bounds the tokens of a forward; without RoPE, length is unlimited
        settings = Settings(
            mode="plain",
            dtype=dtype,
            rope=None if rope == "none" else rope,
            num_draft_tokens=CHUNK,
            link="view",
        )
        engine = Engine.from_pretrained(target, settings=settings)
        tokens = prompt_tokens(engine.tokenizer, max(lengths), text)
        ours = losses(our_logits(engine, tokens), tokens, f"rope {rope}")
        rows += [row_of(length, rope, ours, last) for length in lengths]
        yield {"rows": rows}
        if not peer:
            continue
        model, scratch = resolve(target, TensorParallelGroup()), output.parent / "converted"
        hf = load_transformers(model, dtype, scratch, settings.rope)
        theirs = losses(their_logits(hf, tokens), tokens, f"rope {rope}, transformers")
        rows[-len(lengths) :] = [row_of(length, rope, ours, last, theirs) for length in lengths]
        yield {"rows": rows}


def row_of(length: int, rope: str, ours: Tensor, last: int, theirs: Tensor | None = None) -> Row:
    """Return the row of one length, given the losses of all tokens."""
    part = slice(length - last - 1, length - 1)
    mean = float(ours[part].mean())
    return {
        "tokens": length,
        "rope": rope,
        "loss": mean,
        "perplexity": math.exp(mean),
        "transformers_loss": None if theirs is None else float(theirs[part].mean()),
    }
