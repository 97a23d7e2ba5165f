"""Parts of a GPU day that run a model: the time of its forwards, by where its KV is.

The physics: a verification should take the larger of its link time and its compute. With all KV on
the device it takes its compute alone, the reference for the streamed one.
"""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

import torch

from bench.gpu.choices import Context
from bench.gpu.models import (
    driver_bytes,
    load_models,
    mode_of,
    planned_memory,
    prefilled_session,
    report_prefill,
    usable_bytes,
    weight_bytes,
)
from bench.harness.decode_loop import decode_loop
from bench.harness.tables import heading
from bench.speed.forwards import forward_times, median_ms
from decoding import Sampling
from decoding.engine.session import SequenceState
from decoding.speculation.draft_length import Fixed
from offload.memory.bandwidth import BandwidthProbe

_TOKENS = 65_536  # prompt tokens
_LONG = 130_048  # prompt tokens in the part plan
_REPEATS = 3  # timed forwards per kind, after one warm-up
_ROUNDS_S = 12.0  # time limit of decoding


def resident(context: Context) -> None:
    """All KV on the device: forwards are compute alone, and short ones are captured."""
    layers = load_models(context.choices, context.group)[0].config.full_layers
    mode = mode_of(context, context.choices.mode)
    int8 = context.choices.int8
    tokens = context.tokens(_TOKENS)
    with prefilled_session(
        context, tokens, mode, gpu_kv_layers=layers, int8_retrieval=int8
    ) as session:
        before = _device_bytes(context)
        times, _ = _timed(context, session)
        context.compute |= times
        if before is not None:
            after = _device_bytes(context) or before
            context.add("device memory of forwards", (after - before) / 1e6, "MB")
        for name, value in session.slot.graphs.counts.items():
            context.add(f"CUDA graphs: {name}", "none" if value is None else value)


def streamed(context: Context) -> None:
    """No layer's KV on the device, or `gpu_kv_layers`: how much compute overlaps the link."""
    mode = mode_of(context, context.choices.mode)
    int8 = context.choices.int8
    layers = context.choices.gpu_kv_layers or 0
    tokens = context.tokens(_TOKENS)
    with prefilled_session(
        context, tokens, mode, gpu_kv_layers=layers, int8_retrieval=int8
    ) as session:
        times, moved = _timed(context, session)
        _report_link(context, session, times, moved, context.compute)


def split(context: Context) -> None:
    """Split layers, with high bytes on the device: approximate drafts, exact verifications."""
    layers = load_models(context.choices, context.group)[0].config.full_layers
    mode = mode_of(context, "split-hierarchical")
    chosen: dict[str, Any] = {"gpu_kv_layers": 0, "split_kv_layers": layers}
    with prefilled_session(context, context.tokens(_TOKENS), mode, **chosen) as session:
        context.add("split kernels", session.runtime.split_kernels[1])
        model, prompt = session.runtime.target, session.prompt
        cache = next(level.cache for level in session.levels if level.name == "split")
        for rows in (1, 3, 9):
            draft_ms = median_ms(model, cache, prompt[:rows], 5)
            context.add(f"draft forward, {rows} rows", draft_ms, "ms")
        before = session.target.traffic.link_in
        ms = median_ms(model, session.target, prompt[:33], 3)
        context.add("verification, 33 rows", ms, "ms")
        moved = (session.target.traffic.link_in - before) / 4
        context.add("bytes of a verification", moved / 1e9, "GB")


def deterministic(context: Context) -> None:
    """A row's logits are the same bits, alone and in a batch, wherever the KV layers are."""
    layers = load_models(context.choices, context.group)[0].config.full_layers
    tokens = min(context.tokens(_TOKENS), 8_192)
    batches: list[torch.Tensor] = []
    verdicts = []
    for count in (layers, layers // 2, 0):
        chosen: dict[str, Any] = {"gpu_kv_layers": count, "deterministic": True, "graphs": False}
        with prefilled_session(context, tokens, "plain", **chosen) as session:
            context.add("batch-invariant kernels", session.runtime.batch_invariant_kernels[1])
            model, cache, rows = session.runtime.target, session.target, session.prompt[:9]
            batch = model(rows, cache, 9)
            singles = []
            for row in rows.split(1):
                singles.append(model(row, cache, 1))
                cache.advance(1)
            cache.crop(cache.length - 9)
            verdicts.append(torch.equal(batch, torch.cat(singles)))
            what = f"{count} resident layers, rows alone and batched"
            context.add(what, _verdict(verdicts[-1]))
            batches.append(batch.cpu())
    verdicts.append(all(torch.equal(batch, batches[0]) for batch in batches))
    context.add("any number of resident layers", _verdict(verdicts[-1]))
    if not all(verdicts):
        raise RuntimeError("logits differ between batch sizes, or numbers of resident layers")


def plan(context: Context) -> None:
    """The plan of a smaller GPU, the measured peaks, and the time of whole rounds."""
    size = context.choices.device_memory
    context.add("planned as a GPU with", size, "GiB")
    if context.device.type != "cuda":
        _planned(context)
        return
    total = torch.cuda.get_device_properties(context.device).total_memory
    share = min(1.0, usable_bytes(size) / total)
    torch.cuda.set_per_process_memory_fraction(share, context.device)
    try:
        _planned(context)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, context.device)


def _planned(context: Context) -> None:
    """Prefill with the plan of a smaller GPU, and decode."""
    choices, weights = context.choices, weight_bytes(context)
    mode = mode_of(context, choices.mode)
    chosen: dict[str, Any] = {
        "device_memory": planned_memory(choices.device_memory, weights),
        "gpu_kv_layers": choices.gpu_kv_layers,
        "int8_retrieval": choices.int8,
    }
    before = _device_bytes(context)
    with prefilled_session(context, context.tokens(_LONG), mode, **chosen) as session:
        plan, graphs = session.plan.memory, session.slot.graphs
        loaded = driver_bytes(context) - graphs.nbytes
        context.add("slots of heads", f"{plan.slots} x {plan.slot_heads}")
        report_prefill(context, session)
        session.runtime.link.peak_bytes()  # resets the peak, which includes the matrix product
        times, moved = _timed(context, session)
        peaks = {"prefill": session.peaks["prefill"], "forwards": session.runtime.link.peak_bytes()}
        _report_link(context, session, times, moved, {})
        session.runtime.link.peak_bytes()
        _report_rounds(context, session)
        peaks["rounds"] = session.runtime.link.peak_bytes()
        context.add("planned, without weights", plan.device_bytes / 1e9, "GB")
        after = _device_bytes(context)
        if before is None or after is None:  # a CPU, on which a peak is the whole process's
            return
        for phase, peak in peaks.items():
            peak_gb = None if peak is None else (peak - weights) / 1e9
            context.add(f"peak in {phase}, without weights", peak_gb, "GB")
        context.add("memory in use, as counted by the driver", (after - before) / 1e9, "GB")
        loaded = driver_bytes(context) - graphs.nbytes - loaded
        context.add("loaded after prefill, beside torch's allocator", loaded / 1e6, "MB")
        reserved = torch.cuda.memory_reserved(context.device) - weights
        context.add("reserved by torch's allocator, without weights", reserved / 1e9, "GB")
        options = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
        context.add("options of torch's allocator", options or "none")


def _timed(context: Context, session: SequenceState) -> tuple[dict[str, float], float]:
    """Time forwards of all levels; return milliseconds, and the bytes of a verification."""
    before = session.target.traffic.link_in
    times = forward_times(session, _REPEATS)
    for name, ms in times.items():
        context.add(heading(name), ms, "ms")
    count = (1 + _REPEATS) * sum(name.startswith("target") for name in times)
    return times, (session.target.traffic.link_in - before) / count


def _report_link(
    context: Context,
    session: SequenceState,
    times: dict[str, float],
    moved: float,
    compute: dict[str, float],
) -> None:
    """Report the share of the link's rate that verifications reach.

    Args:
        context: the part's context.
        session: the session that owns the link.
        times: milliseconds of forwards by name.
        moved: bytes that a verification copies to the device.
        compute: milliseconds of the same forwards with all KV on the device, if known.
    """
    if not moved:
        return
    with closing(BandwidthProbe(session.runtime.link)) as probe:
        rate = probe.rate(out=False)
    context.add("bytes of a verification", moved / 1e9, "GB")
    context.add("link, one large copy", rate / 1e9, "GB/s")
    link_ms = 1e3 * moved / rate
    for name, ms in times.items():
        if not name.startswith("target"):
            continue
        context.add(f"{heading(name)}: share of the copy rate", link_ms / ms)
        if name in compute:
            bound = max(link_ms, compute[name])
            context.add(f"{heading(name)}: wall / max(link, compute)", ms / bound)


def _report_rounds(context: Context, session: SequenceState) -> None:
    """Decode, and report the time and the tokens of whole rounds."""
    if session.retrieval is not None:
        session.retrieval.selector.min_interval = 1
    sampling, lengths = Sampling(0.6, top_p=0.9), (Fixed(32), Fixed(1))
    decoder, seconds = decode_loop(session, int(session.prompt[0]), sampling, lengths, _ROUNDS_S)
    stats = decoder.stats
    context.add("round", 1e3 * seconds / stats.forwards, "ms")
    context.add("tokens drafted per round", stats.drafted_per_forward or 0.0)
    what = "tokens per verification (meaningless with random weights)"
    context.add(what, stats.tokens_per_forward or 0.0)
    for name, value in session.slot.graphs.counts.items():
        context.add(f"CUDA graphs: {name}", "none" if value is None else value)


def _device_bytes(context: Context) -> int | None:
    """Return the bytes in use on the device, as counted by the driver; None for a CPU."""
    if context.device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(context.device)
    return total - free


def _verdict(same: bool) -> str:
    return "the same bits" if same else "DIFFERENT BITS"
