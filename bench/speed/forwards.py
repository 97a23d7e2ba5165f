"""Time of one forward by context: of the target, on the retrieval cache, and of the draft model.

The physics: a decoding step and a verification read the whole KV cache, so their times grow with
the context; the extra query tokens of a verification only cost arithmetic. Forwards of the lower
levels use caches of fixed size, and their times must not grow. One rank and no link. Without a
draft model, its forwards are left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.harness import options as opt
from bench.harness.experiment import Measurement, Row, benchmark
from bench.harness.tables import say
from bench.harness.text import prompt_tokens
from decoding import Engine, Settings
from decoding.engine.session import SequenceState
from offload.cache.base import Cache
from offload.cache.static_shape import StaticCache
from offload.cache.streaming import StreamingCache
from parallel.execution.cuda_graphs import GraphRunner
from parallel.model.transformer import Transformer

# (model, tokens, cache, num_logits) -> logits (num_logits, V): a model's call, or a GraphRunner
ForwardRunner = Callable[[Transformer, torch.Tensor, Cache, int], torch.Tensor]
DRAFTED = 64  # new tokens that the caches have room for


def median_ms(
    model: Transformer,
    cache: Cache,
    tokens: torch.Tensor,
    repeats: int,
    run: ForwardRunner = Transformer.__call__,
) -> float:
    """Return the median time of a forward over these tokens, after a warm-up.

    A forward ends when its logits are available. The cache does not advance.
    """
    times = []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        run(model, tokens, cache, len(tokens))[-1, 0].item()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def forward_times(session: SequenceState, repeats: int) -> dict[str, float]:
    """Return milliseconds of forwards by level and number of query tokens.

    A refresh is a forward that reselects the retrieval cache. "Not recorded" is a short forward
    without CUDA graphs, where these are used otherwise.
    """
    target, model, tokens = session.target, session.runtime.target, session.prompt
    observers, target.observers = target.observers, []
    times = {
        f"target_{rows}": median_ms(model, target, tokens[:rows], repeats) for rows in (1, 17, 33)
    }
    target.observers = observers
    short: list[tuple[str, Transformer, StaticCache, int]] = []
    if session.retrieval is not None:
        # reselect although the sequence does not advance
        session.retrieval.selector.min_interval = 0
        times["target_33_refresh"] = median_ms(model, target, tokens[:33], repeats)
        short += [(f"retrieval_{rows}", model, session.retrieval, rows) for rows in (1, 2)]
    for drafting in session.levels:
        if isinstance(drafting.cache, StreamingCache):
            short.append(("draft_1", drafting.model, drafting.cache, 1))
    for name, level, cache, rows in short:
        measured = short_forwards(session.slot.graphs, level, cache, tokens[:rows], 5 * repeats)
        times |= {f"{name}{suffix}": ms for suffix, ms in measured.items()}
    return times


def short_forwards(
    run: GraphRunner, model: Transformer, cache: StaticCache, tokens: torch.Tensor, repeats: int
) -> dict[str, float]:
    """Return times with the session's runner and, if it uses CUDA graphs, also without graphs."""
    times = {"": median_ms(model, cache, tokens, repeats, run)}
    if run.enabled:
        times["_not_recorded"] = median_ms(model, cache, tokens, repeats)
    return times


@benchmark(
    "Milliseconds per forward, by level and query tokens: {dtype}, budget {retrieval_budget}, "
    "{threads} threads"
)
def main(
    target: opt.Target = opt.SMOLLM2,
    draft: opt.Draft = None,
    rope: opt.Rope = None,
    text: opt.Text = None,
    contexts: opt.Contexts = "1856,3712,7424",
    retrieval_budget: opt.Budget = 1024,
    dtype: opt.Dtype = "bfloat16",
    threads: opt.Threads = 0,
    repeats: opt.Repeats = 9,
    output: opt.Output = Path("results/forwards.json"),
) -> Measurement:
    """Prefill prompts of increasing length, and time every kind of forward after each."""
    settings = Settings(rope=rope, dtype=dtype, retrieval_budget=retrieval_budget)
    engine = Engine.from_pretrained(target, draft, settings)
    lengths = opt.integers(contexts)
    tokens = prompt_tokens(engine.tokenizer, max(lengths), text)
    rows, peak = list[Row](), 0
    for context in lengths:
        started = time.perf_counter()
        session = SequenceState(engine.runtime, tokens[:context], DRAFTED)
        session.prefill()
        prefill_s = time.perf_counter() - started
        rows.append({"tokens": context, "prefill_s": prefill_s, **forward_times(session, repeats)})
        session.close()
        peak = max(peak, *(nbytes or 0 for nbytes in session.peaks.values()))
        say(f"{context:,} tokens: a decoding step takes {rows[-1]['target_1']:.1f} ms")
        yield {"rows": rows, "peak_rss_bytes": peak}
