"""What one pass costs by context: of the target, over the retrieval cache, and of the draft.

The physics: a step and a verification read the whole KV, so they grow with the context; a
verification's further rows cost arithmetic only. Passes of the lower levels run on caches of fixed
size and must not grow. One rank and no link. Without a draft model its passes are left out.
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
from parallel.execution.cuda_graphs import GraphRunner
from parallel.model.transformer import Transformer

# makes logits (rows, V) of model, tokens, cache and rows: the model itself, or a GraphRunner
PassRunner = Callable[[Transformer, torch.Tensor, Cache, int], torch.Tensor]
DRAFTED = 64  # tokens of text behind the prompt that there is room for


def median_ms(
    model: Transformer,
    cache: Cache,
    tokens: torch.Tensor,
    repeats: int,
    run: PassRunner = Transformer.__call__,
) -> float:
    """Return the median time of a pass over these tokens, after one that warms up.

    A pass ends when its logits are there. The cache stays where it is.
    """
    times = []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        run(model, tokens, cache, len(tokens))[-1, 0].item()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def passes(session: SequenceState, repeats: int) -> dict[str, float]:
    """Time passes of every level; milliseconds by level and rows.

    A refresh chooses the retrieval cache anew. "Not recorded" is a short pass without CUDA graphs,
    where it is recorded otherwise.
    """
    target, model, tokens = session.target, session.runtime.target, session.prompt
    followers, target.observers = target.observers, []
    times = {
        f"target_{rows}": median_ms(model, target, tokens[:rows], repeats) for rows in (1, 17, 33)
    }
    target.observers = followers
    short: list[tuple[str, Transformer, StaticCache, int]] = []
    if session.retrieval is not None:
        # the text stands still, and is chosen from all the same
        session.retrieval.selector.min_interval = 0
        times["target_33_refresh"] = median_ms(model, target, tokens[:33], repeats)
        short += [(f"retrieval_{rows}", model, session.retrieval, rows) for rows in (1, 2)]
    if session.draft is not None and session.runtime.draft is not None:
        short.append(("draft_1", session.runtime.draft, session.draft, 1))
    for name, level, cache, rows in short:
        found = short_passes(session.runner, level, cache, tokens[:rows], 5 * repeats)
        times |= {f"{name}{kind}": ms for kind, ms in found.items()}
    return times


def short_passes(
    run: GraphRunner, model: Transformer, cache: StaticCache, tokens: torch.Tensor, repeats: int
) -> dict[str, float]:
    """Time passes as a session makes them and, where these are recorded, without recordings."""
    run.warm_up(model, tokens, cache, len(tokens))
    times = {"": median_ms(model, cache, tokens, repeats, run)}
    if run.enabled:
        times["_not_recorded"] = median_ms(model, cache, tokens, repeats)
    return times


@benchmark(
    "Milliseconds a pass, by level and rows: {dtype}, budget {retrieval_budget}, {threads} threads"
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
    output: opt.Output = Path("results/passes.json"),
) -> Measurement:
    """Read prompts of growing length, and time every kind of pass behind each."""
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
        rows.append({"tokens": context, "prefill_s": prefill_s, **passes(session, repeats)})
        session.close()
        peak = max(peak, *(each or 0 for each in session.peaks.values()))
        say(f"{context:,} tokens: a step takes {rows[-1]['target_1']:.1f} ms")
        yield {"rows": rows, "peak_rss_bytes": peak}
