"""A very long sequence, decoded over a link, compared with Llama's equations in float64.

The model has two layers and one key/value head, so that one machine can run it; token counts,
offsets and RoPE positions are nevertheless those of a long sequence. Its weights are random, and
scaled such that a token attends to some hundred keys of the whole sequence. Compared are the keys
and values of both layers in the final cache, at some positions, and the logits that tokens were
sampled from. In the first layer the equations compute all keys themselves; in the second they
attend to the cache's. The run may take no more memory than its plan, as in `python -m bench
memory`. In full: 1,048,576 tokens, some 45 minutes.
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
# standard deviations of attention scores, and of attention's output relative to the residual's
SCORE_STD, OUTPUT_STD = 3.0, 0.5
ALLOWED_PPM = {"float32": 100, "bfloat16": 50_000}
POSITIONS = 200


@dataclass(frozen=True)
class Job:
    """The model's folder, the number of prompt tokens, and settings."""

    folder: Path
    tokens: int
    max_new_tokens: int
    rate: float = 10.0  # GB/s of the emulated link
    retrieval_budget: int = 512
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
    qk_std = (SCORE_STD / HIDDEN) ** 0.5  # a score is q k / sqrt(D)
    stds = {"q_proj": qk_std, "k_proj": qk_std, "embed_tokens": 1.0}
    # the mean of some hundred values has a tenth of their standard deviation
    stds["o_proj"] = OUTPUT_STD / (0.1 * (HEADS * WIDTH) ** 0.5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = stds.get(name.split(".")[-2], parameter.shape[-1] ** -0.5)
            if "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    model.to(torch.bfloat16).save_pretrained(folder)  # the same weights in both dtypes
    tokenizer.save_pretrained(folder)


def sample_positions(tokens: int, last: int) -> Tensor:
    """Return POSITIONS positions of a sequence: its start, powers of two, the last `last`, and
    others spread in between.
    """
    powers = [side + (1 << power) for power in range(tokens.bit_length()) for side in (-1, 0)]
    chosen = {0, *range(tokens - last, tokens)} | {each for each in powers if each < tokens}
    spread = torch.linspace(0, tokens - 1, POSITIONS).round().long().tolist()
    for each in sorted(spread, key=lambda position: position * 7919 % POSITIONS):
        if len(chosen) >= POSITIONS:
            break
        chosen.add(each)
    return torch.tensor(sorted(chosen))


def error_ppm(actual: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of rows (P, N), in ppm of the expected row's norm."""
    errors = (actual.double() - expected).norm(dim=1)
    return 1e6 * float((errors / expected.norm(dim=1)).max())


@torch.inference_mode()
def generate_and_compare(dtype: str, job: Job) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Generate within the memory plan; return a row per comparison, and the run's statistics."""
    settings = Settings(
        mode="hierarchical",
        dtype=dtype,
        link=f"emulated:{job.rate:g}",
        gpu_kv_layers=0,
        retrieval_budget=job.retrieval_budget,
        context=job.tokens + job.max_new_tokens,
    )
    folder = str(job.folder)
    engine = Engine.from_pretrained(folder, folder, settings, device="cpu")
    list(engine.generate([1] * 300, 20))  # allocates threads and their memory
    prompt = prompt_tokens(engine.tokenizer, job.tokens, job.text)
    gc.collect()
    plan = engine.runtime.plan(len(prompt), job.max_new_tokens).memory
    with limit_memory(plan, 1.0):
        session = SequenceState(engine.runtime, prompt, job.max_new_tokens)
        started = time.perf_counter()
        logits = [session.prefill()]
        prefill_s = time.perf_counter() - started
        first = int(logits[0].argmax())
        link_before = session.target.traffic.link_in
        decoder, seconds = decode_loop(
            session,
            first,
            Sampling(1.0, top_p=1),
            on_logits=lambda new_logits, _: logits.append(new_logits.float().clone()),
        )
        decoder.sync([])
    target, stats = session.target, decoder.stats
    link = target.traffic.link_in - link_before
    kv = target.shape.layout.bytes(target.boundary, LAYERS)
    run = {
        "dtype": dtype,
        "prefill_s": prefill_s,
        "ms_per_token": 1e3 * seconds / stats.produced,
        "verifications": stats.forwards,
        "tokens_per_verification": stats.tokens_per_forward,
        "link_gb": link / 1e9,  # decoding only
        "link_share": link / (kv * stats.forwards),  # relative to all KV per verification
        "planned_gb": planned_bytes(plan) / 1e9,
        "kv_gb": kv / 1e9,
    }
    rows = compare(session, decoder.sequence.tokens_from(0), torch.cat(logits), job, dtype)
    session.close()
    return rows, run


def compare(
    session: SequenceState, sequence: list[int], logits: Tensor, job: Job, dtype: str
) -> list[dict[str, Any]]:
    """Compare the target's cache, and the logits (N, V) from the last prompt token on."""
    llama, tokens = Equations(job.folder), torch.tensor(sequence)
    length, last_prompt = session.target.length, job.tokens - 1
    positions = sample_positions(length, length - last_prompt)
    rows = []

    def add_row(what: str, positions: Tensor, actual: Tensor, expected: Tensor) -> None:
        row = {
            "dtype": dtype,
            "what": what,
            "positions": len(positions),
            "last_position": int(positions[-1]),
            "error_ppm": error_ppm(actual, expected),
            "allowed_ppm": ALLOWED_PPM[dtype],
        }
        rows.append(row)

    hidden = llama.embed(tokens[positions])
    for layer, reader in enumerate(session.target.host_readers()):
        cached = torch.cat([reader(0, start, start + 1) for start in positions.tolist()], dim=1)
        expected = llama.kv(layer, hidden, positions)
        add_row(f"keys of layer {layer}", positions, cached[0], expected[0])
        add_row(f"values of layer {layer}", positions, cached[1], expected[1])

        def computed_kv(start: int, end: int) -> tuple[Tensor, Tensor]:
            return llama.kv(0, llama.embed(tokens[start:end]), torch.arange(start, end))

        def cached_kv(start: int, end: int, reader: HostReader = reader) -> tuple[Tensor, Tensor]:
            keys, values = reader(0, start, end)
            return keys, values

        hidden = llama.layer(layer, hidden, positions, cached_kv if layer else computed_kv)
    has_logits = positions >= last_prompt
    rest = positions[has_logits]
    add_row("logits", rest, logits[rest - last_prompt], llama.logits(hidden[has_logits]))
    return rows


@pytest.fixture
def small_key_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge several key blocks in short sequences too."""
    monkeypatch.setattr(equations, "_KEY_BLOCK", 32)


def compute_layers(folder: Path, tokens: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return each layer's keys and values (2, N, D) by the equations, and the logits (N, V)."""
    llama, positions = Equations(folder), torch.arange(len(tokens))
    layers: list[Tensor] = []
    hidden = llama.embed(tokens)
    for layer in range(LAYERS):
        k, v = llama.kv(layer, hidden, positions)
        layers.append(torch.stack((k, v)))

        def slice_kv(start: int, end: int, k: Tensor = k, v: Tensor = v) -> tuple[Tensor, Tensor]:
            return k[start:end], v[start:end]

        hidden = llama.layer(layer, hidden, positions, slice_kv)
    return layers, llama.logits(hidden)


@torch.inference_mode()
def test_equations_match_transformers(tmp_path: Path, small_key_blocks: None) -> None:
    write_model(tmp_path, 1 << 20)
    tokens = random_tokens(90, 2048)
    _, logits = compute_layers(tmp_path, tokens)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    expected = reference(tokens[None]).logits[0]
    assert error_ppm(logits, expected) < 10
    assert error_ppm(logits.roll(1, 0), expected) > 1e5


def test_sample_positions_cover_the_whole_sequence() -> None:
    positions = sample_positions(5000, 40).tolist()
    assert len(positions) == len(set(positions)) == POSITIONS
    assert {0, 1, 2047, 2048, *range(4960, 5000)} <= set(positions)
    assert max(b - a for a, b in pairwise(positions)) < 500


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_rows_and_positions_are_detected(
    dtype: str, tmp_path: Path, small_key_blocks: None
) -> None:
    write_model(tmp_path, 1 << 20)
    tokens = random_tokens(600, 2048)
    layers, logits = compute_layers(tmp_path, tokens)
    layers, logits = [kv.to(getattr(torch, dtype)) for kv in layers], logits[590:]
    job = Job(tmp_path, 591, 10)

    def find_errors(layers: list[Tensor], logits: Tensor) -> list[str]:
        readers = [
            lambda _, start, end, layer=layer: layer[:, start:end]  # type: ignore[misc]
            for layer in layers
        ]
        target = SimpleNamespace(length=600, host_readers=lambda: readers)
        session: Any = SimpleNamespace(target=target)
        rows = compare(session, tokens.tolist(), logits, job, dtype)
        assert len(rows) == 5
        return [row["what"] for row in rows if row["error_ppm"] > row["allowed_ppm"]]

    assert find_errors(layers, logits) == []
    assert find_errors(layers, logits.roll(1, 0)) == ["logits"]
    first, second = layers
    wrong = find_errors([first.roll(1, 1), second], logits)
    assert wrong[:2] == ["keys of layer 0", "values of layer 0"]
    corrupt = second.clone()
    corrupt[0, 0] += 1  # position 0 is always compared
    assert "keys of layer 1" in find_errors([first, corrupt], logits)


@pytest.mark.slow
def test_a_long_sequence_matches_the_equations(
    tmp_path: Path, full: bool, text: Path | None, record: Callable[..., None]
) -> None:
    job = Job(tmp_path, 3000, 16)
    if full:
        job = Job(tmp_path, 1 << 20, 48, rate=1.0, retrieval_budget=4096, text=text)
    write_model(tmp_path, job.tokens + 2 * job.max_new_tokens)
    rows: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    for dtype in ("bfloat16", "float32") if full else ("float32",):
        result, _ = call_in_process(generate_and_compare, dtype, job)
        assert isinstance(result, tuple), result  # a `Died` without a result
        rows += result[0]
        runs.append(result[1])
    record("million", f"{job.tokens:,} tokens compared with equations", rows, runs=runs)

    assert len(rows) == 5 * len(runs)
    for row in rows:
        assert row["error_ppm"] <= row["allowed_ppm"], row
    for run in runs:
        assert run["link_gb"] > run["kv_gb"]
        assert run["link_share"] == pytest.approx(1, rel=0.01)  # not exact: the boundary moves
