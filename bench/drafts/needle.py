"""A needle in a long text: something said once and asked for at the end.

Does the proposer still know it? A window of recent tokens cannot know. Retrieval can, if its
selection finds the place. A sentence is planted in a real text; the question comes behind it,
through the model's chat template, and the answer is begun in the sentence's own words. What follows
in the sentence is given (teacher-forced), and each token of it is judged by the plain laws, at
temperature 1: what full attention gives it, what the policy gives it, and the probability that the
policy's proposal would stand there.
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

NEEDLES = [  # a question, how its answer begins, and the words that only the text can tell
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


def needles(
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
        prompt = planted(tokenizer, tokens, context, number, depth)
        answer = _plain(tokenizer, NEEDLES[number][2])
        judged = judge(runtime, prompt, answer, variants)
        say(f"needle {number + 1} at {depth:g}: probability {judged[FULL]['probability']:.2f}")
        for policy, each in judged.items():
            scores.setdefault(policy, []).append(each)
    return [
        {"policy": policy}
        | {name: statistics.fmean(each[name] for each in found) for name in found[0]}
        for policy, found in scores.items()
    ]


def judge(
    runtime: Runtime, prompt: list[int], answer: list[int], variants: Sequence[Variant]
) -> dict[str, Scores]:
    """Return means over the answer by policy, with a verification every INTERVAL tokens."""
    trace = PolicyTrace(runtime, prompt, len(answer), variants, INTERVAL)
    sampling = Sampling(1.0, top_p=1)
    model, target = trace.model, trace.target
    # the prompt's last token is read once more, so that the first of the answer is judged too
    target.crop(len(prompt) - 1)
    for cache in trace.caches.values():
        # each verification selects, though the first one ends where the prompt did
        cache.selector.min_interval = 0
    laws: dict[str, list[Tensor]] = {FULL: []}
    for rows in torch.tensor([*prompt[-1:], *answer[:-1]]).split(INTERVAL):
        for variant, cache in trace.caches.items():
            laws.setdefault(variant.name, []).append(sampling.probs(model(rows, cache, len(rows))))
        laws[FULL].append(sampling.probs(model(rows, target, len(rows))))
        target.advance(len(rows))
    following = torch.tensor(answer)[:, None]
    truth = torch.cat(laws[FULL])
    p = truth.gather(1, following)
    scores: dict[str, Scores] = {}
    for policy, parts in laws.items():
        law = torch.cat(parts)
        q = law.gather(1, following)
        scores[policy] = {
            "probability": float(q.mean()),
            "overlap": float(torch.minimum(law, truth).sum(1).mean()),
            "stands": float((q / p).clamp(max=1).mean()),
        }
    return scores


def planted(
    tokenizer: Any, tokens: Sequence[int], context: int, number: int, depth: float
) -> list[int]:
    """Return `context` tokens: a needle at `depth` of a text, its question, its answer begun."""
    question, begun, answer = NEEDLES[number]
    needle = _plain(tokenizer, f"\n\n{begun}{answer}\n\n")
    before, after = Template.summary(tokenizer, question).around(tokenizer)
    asked = [*after, *_plain(tokenizer, begun)]
    room = context - len(before) - len(needle) - len(asked)
    if not 0 < room <= len(tokens):
        raise TierForceError(
            f"--context {context} leaves {room} tokens for the text, which has {len(tokens)}: use "
            "another context, or a longer --text."
        )
    start = number * max(0, len(tokens) - room) // len(NEEDLES)
    text = list(tokens[start : start + room])
    at = int(depth * room)
    return [*before, *text[:at], *needle, *text[at:], *asked]


def _plain(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return tokens


@benchmark(
    "A needle in {context:,} tokens, asked for at the end: budget {retrieval_budget:,}, {dtype}"
)
def main(
    target: opt.Target = opt.SMOLLM2,
    rope: opt.Rope = None,
    text: opt.Text = None,
    context: opt.Context = opt.NATIVE,
    retrieval_budget: opt.Budget = 768,
    depths: Annotated[str, typer.Option(help="Shares of the text before the needle.")] = ",".join(
        map(str, DEPTHS)
    ),
    dtype: opt.Dtype = "float32",
    threads: opt.Threads = 0,
    output: opt.Output = Path("results/needle.json"),
) -> Measurement:
    """Judge full attention, a window (StreamingLLM) and retrieval at one budget."""
    settings = Settings(mode="retrieval", rope=rope, dtype=dtype)
    engine = Engine.from_pretrained(target, settings=settings)
    tokens = text_tokens(engine.tokenizer, text)
    variants = [replace(each, budget=retrieval_budget) for each in ALL]
    where = opt.decimals(depths)
    yield {"rows": needles(engine.runtime, engine.tokenizer, tokens, context, variants, where)}
