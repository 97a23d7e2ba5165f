"""A needle in a long document: a sentence planted early, and a question about it at the end.

A window of recent tokens cannot recall it; retrieval can, if it selects the sentence. The sentence
is planted in a real document; the question follows in the model's chat template, and the answer
begins with the sentence's own words. The rest of the sentence is teacher-forced, and each of its
tokens is scored at temperature 1: its probability under full attention and under the policy, and
the probability that a draft token of the policy is accepted there.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from bench.drafts.overlap import ALL, PolicyTrace, Variant
from bench.harness import options as opt
from bench.harness.experiment import Measurement, Row, benchmark
from bench.harness.tables import say
from bench.harness.text import text_tokens
from decoding import Engine, Sampling, Settings
from decoding.models.runtime import Runtime
from decoding.text.prompt import Template
from offload.errors import TierForceError

NEEDLES = [  # question, start of the answer, and the words that only the document has
    (
        "What is the secret word of the lighthouse keeper?",
        "The secret word of the lighthouse keeper is",
        " marigold thunder seventeen.",
    ),
    (
        "Where does Captain Ferrovance keep his treasure?",
        "Captain Ferrovance keeps his treasure",
        " beneath the crooked willow by the abbey wall.",
    ),
    (
        "What name did Miss Abernathy write upon the glass?",
        "The name that Miss Abernathy wrote upon the glass was",
        " Zebulon Quickwater of Tamworth.",
    ),
    (
        "Where does Doctor Pellworm come from?",
        "Doctor Pellworm comes from",
        " the island of Vostrakia in the frozen sea.",
    ),
]
DEPTHS = (0.1, 0.3, 0.5)
FULL = "full attention"
INTERVAL = 4  # tokens between verifications
Scores = dict[str, float]


def needle_rows(
    runtime: Runtime,
    tokenizer: Any,
    tokens: Sequence[int],
    context: int,
    variants: Sequence[Variant],
    depths: Sequence[float] = DEPTHS,
) -> list[Row]:
    """Return a row per policy, full attention first: means over the planted tokens."""
    scores: dict[str, list[Scores]] = {}
    for number, depth in product(range(len(NEEDLES)), depths):
        prompt = planted_prompt(tokenizer, tokens, context, number, depth)
        answer = _encode(tokenizer, NEEDLES[number][2])
        by_policy = score(runtime, prompt, answer, variants)
        say(f"needle {number + 1} at {depth:g}: probability {by_policy[FULL]['probability']:.2f}")
        for policy, needle_scores in by_policy.items():
            scores.setdefault(policy, []).append(needle_scores)
    return [
        {"policy": policy}
        | {name: statistics.fmean(entry[name] for entry in entries) for name in entries[0]}
        for policy, entries in scores.items()
    ]


def score(
    runtime: Runtime, prompt: list[int], answer: list[int], variants: Sequence[Variant]
) -> dict[str, Scores]:
    """Return means over the answer by policy, with a verification every INTERVAL tokens."""
    trace = PolicyTrace(runtime, prompt, len(answer), variants, INTERVAL)
    sampling = Sampling(1.0, top_p=1)
    model, target = trace.model, trace.target
    # repeat the prompt's last token, so that the first token of the answer is scored, too
    target.crop(len(prompt) - 1)
    for cache in trace.caches.values():
        # every verification selects, even the first, which ends at the end of the prompt
        cache.selector.min_interval = 0
    parts: dict[str, list[Tensor]] = {FULL: []}
    for chunk in torch.tensor([*prompt[-1:], *answer[:-1]]).split(INTERVAL):
        for variant, cache in trace.caches.items():
            probs = sampling.probs(model(chunk, cache, len(chunk)))
            parts.setdefault(variant.name, []).append(probs)
        parts[FULL].append(sampling.probs(model(chunk, target, len(chunk))))
        target.advance(len(chunk))
    next_tokens = torch.tensor(answer)[:, None]
    target_probs = torch.cat(parts[FULL])
    p = target_probs.gather(1, next_tokens)
    scores: dict[str, Scores] = {}
    for policy, policy_parts in parts.items():
        draft_probs = torch.cat(policy_parts)
        q = draft_probs.gather(1, next_tokens)
        scores[policy] = {
            "probability": float(q.mean()),
            "overlap": float(torch.minimum(draft_probs, target_probs).sum(1).mean()),
            "stands": float((q / p).clamp(max=1).mean()),
        }
    return scores


def planted_prompt(
    tokenizer: Any, tokens: Sequence[int], context: int, number: int, depth: float
) -> list[int]:
    """Return `context` tokens: a document with a needle at `depth`, question, start of answer."""
    question, answer_start, answer = NEEDLES[number]
    needle = _encode(tokenizer, f"\n\n{answer_start}{answer}\n\n")
    before, after = Template.summary(tokenizer, question).around(tokenizer)
    after = [*after, *_encode(tokenizer, answer_start)]
    room = context - len(before) - len(needle) - len(after)
    if not 0 < room <= len(tokens):
        raise TierForceError(
            f"--context {context} leaves {room} tokens for the text, which has {len(tokens)}: use "
            "another context, or a longer --text."
        )
    start = number * max(0, len(tokens) - room) // len(NEEDLES)
    document = list(tokens[start : start + room])
    position = int(depth * room)
    return [*before, *document[:position], *needle, *document[position:], *after]


def _encode(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return tokens


@benchmark("Recall of a needle in {context:,} tokens: budget {retrieval_budget:,}, {dtype}")
def main(
    target: opt.Target = opt.SMOLLM2,
    rope: opt.Rope = None,
    text: opt.Text = None,
    context: opt.Context = opt.NATIVE,
    retrieval_budget: opt.Budget = 768,
    depths: Annotated[
        str, typer.Option(help="Shares of the document before the needle.")
    ] = ",".join(map(str, DEPTHS)),
    dtype: opt.Dtype = "float32",
    threads: opt.Threads = 0,
    output: opt.Output = Path("results/needle.json"),
) -> Measurement:
    """Score full attention, a window (StreamingLLM) and retrieval with one budget."""
    settings = Settings(mode="retrieval", rope=rope, dtype=dtype)
    engine = Engine.from_pretrained(target, settings=settings)
    tokens = text_tokens(engine.tokenizer, text)
    variants = [replace(variant, budget=retrieval_budget) for variant in ALL]
    shares = opt.decimals(depths)
    rows = needle_rows(engine.runtime, engine.tokenizer, tokens, context, variants, shares)
    yield {"rows": rows}
