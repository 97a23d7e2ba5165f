"""Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from decoding.app.server.worker.jobs import RequestQueue
from decoding.engine.session_manager import SequenceManager
from decoding.engine.stats import Stats

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The metrics of a server since its start."""

    def __init__(self, queue: RequestQueue, sessions: SequenceManager):
        """Count from now on; the memory is that of these sequences, read on any thread."""
        self._registry = registry = CollectorRegistry()
        self.replies = Counter(
            "tierforce_replies", "Replies by their HTTP status.", ["status"], registry=registry
        )
        self._tokens = Counter(
            "tierforce_tokens",
            "Tokens prefilled, reused from caches, loaded from disk, generated.",
            ["kind"],
            registry=registry,
        )
        self._link = Counter(
            "tierforce_link_bytes",
            "Bytes over one rank's host link, for the target's KV cache.",
            registry=registry,
        )
        self._first = Histogram(
            "tierforce_time_to_first_token_seconds",
            "From admission to the first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._whole = Histogram(
            "tierforce_answer_seconds",
            "From admission to the end of the answer.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._per_verification = Gauge(
            "tierforce_tokens_per_verification",
            "Tokens per verification of the last answer.",
            registry=registry,
        )
        self._hits = Counter(
            "tierforce_prefix_hits",
            "Requests whose prompt began in caches in memory, or on disk.",
            ["where"],
            registry=registry,
        )
        memory = Gauge(
            "tierforce_sequence_bytes",
            "Memory of all open sequences on one rank, by tier; swapped: conversations in host "
            "memory alone.",
            ["tier"],
            registry=registry,
        )
        memory.labels("device").set_function(
            lambda: sum(plan.device_bytes for plan in sessions.plans())
        )
        memory.labels("host").set_function(
            lambda: sum(plan.host_bytes for plan in sessions.plans())
        )
        memory.labels("swapped").set_function(lambda: sessions.memory.swapped_bytes)
        waiting = Gauge("tierforce_requests_waiting", "Requests in the queue.", registry=registry)
        waiting.set_function(lambda: queue.waiting)
        running = Gauge("tierforce_requests_running", "Requests being answered.", registry=registry)
        running.set_function(lambda: queue.running)

    def count(self, stats: Stats, seconds: float) -> None:
        """Count a request that has ended."""
        cached = stats.reused_tokens + stats.loaded_tokens
        self._tokens.labels("prefilled").inc(max(0, stats.prompt_tokens - cached))
        self._tokens.labels("reused").inc(stats.reused_tokens)
        self._tokens.labels("loaded").inc(stats.loaded_tokens)
        self._tokens.labels("generated").inc(stats.new_tokens)
        self._hits.labels("memory").inc(stats.reused_tokens > 0)
        self._hits.labels("disk").inc(stats.loaded_tokens > 0)
        if (traffic := stats.traffic.get("target")) is not None:
            self._link.inc(traffic.link_in + traffic.link_out)
        if stats.new_tokens:
            self._first.observe(stats.first_token_s)
            self._whole.observe(seconds)
        if (tokens := stats.tokens_per_verification) is not None:
            self._per_verification.set(tokens)

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self._registry)
