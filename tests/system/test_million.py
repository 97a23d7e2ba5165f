"""A very long text, read and continued over a link, beside Llama's equations in float64.

The model has two layers and one key/value head, so that this machine can run it; what it counts,
where it writes and which positions it rotates by are those of a long text all the same. Its weights
are random, such that a token attends to some hundred keys of the whole text. Compared are keys and
values of both layers where they lie at the end, at some positions, and the logits that tokens were
drawn from. All keys of the first layer are the equations' own; after it they attend to what the
cache holds. The run may take no more memory than its plan, as in `python -m bench memory`. In full:
1,048,576 tokens, some 45 minutes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.checks.memory import limit_memory, planned_bytes
from bench.harness.decode_loop import decode_loop
from bench.harness.process import call_in_process
from bench.harness.text import prompt_tokens
from decoding import Engine, Sampling, Settings
from decoding.engine.session import SequenceState
from decoding.models.loading import load_tokenizer
from offload.tiered.kv_file import HostReader
from support import equations
from support.commands import TARGET
from support.equations import Equations
from support.models import random_tokens

LAYERS, HEADS, WIDTH, HIDDEN, INNER = 2, 2, 64, 128, 256
THETA = 5e6  # rotates slowly enough that a million positions differ
SCORES, ADDED = 3.0, 0.5  # deviations of scores, and of what attention adds to a unit row
ALLOWED = {"float32": 100, "bfloat16": 50_000}  # ppm
POSITIONS = 200


@dataclass(frozen=True)
class Job:
    """What is read, and how."""

    folder: Path
    tokens: int
    new: int
    rate: float = 10.0  # of the emulated link, GB/s
    budget: int = 512
    text: Path | None = None


def write_model(folder: Path, positions: int) -> None:
    """Write a model of random weights, with the tokenizer of the built-in pair."""
    tokenizer = load_tokenizer(TARGET)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        head_dim=WIDTH,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    of_scores = (SCORES / HIDDEN) ** 0.5  # of queries and keys, whose product is over sqrt(D)
    deviations = {"q_proj": of_scores, "k_proj": of_scores, "embed_tokens": 1.0}
    # the mean of some hundred keys has a tenth of their deviation
    deviations["o_proj"] = ADDED / (0.1 * (HEADS * WIDTH) ** 0.5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            deviation = deviations.get(name.split(".")[-2], parameter.shape[-1] ** -0.5)
            if "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
    model.to(torch.bfloat16).save_pretrained(folder)  # the same numbers in both dtypes
    tokenizer.save_pretrained(folder)


def places(tokens: int, ends: int) -> Tensor:
    """Return POSITIONS positions of a text: its start, powers of two, its end, and in between.

    The last `ends` positions are all among them.
    """
    powers = [side + (1 << power) for power in range(tokens.bit_length()) for side in (-1, 0)]
    chosen = {0, *range(tokens - ends, tokens)} | {each for each in powers if each < tokens}
    spread = torch.linspace(0, tokens - 1, POSITIONS).round().long().tolist()
    for each in sorted(spread, key=lambda place: place * 7919 % POSITIONS):
        if len(chosen) >= POSITIONS:
            break
        chosen.add(each)
    return torch.tensor(sorted(chosen))


def error_ppm(found: Tensor, expected: Tensor) -> float:
    """Return how far rows (P, N) are from those expected, in ppm of their length, at the worst."""
    apart = (found.double() - expected).norm(dim=1)
    return 1e6 * float((apart / expected.norm(dim=1)).max())


@torch.inference_mode()
def compared(dtype: str, job: Job) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Read the text and continue it within its plan; return the errors, and what it took."""
    settings = Settings(
        mode="hierarchical",
        dtype=dtype,
        link=f"emulated:{job.rate:g}",
        gpu_kv_layers=0,
        retrieval_budget=job.budget,
        context=job.tokens + job.new,
    )
    folder = str(job.folder)
    engine = Engine.from_pretrained(folder, folder, settings, device="cpu")
    list(engine.generate([1] * 300, 20))  # threads and their memory
    prompt = prompt_tokens(engine.tokenizer, job.tokens, job.text)
    gc.collect()
    plan = engine.runtime.plan(len(prompt), job.new)
    with limit_memory(plan, 1.0):
        session = SequenceState(engine.runtime, prompt, job.new)
        started = time.perf_counter()
        logits = [session.prefill()]
        prefill_s = time.perf_counter() - started
        first, before = int(logits[0].argmax()), session.target.traffic.link_in
        decoder, seconds = decode_loop(
            session,
            first,
            Sampling(1.0, top_p=1),
            on_logits=lambda more: logits.append(more.float().clone()),
        )
        decoder.sync([])
    target, stats = session.target, decoder.stats
    link = target.traffic.link_in - before
    kv = target.shape.layout.bytes(target.boundary, LAYERS)
    run = {
        "dtype": dtype,
        "prefill_s": prefill_s,
        "ms_per_token": 1e3 * seconds / stats.produced,
        "verifications": stats.forwards,
        "tokens_per_verification": stats.tokens_per_forward,
        "link_gb": link / 1e9,  # while decoding
        "link_share": link / (kv * stats.forwards),  # of all KV for every verification
        "planned_gb": planned_bytes(plan) / 1e9,
        "kv_gb": kv / 1e9,
    }
    rows = errors(session, decoder.sequence.tokens_from(0), torch.cat(logits), job, dtype)
    session.close()
    return rows, run


def errors(
    session: SequenceState, text: list[int], logits: Tensor, job: Job, dtype: str
) -> list[dict[str, Any]]:
    """Compare what the target's cache holds of a text, and the logits (N, V) after its prompt."""
    llama, tokens = Equations(job.folder), torch.tensor(text)
    held, last = session.target.length, job.tokens - 1  # of the prompt
    at = places(held, held - last)
    rows = []

    def compare(what: str, positions: Tensor, found: Tensor, expected: Tensor) -> None:
        row = {
            "dtype": dtype,
            "what": what,
            "positions": len(positions),
            "last_position": int(positions[-1]),
            "error_ppm": error_ppm(found, expected),
            "allowed_ppm": ALLOWED[dtype],
        }
        rows.append(row)

    hidden = llama.embed(tokens[at])
    for layer, excerpt in enumerate(session.target.host_readers()):
        there = torch.cat([excerpt(0, place, place + 1) for place in at.tolist()], dim=1)
        expected = llama.kv(layer, hidden, at)
        compare(f"keys of layer {layer}", at, there[0], expected[0])
        compare(f"values of layer {layer}", at, there[1], expected[1])

        def computed(start: int, end: int) -> tuple[Tensor, Tensor]:
            return llama.kv(0, llama.embed(tokens[start:end]), torch.arange(start, end))

        def kept(start: int, end: int, excerpt: HostReader = excerpt) -> tuple[Tensor, Tensor]:
            keys, values = excerpt(0, start, end)
            return keys, values

        hidden = llama.layer(layer, hidden, at, kept if layer else computed)
    after = at >= last
    compare("logits", at[after], logits[at[after] - last], llama.logits(hidden[after]))
    return rows


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are merged from several pieces in short texts too."""
    monkeypatch.setattr(equations, "_KEY_BLOCK", 32)


def computed_layers(folder: Path, tokens: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return each layer's keys and values (2, N, D) by the equations, and the logits (N, V)."""
    llama, positions, layers = Equations(folder), torch.arange(len(tokens)), list[Tensor]()
    hidden = llama.embed(tokens)
    for layer in range(LAYERS):
        k, v = llama.kv(layer, hidden, positions)
        layers.append(torch.stack((k, v)))

        def between(start: int, end: int, k: Tensor = k, v: Tensor = v) -> tuple[Tensor, Tensor]:
            return k[start:end], v[start:end]

        hidden = llama.layer(layer, hidden, positions, between)
    return layers, llama.logits(hidden)


@torch.inference_mode()
def test_the_equations_are_those_of_transformers(tmp_path: Path, small_pieces: None) -> None:
    write_model(tmp_path, 1 << 20)
    tokens = random_tokens(90, 2048)
    _, logits = computed_layers(tmp_path, tokens)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    expected = theirs(tokens[None]).logits[0]
    assert error_ppm(logits, expected) < 10
    assert error_ppm(logits.roll(1, 0), expected) > 1e5


def test_positions_are_of_the_whole_text() -> None:
    at = places(5000, 40).tolist()
    assert len(at) == len(set(at)) == POSITIONS
    assert {0, 1, 2047, 2048, *range(4960, 5000)} <= set(at)
    assert max(b - a for a, b in pairwise(at)) < 500


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_row_and_a_wrong_position_are_seen(
    dtype: str, tmp_path: Path, small_pieces: None
) -> None:
    write_model(tmp_path, 1 << 20)
    tokens = random_tokens(600, 2048)
    layers, logits = computed_layers(tmp_path, tokens)
    layers, logits = [each.to(getattr(torch, dtype)) for each in layers], logits[590:]
    job = Job(tmp_path, 591, 10)

    def off(layers: list[Tensor], logits: Tensor) -> list[str]:
        excerpts = [
            lambda _, start, end, layer=layer: layer[:, start:end]  # type: ignore[misc]
            for layer in layers
        ]
        target = SimpleNamespace(length=600, host_readers=lambda: excerpts)
        session: Any = SimpleNamespace(target=target)
        rows = errors(session, tokens.tolist(), logits, job, dtype)
        assert len(rows) == 5
        return [row["what"] for row in rows if row["error_ppm"] > row["allowed_ppm"]]

    assert off(layers, logits) == []
    assert off(layers, logits.roll(1, 0)) == ["logits"]
    first, second = layers
    assert off([first.roll(1, 1), second], logits)[:2] == ["keys of layer 0", "values of layer 0"]
    spoilt = second.clone()
    spoilt[0, 0] += 1  # position 0 is among those that are compared
    assert "keys of layer 1" in off([first, spoilt], logits)


@pytest.mark.slow
def test_a_long_text_is_what_the_equations_say(
    tmp_path: Path, full: bool, text: Path | None, record: Callable[..., None]
) -> None:
    job = Job(tmp_path, 3000, 16)
    if full:
        job = Job(tmp_path, 1 << 20, 48, rate=1.0, retrieval_budget=4096, text=text)
    write_model(tmp_path, job.tokens + 2 * job.new)
    rows, runs = list[dict[str, Any]](), list[dict[str, Any]]()
    for dtype in ("bfloat16", "float32") if full else ("float32",):
        found, _ = call_in_process(compared, dtype, job)
        assert isinstance(found, tuple), found  # else why there is no answer
        rows += found[0]
        runs.append(found[1])
    record("million", f"{job.tokens:,} tokens beside equations", rows, runs=runs)

    assert len(rows) == 5 * len(runs)
    for row in rows:
        assert row["error_ppm"] <= row["allowed_ppm"], row
    for run in runs:
        assert run["link_gb"] > run["kv_gb"]
        assert run["link_share"] == pytest.approx(1, rel=0.01)  # the boundary moves
