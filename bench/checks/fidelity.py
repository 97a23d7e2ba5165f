"""Divergence of tokens and distributions from plain decoding, by mode, link and dtype.

A forward over several query tokens rounds differently from a forward over one, and so does
attention over other blocks. Speculative decoding is exact in the arithmetic of the forward that
computes the distribution; the remaining differences are measured here, also with --deterministic.
Plain decoding with an on-device cache is the reference. All other strategies generate their own
outputs, and then score the reference's tokens in forwards as long as their verifications, so that
distributions are compared along the same tokens. transformers scores them in one forward, which
shows the effect of rounding alone.
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
from bench.harness.text import select_prompts, text_tokens, tokenizer_of
from bench.peers.hugging_face import load_transformers
from decoding import Engine, Sampling, Settings
from decoding.engine.request import Request
from decoding.engine.session import SequenceState
from decoding.speculation.sequence import common_prefix
from parallel.config.model_config import ModelConfig
from parallel.model.loading import resolve
from parallel.ranks.process_group import TensorParallelGroup

VERIFIED = 7  # query tokens per forward, when the reference's tokens are scored
LINK = "emulated:10"
# row's name: the mode, and the share of layers whose KV stays on the device
STRATEGIES = {
    "plain": ("plain", 1.0),
    "plain, over a link": ("plain", 0.0),
    "retrieval": ("retrieval", 1.0),
    "retrieval, over a link": ("retrieval", 0.3),
    "split, over a link": ("split", 0.3),
    "hierarchical, over a link": ("hierarchical", 0.3),
}


@dataclass(frozen=True)
class Output:
    """Generated tokens, and the logits (N, V) that they were sampled from."""

    tokens: list[int]
    logits: Tensor


@dataclass
class Divergence:
    """Differences between one strategy and plain decoding; an entry per prompt."""

    equal: list[float] = field(default_factory=list)  # share of positions with the same token
    first: list[int] = field(default_factory=list)  # tokens before the first difference
    kl: list[Tensor] = field(default_factory=list)  # (N,) nats, along plain decoding's tokens
    top: list[Tensor] = field(
        default_factory=list
    )  # (N,) whether the most likely token is the same
    ms: list[float] = field(default_factory=list)
    rejected: list[float] = field(default_factory=list)  # share of draft tokens

    def compare_tokens(self, tokens: Sequence[int], plain: Sequence[int]) -> None:
        """Record the differences of generated tokens from plain decoding's."""
        same = [token == expected for token, expected in zip(tokens, plain, strict=False)]
        self.equal.append(sum(same) / len(plain))
        self.first.append(common_prefix(tokens, plain))

    def compare_logits(self, logits: Tensor, plain: Tensor) -> None:
        """Record the differences of logits (N, V) from plain decoding's, along the same tokens."""
        log_p, log_q = plain.double().log_softmax(1), logits.double().log_softmax(1)
        self.kl.append((log_p.exp() * (log_p - log_q)).sum(1).clamp(min=0))
        self.top.append(plain.argmax(1) == logits.argmax(1))


def generate(engine: Engine, prompt: list[int], max_new_tokens: int, sampling: Sampling) -> Output:
    """Return the output for a prompt, with the logits of each of its tokens."""
    rows: list[Tensor] = []
    request = Request(
        prompt,
        max_new_tokens,
        sampling,
        on_logits=lambda logits, _: rows.extend(logits.float().clone()),
    )
    tokens = list(engine.submit(request))
    return Output(tokens, torch.stack(rows[: len(tokens)]))


@torch.inference_mode()
def score(engine: Engine, prompt: list[int], tokens: list[int], query_tokens: int) -> Tensor:
    """Return the logits (N, V) that predict each token, in forwards over `query_tokens` each."""
    session = SequenceState(engine.runtime, prompt, len(tokens))
    logits = [session.prefill()]
    for part in torch.tensor(tokens[:-1]).split(query_tokens):
        logits.append(engine.runtime.target(part, session.target, len(part)))
        session.target.advance(len(part))
    session.close()
    return torch.cat(logits)


@torch.inference_mode()
def score_with_transformers(model: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    """Return transformers' logits (N, V) that predict each token, from a single forward."""
    batch = torch.tensor([[*prompt, *tokens[:-1]]])
    return model(batch, logits_to_keep=len(tokens)).logits[0].float()


def settings_of(strategy: str, layers: int, dtype: str, deterministic: bool) -> Settings:
    """Return the settings of a strategy."""
    mode, share = STRATEGIES[strategy]
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


def row_of(strategy: str, dtype: str, deterministic: bool, divergence: Divergence) -> Row:
    """Return the row of a strategy, over all prompts."""
    kl, top = torch.cat(divergence.kl), torch.cat(divergence.top)
    return {
        "way": strategy,
        "dtype": dtype,
        "deterministic": deterministic,
        # share of positions with the same token; None if it only scores tokens
        "equal_tokens": statistics.mean(divergence.equal) if divergence.equal else None,
        # median number of tokens before the first difference
        "first_difference": statistics.median(divergence.first) if divergence.first else None,
        "mean_kl": float(kl.mean()),  # nats
        "max_kl": float(kl.max()),
        # share of positions with the same most likely token
        "same_top": float(top.double().mean()),
        "ms_per_token": statistics.mean(divergence.ms) if divergence.ms else None,
        # share of draft tokens
        "rejected": statistics.mean(divergence.rejected) if divergence.rejected else None,
    }


def strategies_for(dtype: str, has_draft: bool) -> list[str]:
    """Return the strategies that are available with this dtype and draft model."""
    available = {"split": dtype != "float32", "hierarchical": has_draft}
    return [name for name, (mode, _) in STRATEGIES.items() if available.get(mode, True)]


@benchmark(
    "Compared with plain decoding on the device, {prompts} outputs of {new_tokens} tokens each"
)
def main(
    target: opt.Target = opt.SMOLLM2,
    draft: opt.Draft = None,
    text: opt.Text = None,
    context: opt.Context = 2000,
    new_tokens: opt.NewTokens = 200,
    prompts: Annotated[int, typer.Option(help="Prompts, spread evenly over the text.")] = 3,
    dtypes: Annotated[str, typer.Option(help="Separated by commas.")] = "bfloat16,float32",
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = 1.0,
    threads: opt.Threads = 0,
    output: opt.Output = Path("results/fidelity.json"),
) -> Measurement:
    """Compare tokens and distributions with those of plain decoding on the device."""
    sampling, rows = Sampling(temperature, top_p=top_p), list[Row]()
    layers = ModelConfig.from_name(target).full_layers
    tokens = text_tokens(tokenizer_of(target), text)
    selected = select_prompts(tokens, context, prompts, new_tokens)
    for dtype in dtypes.split(","):
        for deterministic in (False, True):
            plain: list[Output] = []
            for strategy in strategies_for(dtype, draft is not None):
                say(f"{strategy}, {dtype}{', deterministic' if deterministic else ''}")
                small = draft if "hierarchical" in strategy else None
                divergence = Divergence()
                settings = settings_of(strategy, layers, dtype, deterministic)
                with endless(target, small, settings, device="cpu") as engine:
                    for index, prompt in enumerate(selected):
                        generated = generate(engine, prompt, new_tokens, sampling)
                        if len(plain) == index:
                            plain.append(generated)
                        _compare(engine, prompt, generated, plain[index], divergence)
                del engine
                gc.collect()
                rows.append(row_of(strategy, dtype, deterministic, divergence))
                yield {"rows": rows}
            if not deterministic:
                rows += _transformers_rows(
                    target, dtype, selected, plain, output.parent / "converted"
                )
                yield {"rows": rows}


def _compare(
    engine: Engine, prompt: list[int], output: Output, plain: Output, divergence: Divergence
) -> None:
    """Record the differences of one output, and of the scores of plain decoding's tokens."""
    stats = engine.stats
    divergence.compare_tokens(output.tokens, plain.tokens)
    if stats.ms_per_token is not None:
        divergence.ms.append(stats.ms_per_token)
    rate = stats.acceptance.get("target")
    if rate is not None:
        divergence.rejected.append(1 - rate)
    if output is plain:
        divergence.compare_logits(output.logits, plain.logits)
        return
    query_tokens = 1 if stats.mode == "plain" else VERIFIED
    scores = score(engine, prompt, plain.tokens, query_tokens)
    divergence.compare_logits(scores, plain.logits)


def _transformers_rows(
    target: str, dtype: str, selected: list[list[int]], plain: list[Output], scratch: Path
) -> list[Row]:
    """Return a row per attention of transformers, which scores plain decoding's tokens."""
    rows = []
    for attention in ("eager", "sdpa"):
        say(f"transformers, {attention}, {dtype}")
        model = load_transformers(
            resolve(target, TensorParallelGroup()), dtype, scratch, attn_implementation=attention
        )
        divergence = Divergence()
        for prompt, output in zip(selected, plain, strict=True):
            scores = score_with_transformers(model, prompt, output.tokens)
            divergence.compare_logits(scores, output.logits)
        rows.append(row_of(f"transformers: {attention}", dtype, False, divergence))
        del model
        gc.collect()
    return rows
