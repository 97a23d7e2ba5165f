"""A needle in a long text: something said early and asked for at the end.

Does the proposer still know it? A window of recent tokens cannot know. Retrieval can, if its
selection finds the place. The words asked for are given (teacher-forced), and each is judged by the
plain laws, at temperature 1: what full attention gives it, what the policy gives it, and the
probability that the policy's proposal would stand there. Two models are asked: the built-in pair's
target, with sentences in a novel, and a model made by hand that can do nothing but recall
(`bench/drafts/recall.py`), with facts among fillers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bench.drafts import recall
from bench.drafts.overlap import PolicyTrace, Variant
from decoding import Sampling, Settings
from decoding.runtime import Runtime

NEEDLES = [
    ("The secret word of the lighthouse keeper at Saltmarsh is", " marigold thunder seventeen."),
    (
        "Remember that old Captain Ferrovance keeps his treasure",
        " beneath the crooked willow by the abbey wall.",
    ),
    ("The name that Miss Abernathy wrote upon the glass was", " Zebulon Quickwater of Tamworth."),
    (
        "It was known to nobody that Doctor Pellworm came from",
        " the island of Vostrakia in the frozen sea.",
    ),
]
DEPTHS = (0.1, 0.3, 0.5)
FULL = "full attention"
BUILT_IN, RECALL = "built-in target", "made to recall"
INTERVAL = 4  # words between verifications
Scores = tuple[float, float, float]  # probability, overlap, stands


@dataclass(frozen=True)
class Row:
    """Means over the planted words, by model and by who proposes."""

    model: str
    policy: str
    probability: float  # q(word)
    overlap: float
    stands: float  # min(1, q(word) / p(word))


def needles(
    runtime: Runtime,
    tokenizer: Any,
    tokens: Sequence[int],
    context: int,
    variants: Sequence[Variant],
) -> list[Row]:
    """Return a row per model and policy, full attention first."""
    scores: dict[tuple[str, str], list[Scores]] = {}

    def add(model: str, judged: dict[str, Scores]) -> None:
        for policy, each in judged.items():
            scores.setdefault((model, policy), []).append(each)

    for number, depth in product(range(len(NEEDLES)), DEPTHS):
        prompt = _planted(tokenizer, tokens, context, number, depth)
        words = _plain(tokenizer, NEEDLES[number][1])
        add(BUILT_IN, judge(runtime, prompt, words, variants))
    settings = Settings(mode="retrieval")
    by_hand = Runtime.make(recall.recall_model(context + 64), None, "retrieval", settings)
    for index, depth in product(range(recall.FACTS), DEPTHS):
        prompt = _fact_among_fillers(context, index, depth)
        add(RECALL, judge(by_hand, prompt, recall.answer(index), variants))
    return [
        Row(model, policy, *(statistics.fmean(each) for each in zip(*found, strict=True)))
        for (model, policy), found in scores.items()
    ]


def judge(
    runtime: Runtime, prompt: list[int], words: list[int], variants: Sequence[Variant]
) -> dict[str, Scores]:
    """Return means over the words by policy, with a verification every INTERVAL words."""
    trace, sampling = PolicyTrace(runtime, prompt, len(words), variants, INTERVAL), Sampling(1.0)
    model, target = trace.model, trace.target
    # the prompt's last token is read once more, so that the first word is judged too
    target.crop(len(prompt) - 1)
    for cache in trace.caches.values():
        # each verification selects, though the first one ends where the prompt did
        cache.min_interval = 0
    laws: dict[str, list[Tensor]] = {FULL: []}
    for rows in torch.tensor([*prompt[-1:], *words[:-1]]).split(INTERVAL):
        for variant, cache in trace.caches.items():
            laws.setdefault(variant.name, []).append(sampling.law(model(rows, cache, len(rows))))
        laws[FULL].append(sampling.law(model(rows, target, len(rows))))
        target.advance(len(rows))
    following = torch.tensor(words)[:, None]
    truth = torch.cat(laws[FULL])
    p = truth.gather(1, following)
    scores: dict[str, Scores] = {}
    for policy, parts in laws.items():
        law = torch.cat(parts)
        q = law.gather(1, following)
        overlap, stands = torch.minimum(law, truth).sum(1), (q / p).clamp(max=1)
        scores[policy] = (float(q.mean()), float(overlap.mean()), float(stands.mean()))
    return scores


def _planted(
    tokenizer: Any, tokens: Sequence[int], context: int, number: int, depth: float
) -> list[int]:
    """Return `context` tokens with a needle at `depth` of them, and its beginning at the end."""
    question, answer = NEEDLES[number]
    needle = _plain(tokenizer, f"\n\n{question}{answer}\n\n")
    ask = _plain(tokenizer, f"\n\n{question}")
    filler = context - len(needle) - len(ask)
    start = number * max(0, len(tokens) - filler) // len(NEEDLES)
    text = list(tokens[start : start + filler])
    before = int(depth * filler)
    return [*text[:before], *needle, *text[before:], *ask]


def _fact_among_fillers(context: int, index: int, depth: float) -> list[int]:
    before = int(depth * context)
    behind = context - before - recall.WORDS - 1
    return [
        *recall.fillers(before, 2 * index),
        *recall.fact(index),
        *recall.fillers(behind, 2 * index + 1),
        recall.question(index),
    ]


def _plain(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids
