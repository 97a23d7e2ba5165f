"""Parts of a GPU day that run a model: where its KV lives, and what its forward passes then take.

The physics: a verification should take the larger of its link time and its compute. With all KV on
the device it is compute alone, and tells what the streamed one is compared with.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch

from bench.gpu.choices import Context
from bench.gpu.models import (
    loaded,
    mode_of,
    planned_memory,
    prefilled,
    report_prefill,
    usable_bytes,
    weight_bytes,
)
from bench.harness.decode_loop import decode_loop
from bench.harness.tables import heading
from bench.speed.forwards import median_ms, passes
from decoding import Sampling
from decoding.engine.session import SequenceState
from decoding.speculation.draft_length import Fixed
from offload.memory.bandwidth import BandwidthProbe

_TOKENS = 65_536  # of a prompt
_LONG = 130_048  # of the prompt with which a 4090's memory is planned
_REPEATS = 3  # of a kind of pass that is timed, behind one that warms up


def resident(context: Context) -> None:
    """All KV on the device: passes are compute alone, and short ones are recorded."""
    layers = loaded(context.choices, context.group)[0].config.layers
    mode = mode_of(context, context.choices.mode)
    int8 = bool(context.choices.int8)
    tokens = context.tokens(_TOKENS)
    with prefilled(context, tokens, mode, gpu_kv_layers=layers, int8_retrieval=int8) as session:
        before = _device_bytes(context)
        times, _ = _timed(context, session)
        context.compute |= times
        if before is not None:
            after = _device_bytes(context) or before
            context.add(
                "device memory that passes and recordings took", (after - before) / 1e6, "MB"
            )
        for name, value in session.runner.counts.items():
            context.add(f"recordings: {name}", "none" if value is None else value)


def streamed(context: Context) -> None:
    """No layer's KV on the device, or as many as were asked for: what hides behind the link."""
    mode = mode_of(context, context.choices.mode)
    int8 = context.choices.int8 is not False
    layers = context.choices.gpu_kv_layers or 0
    tokens = context.tokens(_TOKENS)
    with prefilled(context, tokens, mode, gpu_kv_layers=layers, int8_retrieval=int8) as session:
        times, moved = _timed(context, session)
        _report_link(context, session, times, moved, context.compute)


def split(context: Context) -> None:
    """Layers whose high bytes are on the device: drafts against these, exact verifications."""
    layers = loaded(context.choices, context.group)[0].config.layers
    mode = mode_of(context, "split-hierarchical")
    chosen: dict[str, Any] = {"gpu_kv_layers": 0, "split_kv_layers": layers}
    with prefilled(context, context.tokens(_TOKENS), mode, **chosen) as session:
        context.add("fused kernels", session.runtime.split_kernels[1])
        model, prompt = session.runtime.target, session.prompt
        near = next(level.cache for level in session.levels if level.name == "split")
        for rows in (1, 3, 9):
            context.add(f"draft pass, {rows} rows", median_ms(model, near, prompt[:rows], 5), "ms")
        before = session.target.traffic.link_in
        ms = median_ms(model, session.target, prompt[:33], 3)
        context.add("verification, 33 rows", ms, "ms")
        moved = (session.target.traffic.link_in - before) / 4
        context.add("bytes of a verification", moved / 1e9, "GB")


def deterministic(context: Context) -> None:
    """A row's logits are the same bits, alone and among others, wherever layers live."""
    layers = loaded(context.choices, context.group)[0].config.layers
    tokens = min(context.tokens(_TOKENS), 8_192)
    found: list[torch.Tensor] = []
    verdicts = []
    for count in (layers, layers // 2, 0):
        chosen: dict[str, Any] = {"gpu_kv_layers": count, "deterministic": True, "graphs": False}
        with prefilled(context, tokens, "plain", **chosen) as session:
            context.add("fused kernels", session.runtime.batch_invariant_kernels[1])
            model, cache, rows = session.runtime.target, session.target, session.prompt[:9]
            together = model(rows, cache, 9)
            alone = []
            for row in rows.split(1):
                alone.append(model(row, cache, 1))
                cache.advance(1)
            cache.crop(cache.length - 9)
            verdicts.append(torch.equal(together, torch.cat(alone)))
            what = f"{count} resident layers, rows alone and together"
            context.add(what, _verdict(verdicts[-1]))
            found.append(together.cpu())
    verdicts.append(all(torch.equal(each, found[0]) for each in found))
    context.add("wherever layers live", _verdict(verdicts[-1]))
    if not all(verdicts):
        raise RuntimeError("logits are not the same bits")


def plan(context: Context) -> None:
    """What a smaller card would plan, whether the plan holds, and what whole rounds take."""
    size = context.choices.device_memory
    context.add("a card with", size, "GiB")
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
    """Read a prompt by the plan of a smaller card, and decode."""
    choices, weights = context.choices, weight_bytes(context)
    mode = mode_of(context, choices.mode)
    chosen: dict[str, Any] = {
        "device_memory": planned_memory(choices.device_memory, weights),
        "gpu_kv_layers": choices.gpu_kv_layers,
        "int8_retrieval": choices.int8 is not False,
    }
    before = _device_bytes(context)
    with prefilled(context, context.tokens(_LONG), mode, **chosen) as session:
        context.add("slots of heads", f"{session.plan.slots} x {session.plan.slot_heads}")
        report_prefill(context, session)
        session.runtime.link.peak_bytes()  # which forgets that of the matrix product
        times, moved = _timed(context, session)
        peaks = {"prefill": session.peaks["prefill"], "passes": session.runtime.link.peak_bytes()}
        _report_link(context, session, times, moved, {})
        session.runtime.link.peak_bytes()
        _report_rounds(context, session)
        peaks["rounds"] = session.runtime.link.peak_bytes()
        context.add("planned, beside weights", session.plan.device_bytes / 1e9, "GB")
        after = _device_bytes(context)
        if before is None or after is None:  # of a processor: peaks are all that the process holds
            return
        for phase, most in peaks.items():
            beside = None if most is None else (most - weights) / 1e9
            context.add(f"peak in {phase}, beside weights", beside, "GB")
        context.add("taken, by the driver's count", (after - before) / 1e9, "GB")


def _timed(context: Context, session: SequenceState) -> tuple[dict[str, float], float]:
    """Time forward passes of all levels; return milliseconds, and the bytes of a verification."""
    before = session.target.traffic.link_in
    times = passes(session, _REPEATS)
    for name, ms in times.items():
        context.add(heading(name), ms, "ms")
    made = (1 + _REPEATS) * sum(name.startswith("target") for name in times)
    return times, (session.target.traffic.link_in - before) / made


def _report_link(
    context: Context,
    session: SequenceState,
    times: dict[str, float],
    moved: float,
    compute: dict[str, float],
) -> None:
    """Report what share of the link's rate verifications reach.

    Args:
        context: of the part.
        session: whose link it is.
        times: milliseconds of passes by name.
        moved: bytes that a verification copies to the device.
        compute: milliseconds of the same passes with all KV on the device, where known.
    """
    if not moved:
        return
    with closing(BandwidthProbe(session.runtime.link)) as copies:
        rate = copies.rate(out=False)
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
    """Decode in whole rounds."""
    if session.retrieval is not None:
        session.retrieval.selector.min_interval = 1
    sampling, lengths = Sampling(0.6, top_p=0.9), (Fixed(32), Fixed(1))
    decoder, seconds = decode_loop(session, int(session.prompt[0]), sampling, lengths)
    stats = decoder.stats
    context.add("a round", 1e3 * seconds / stats.forwards, "ms")
    context.add("tokens drafted in it", stats.drafted_per_forward or 0.0)
    what = "tokens per verification (drawn weights say nothing)"
    context.add(what, stats.tokens_per_forward or 0.0)
    for name, value in session.runner.counts.items():
        context.add(f"recordings: {name}", "none" if value is None else value)


def _device_bytes(context: Context) -> int | None:
    """Return the bytes in use on the device by the driver's count; None for a processor."""
    if context.device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(context.device)
    return total - free


def _verdict(same: bool) -> str:
    return "the same bits" if same else "OTHER BITS"
