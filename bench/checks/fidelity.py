"""How far texts and laws are from plain decoding's, by mode, link and dtype; and with --deterministic.

A pass over several rows rounds otherwise than a pass over one, and so does attention in other
pieces. Law and text are exact in the arithmetic of the pass that computes them: what that makes of
a text is told here. Plain decoding on resident layers writes a text; the others write theirs, and
then read plain decoding's in passes as long as their verifications, so that laws are compared
along the same words. transformers, which reads all at once, says what rounding alone does.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from bench.harness import options as opt
from bench.harness.decode_loop import endless
from bench.harness.experiment import Measurement, Row, benchmark
from bench.harness.tables import say
from bench.harness.text import prompts, text_tokens, tokenizer_of
from bench.peers.hugging_face import load_transformers
from decoding import Engine, Sampling, Settings
from decoding.engine.request import Request
from decoding.engine.session import SequenceState
from decoding.speculation.sequence import common_prefix
from parallel.config.model_config import ModelConfig
from parallel.model.loading import resolve
from parallel.ranks.process_group import TensorParallelGroup

PASS = 7  # tokens of a verification, where plain decoding's text is read
LINK = "emulated:10"
# ways to decode: the mode, and of all layers the share whose KV stays on the device
WAYS = {
    "plain": ("plain", 1.0),
    "plain, over a link": ("plain", 0.0),
    "retrieval": ("retrieval", 1.0),
    "retrieval, over a link": ("retrieval", 0.3),
    "split, over a link": ("split", 0.3),
    "hierarchical, over a link": ("hierarchical", 0.3),
}


@dataclass(frozen=True)
class Written:
    """A text, and the logits (N, V) that its tokens were drawn from."""

    tokens: list[int]
    logits: Tensor


@dataclass
class Divergence:
    """How far one way is from plain decoding, text by text."""

    equal: list[float] = field(default_factory=list)  # the share of tokens, place by place
    first: list[int] = field(default_factory=list)  # tokens before the first that differs
    kl: list[Tensor] = field(default_factory=list)  # (N,) nats, along plain decoding's text
    top: list[Tensor] = field(default_factory=list)  # (N,) whether the likeliest token is the same
    ms: list[float] = field(default_factory=list)
    rejected: list[float] = field(default_factory=list)  # the share of what the target was given

    def compare_texts(self, text: Sequence[int], plain: Sequence[int]) -> None:
        """Take note of a text beside plain decoding's."""
        same = [one == other for one, other in zip(text, plain, strict=False)]
        self.equal.append(sum(same) / len(plain))
        self.first.append(common_prefix(text, plain))

    def compare_laws(self, logits: Tensor, plain: Tensor) -> None:
        """Take note of logits (N, V) beside plain decoding's, along the same text."""
        one, other = plain.double().log_softmax(1), logits.double().log_softmax(1)
        self.kl.append((one.exp() * (one - other)).sum(1).clamp(min=0))
        self.top.append(plain.argmax(1) == logits.argmax(1))


def written(engine: Engine, prompt: list[int], new: int, law: Sampling) -> Written:
    """Return a text behind a prompt, with the logits of each of its tokens."""
    rows: list[Tensor] = []
    request = Request(
        prompt, new, law, on_logits=lambda logits: rows.extend(logits.float().clone())
    )
    tokens = list(engine.submit(request))
    return Written(tokens, torch.stack(rows[: len(tokens)]))


@torch.inference_mode()
def read(engine: Engine, prompt: list[int], text: list[int], rows: int) -> Tensor:
    """Return the logits (N, V) before each token of a text that is read `rows` at a time."""
    session = SequenceState(engine.runtime, prompt, len(text))
    logits = [session.prefill()]
    *before, _ = text
    for part in torch.tensor(before).split(rows):
        logits.append(engine.runtime.target(part, session.target, len(part)))
        session.target.advance(len(part))
    session.close()
    return torch.cat(logits)


@torch.inference_mode()
def their_logits(model: Any, prompt: list[int], text: list[int]) -> Tensor:
    """Return what transformers says, which reads all at once (N, V)."""
    tokens = torch.tensor([[*prompt, *text[:-1]]])
    return model(tokens, logits_to_keep=len(text)).logits[0].float()


def settings_of(way: str, layers: int, dtype: str, deterministic: bool) -> Settings:
    """Return the settings of a way."""
    mode, share = WAYS[way]
    resident = round(share * layers)
    split = (layers - resident) // 2 if "split" in mode else None
    return Settings(
        mode=mode,
        dtype=dtype,
        gpu_kv_layers=resident,
        split_kv_layers=split,
        link=LINK if resident < layers else "auto",
        deterministic=deterministic,
    )


def row_of(way: str, dtype: str, deterministic: bool, found: Divergence) -> Row:
    """Return the row of a way, of all its texts."""
    kl, top = torch.cat(found.kl), torch.cat(found.top)
    return {
        "way": way,
        "dtype": dtype,
        "deterministic": deterministic,
        # the share of tokens, place by place; None where it writes no text here
        "equal_tokens": statistics.mean(found.equal) if found.equal else None,
        # tokens before it, the median of all texts
        "first_difference": statistics.median(found.first) if found.first else None,
        "mean_kl": float(kl.mean()),  # nats
        "max_kl": float(kl.max()),
        # the share of places where the likeliest token is the same
        "same_top": float(top.double().mean()),
        "ms_per_token": statistics.mean(found.ms) if found.ms else None,
        # the share of what the target was given
        "rejected": statistics.mean(found.rejected) if found.rejected else None,
    }


def ways_of(dtype: str, has_draft: bool) -> list[str]:
    """Return the ways that there are."""
    levels = {"split": dtype != "float32", "hierarchical": has_draft}
    return [way for way, (mode, _) in WAYS.items() if levels.get(mode, True)]


@benchmark("Beside plain decoding on resident layers, {texts} texts of {new_tokens} tokens")
def main(
    target: opt.Target = opt.SMOLLM2,
    draft: opt.Draft = None,
    text: opt.Text = None,
    context: opt.Context = 2000,
    new_tokens: opt.NewTokens = 200,
    texts: Annotated[int, typer.Option(help="Texts, spread evenly over the given one.")] = 3,
    dtypes: Annotated[str, typer.Option(help="Separated by commas.")] = "bfloat16,float32",
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = 1.0,
    threads: opt.Threads = 0,
    output: opt.Output = Path("results/fidelity.json"),
) -> Measurement:
    """Compare texts and laws with those of plain decoding on resident layers."""
    law, rows = Sampling(temperature, top_p=top_p), list[Row]()
    layers = ModelConfig.from_name(target).layers
    asked = prompts(text_tokens(tokenizer_of(target), text), context, texts, new_tokens)
    for dtype in dtypes.split(","):
        for deterministic in (False, True):
            plain: list[Written] = []
            for way in ways_of(dtype, draft is not None):
                say(f"{way}, {dtype}{', deterministic' if deterministic else ''}")
                small = draft if "hierarchical" in way else None
                found, settings = Divergence(), settings_of(way, layers, dtype, deterministic)
                with endless(target, small, settings, device="cpu") as engine:
                    for index, prompt in enumerate(asked):
                        one = written(engine, prompt, new_tokens, law)
                        if len(plain) == index:
                            plain.append(one)
                        _compare(engine, prompt, one, plain[index], found)
                del engine
                gc.collect()
                rows.append(row_of(way, dtype, deterministic, found))
                yield {"rows": rows}
            if not deterministic:
                rows += _theirs(target, dtype, asked, plain, output.parent / "converted")
                yield {"rows": rows}


def _compare(
    engine: Engine, prompt: list[int], one: Written, plain: Written, found: Divergence
) -> None:
    """Take note of one text of a way, and of what it says of plain decoding's."""
    stats = engine.stats
    found.compare_texts(one.tokens, plain.tokens)
    if stats.ms_per_token is not None:
        found.ms.append(stats.ms_per_token)
    rate = stats.acceptance.get("target")
    if rate is not None:
        found.rejected.append(1 - rate)
    if one is plain:
        found.compare_laws(one.logits, plain.logits)
        return
    rows = 1 if stats.mode == "plain" else PASS
    found.compare_laws(read(engine, prompt, plain.tokens, rows), plain.logits)


def _theirs(
    target: str, dtype: str, asked: list[list[int]], plain: list[Written], scratch: Path
) -> list[Row]:
    """Return what transformers' ways to attend say along plain decoding's texts."""
    rows = []
    for attention in ("eager", "sdpa"):
        say(f"transformers, {attention}, {dtype}")
        model = load_transformers(
            resolve(target, TensorParallelGroup()), dtype, scratch, attn_implementation=attention
        )
        found = Divergence()
        for prompt, one in zip(asked, plain, strict=True):
            found.compare_laws(their_logits(model, prompt, one.tokens), one.logits)
        rows.append(row_of(f"transformers: {attention}", dtype, False, found))
        del model
        gc.collect()
    return rows
