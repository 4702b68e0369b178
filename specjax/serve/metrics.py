"""Metrics of the server under the names of vLLM, which dashboards and benchmarks read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specjax.engine.engine import EngineStats
from specjax.engine.request import RequestOutput

LABELS = ("model_name", "engine")
FINISH_REASONS = ("stop", "length", "abort", "error")
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
SHORT_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
COMPLETIONS = (1, 2, 5, 10, 20, 50, 100)
# name: what it is, and its buckets
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", SECONDS),
    "inter_token_latency_seconds": (
        "Between two chunks of a stream, over the tokens of the second.",
        SHORT_SECONDS,
    ),
    "request_time_per_output_token_seconds": (
        "Time of decoding over output tokens, of a request.",
        SHORT_SECONDS,
    ),
    "e2e_request_latency_seconds": ("From arrival to the end.", SECONDS),
    "request_queue_time_seconds": ("From arrival to a row.", SECONDS),
    "request_inference_time_seconds": ("From a row to the end.", SECONDS),
    "request_prefill_time_seconds": ("From a row to the first token.", SECONDS),
    "request_decode_time_seconds": ("From the first token to the end.", SECONDS),
    "request_prompt_tokens": ("Tokens of the prompt.", TOKENS),
    "request_generation_tokens": ("Tokens of the output.", TOKENS),
    "request_params_n": ("Completions of a prompt.", COMPLETIONS),
}


class ServerMetrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model: str, stats: Callable[[], EngineStats]):
        """Makes the metrics.

        Args:
          model: its name for clients.
          stats: returns the counts of the engine.
        """
        self._stats = stats
        self._labels = (model, "0")
        self._registry = CollectorRegistry()
        self._histograms = {}
        for name, (text, buckets) in HISTOGRAMS.items():
            histogram = Histogram(
                f"vllm:{name}", text, LABELS, buckets=buckets, registry=self._registry
            )
            self._histograms[name] = histogram.labels(*self._labels)
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests that were refused.",
            (*LABELS, "reason"),
            registry=self._registry,
        )
        self._registry.register(self)

    def render(self) -> bytes:
        """Returns everything in the text format of Prometheus."""
        return generate_latest(self._registry)

    def reject(self, reason: str) -> None:
        """Counts a request that was refused."""
        self._rejections.labels(*self._labels, reason).inc()

    def observe(self, output: RequestOutput, seconds: float | None) -> None:
        """Takes in an output of a prompt.

        Args:
          output: of the engine.
          seconds: since the last one of this prompt; None for the first.
        """
        num_new = sum(len(part.token_ids) for part in output.outputs)
        if seconds is not None and num_new:
            self._observe("inter_token_latency_seconds", seconds / num_new)
        if output.finished:
            self._observe_end(output)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _observe_end(self, output: RequestOutput) -> None:
        times = output.metrics
        num_tokens = times.num_generation_tokens
        self._observe("request_prompt_tokens", len(output.prompt_token_ids))
        self._observe("request_generation_tokens", num_tokens)
        self._observe("request_params_n", times.num_completions)
        self._observe("e2e_request_latency_seconds", times.finished_time - times.arrival_time)
        if times.first_scheduled_time is not None:
            queued = times.first_scheduled_time - times.arrival_time
            self._observe("request_queue_time_seconds", queued)
            inference = times.finished_time - times.first_scheduled_time
            self._observe("request_inference_time_seconds", inference)
        if times.first_token_time is None:
            return
        self._observe("time_to_first_token_seconds", times.first_token_time - times.arrival_time)
        prefill = times.first_token_time - times.first_scheduled_time
        self._observe("request_prefill_time_seconds", prefill)
        decode = times.finished_time - times.first_token_time
        self._observe("request_decode_time_seconds", decode)
        if num_tokens > 1:
            self._observe("request_time_per_output_token_seconds", decode / (num_tokens - 1))

    def collect(self) -> Iterable[Metric]:
        """Yields the counts of the engine: what a registry calls."""
        stats = self._stats()
        yield self._gauge("num_requests_running", "Completions that have a row.", stats.num_running)
        yield self._gauge(
            "num_requests_waiting", "Completions that wait for one.", stats.num_waiting
        )
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the pages in use, 0 to 1.", stats.kv_cache_usage
        )
        counters = {
            "num_preemptions": ("Preemptions.", stats.num_preemptions),
            "prefix_cache_queries": ("Prompt tokens looked up.", stats.num_queried_tokens),
            "prefix_cache_hits": ("Prompt tokens found.", stats.num_hit_tokens),
            "prompt_tokens": ("Tokens of prompts.", stats.num_prompt_tokens),
            "generation_tokens": (
                "Tokens of completions that have ended.",
                stats.num_generated_tokens,
            ),
            "spec_decode_num_drafts": ("Drafts that were verified.", stats.num_drafts),
            "spec_decode_num_draft_tokens": ("Their tokens.", stats.num_draft_tokens),
            "spec_decode_num_accepted_tokens": (
                "Those that were accepted.",
                stats.num_accepted_tokens,
            ),
        }
        for name, (text, value) in counters.items():
            yield self._counter(name, text, {"": value})
        reasons = {reason: stats.num_finished.get(reason, 0) for reason in FINISH_REASONS}
        yield self._counter(
            "request_success", "Completions that have ended.", reasons, "finished_reason"
        )
        positions = {str(i): n for i, n in enumerate(stats.num_accepted_per_position)}
        yield self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by position in the draft.",
            positions,
            "position",
        )

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: a registry would otherwise collect to learn the names."""
        return ()

    def _gauge(self, name: str, text: str, value: Any) -> Metric:
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        gauge.add_metric(self._labels, value)
        return gauge

    def _counter(
        self, name: str, text: str, values: dict[str, float], label: str | None = None
    ) -> Metric:
        labels = LABELS if label is None else (*LABELS, label)
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=labels)
        for value_of_label, value in values.items():
            own = self._labels if label is None else (*self._labels, value_of_label)
            counter.add_metric(own, value)
        return counter
