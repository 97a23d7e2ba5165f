"""A needle in a long text: something said early and asked for at the end. Does the proposer still
know it?

A window of recent tokens cannot know. Retrieval can, if its selection finds the place. The words
asked for are given (teacher-forced), and each is judged by the plain laws, at temperature 1: what
full attention gives it, what the policy gives it, and the probability that the policy's proposal
would stand there. Two models are asked: the built-in pair's target, with sentences in a novel, and
a model made by hand that can do nothing but recall (`bench/drafts/recall.py`), with facts among
fillers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.drafts.overlap import Led, Variant
from bench.drafts.recall import FACTS, WORDS, fact, fillers, question, recall_model
from bench.drafts.recall import answer as repeated
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
INTERVAL = 4  # words between verifications


def needles(
    models: Runtime,
    tokenizer: Any,
    tokens: Sequence[int],
    context: int,
    variants: Sequence[Variant],
) -> list[dict[str, Any]]:
    """One row per model and policy, full attention first: the planted words' probability, and
    acceptance on them.
    """
    kept: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for number, (begun, rest) in enumerate(NEEDLES):
        for depth in DEPTHS:
            words = _plain(tokenizer, rest)
            prompt = _planted(tokenizer, tokens, context, begun, rest, depth, number)
            for name, row in judged(models, prompt, words, variants).items():
                kept.setdefault(("built-in target", name), []).append(row)
    made = Runtime.make(recall_model(context + 64), None, "retrieval", Settings(mode="retrieval"))
    for index in range(FACTS):
        for depth in DEPTHS:
            before, behind = int(depth * context), context - int(depth * context) - WORDS - 1
            prompt = [
                *fillers(before, 2 * index),
                *fact(index),
                *fillers(behind, 2 * index + 1),
                question(index),
            ]
            for name, row in judged(made, prompt, repeated(index), variants).items():
                kept.setdefault(("made to recall", name), []).append(row)
    rows: list[dict[str, Any]] = []
    for (model, name), found in kept.items():
        probability, overlap, stands = (statistics.fmean(each) for each in zip(*found, strict=True))
        labels = {"model": model, "policy": name}
        rows.append(
            {
                **labels,
                "planted words' probability": probability,
                "overlap": overlap,
                "planted word stands": stands,
            }
        )
    return rows


def judged(
    models: Runtime, prompt: list[int], words: list[int], variants: Sequence[Variant]
) -> dict[str, tuple[float, float, float]]:
    """Mean over the words of q(word), overlap, and min(1, q(word) / p(word)), by policy; a
    verification every INTERVAL words.
    """
    led, sampling = Led(models, prompt, len(words), variants, INTERVAL), Sampling(1.0)
    model, target = models.target, led.session.target
    # the prompt's last token is read once more, so that the first word is judged too
    target.crop(len(prompt) - 1)
    for cache in led.caches.values():
        cache.min_interval = (
            0  # each verification selects, though the first one ends where the prompt did
        )
    laws: dict[str, list[Tensor]] = {}
    for rows in torch.tensor([*prompt[-1:], *words[:-1]]).split(INTERVAL):
        for variant, cache in led.caches.items():
            laws.setdefault(variant.name, []).append(sampling.law(model(rows, cache, len(rows))))
        laws.setdefault(FULL, []).append(sampling.law(model(rows, target, len(rows))))
        target.advance(len(rows))
    found: dict[str, tuple[float, float, float]] = {}
    following = torch.tensor(words)[:, None]
    truth = torch.cat(laws[FULL])
    p = truth.gather(1, following)
    for name in (FULL, *(variant.name for variant in variants)):
        law = torch.cat(laws[name])
        q = law.gather(1, following)
        overlap, stands = torch.minimum(law, truth).sum(1), (q / p).clamp(max=1)
        found[name] = (float(q.mean()), float(overlap.mean()), float(stands.mean()))
    return found


def _planted(
    tokenizer: Any,
    tokens: Sequence[int],
    context: int,
    question: str,
    answer: str,
    depth: float,
    number: int,
) -> list[int]:
    """`context` tokens of the text with the needle at `depth` of them, and its beginning again at
    the end.
    """
    needle, ask = (
        _plain(tokenizer, f"\n\n{question}{answer}\n\n"),
        _plain(tokenizer, f"\n\n{question}"),
    )
    filler = context - len(needle) - len(ask)
    start = number * max(0, len(tokens) - filler) // len(NEEDLES)
    before = int(depth * filler)
    text = list(tokens[start : start + filler])
    return [*text[:before], *needle, *text[before:], *ask]


def _plain(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids
