"""Prometheus series with vLLM's suffixes, labels and buckets: requests seen here, and the engine's newest snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from fineinfer.messages import EngineStats

_TTFT = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_ITL = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
_LATENCY = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)  # fmt: skip
_TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
_PARAMS_N = (1, 2, 5, 10, 20)
_HTTP = (.01, .05, .1, .5, 1, 5, 10, 60, 600)  # fmt: skip
_LABELS = ("model_name", "engine")

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Time from arrival to the first token.", _TTFT),
    "inter_token_latency_seconds": ("Time between two tokens of a request.", _ITL),
    "request_time_per_output_token_seconds": ("Mean time of a token after the first, by request.", _ITL),
    "e2e_request_latency_seconds": ("Time from arrival to the last token.", _LATENCY),
    "request_queue_time_seconds": ("Time in the waiting queue.", _LATENCY),
    "request_inference_time_seconds": ("Time from the first slice to the last token.", _LATENCY),
    "request_prefill_time_seconds": ("Time from the first slice to the first token.", _LATENCY),
    "request_decode_time_seconds": ("Time from the first token to the last.", _LATENCY),
    "request_training_time_seconds": ("Training time while a request was open: what it can have cost it.", _LATENCY),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Generated tokens of a request.", _TOKENS),
    "request_params_n": ("The n of a request.", _PARAMS_N),
    "request_params_max_tokens": ("The max_tokens of a request.", _TOKENS),
}


@dataclass
class RequestTimes:
    """What is measured of one sequence; times in seconds of ``time.monotonic()``."""

    arrival_s: float
    queue_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    training_s: float = 0.0


class ServerMetrics:
    """The series of one api worker.

    Args:
        prefix: ``fineinfer:`` or, for dashboards made for vLLM, ``vllm:``.
        model_name: Served name of the base model.
        stats: Gives the engine's newest snapshot.
    """

    def __init__(self, prefix: str, model_name: str, stats: Callable[[], EngineStats | None]) -> None:
        self._registry = CollectorRegistry()
        self._labels = (model_name, "0")
        self._histograms = {
            name: Histogram(prefix + name, text, _LABELS, buckets=buckets, registry=self._registry).labels(
                *self._labels
            )
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._success = Counter(
            f"{prefix}request_success", "Requests that ended.", (*_LABELS, "finished_reason"), registry=self._registry
        )
        self._http = Counter(
            "http_requests", "HTTP requests.", ("handler", "method", "status"), registry=self._registry
        )
        self._http_time = Histogram(
            "http_request_duration_seconds", "Time until the answer ended.", ("handler", "method"), buckets=_HTTP,
            registry=self._registry,
        )  # fmt: skip
        self._registry.register(_EngineCollector(prefix, self._labels, stats))

    def on_token(self, times: RequestTimes, now_s: float, num_tokens: int, queue_s: float | None) -> None:
        """``num_tokens`` tokens of a sequence arrived together."""
        if times.first_token_s is None or times.last_token_s is None:
            times.first_token_s, times.queue_s = now_s, queue_s or 0.0
            self._histograms["time_to_first_token_seconds"].observe(now_s - times.arrival_s)
            self._histograms["request_queue_time_seconds"].observe(times.queue_s)
        else:
            self._histograms["inter_token_latency_seconds"].observe((now_s - times.last_token_s) / num_tokens)
        times.last_token_s = now_s

    def on_end(self, times: RequestTimes, reason: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """A sequence ended."""
        self._success.labels(*self._labels, reason).inc()
        observe = {name: histogram.observe for name, histogram in self._histograms.items()}
        observe["request_prompt_tokens"](num_prompt_tokens)
        observe["request_generation_tokens"](num_tokens)
        if times.first_token_s is None or times.last_token_s is None:
            return
        e2e, ttft = times.last_token_s - times.arrival_s, times.first_token_s - times.arrival_s
        observe["e2e_request_latency_seconds"](e2e)
        observe["request_training_time_seconds"](times.training_s)
        observe["request_inference_time_seconds"](e2e - times.queue_s)
        observe["request_prefill_time_seconds"](ttft - times.queue_s)
        observe["request_decode_time_seconds"](e2e - ttft)
        if num_tokens > 1:
            observe["request_time_per_output_token_seconds"]((e2e - ttft) / (num_tokens - 1))

    def on_params(self, n: int, max_tokens: int | None) -> None:
        """A generation request was accepted."""
        self._histograms["request_params_n"].observe(n)
        if max_tokens is not None:
            self._histograms["request_params_max_tokens"].observe(max_tokens)

    def on_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """An HTTP answer ended; ``handler`` is the route's pattern, so that series stay few."""
        self._http.labels(handler, method, f"{status // 100}xx").inc()
        self._http_time.labels(handler, method).observe(seconds)

    def render(self) -> bytes:
        """The text format of a scrape."""
        text: bytes = generate_latest(self._registry)
        return text


class _EngineCollector:
    """Turns the newest EngineStats into series at scrape time; counters start anew with each engine process."""

    def __init__(self, prefix: str, labels: tuple[str, str], stats: Callable[[], EngineStats | None]) -> None:
        self._prefix, self._labels, self._stats = prefix, labels, stats

    def describe(self) -> list[Any]:
        """Nothing: names depend on the snapshot."""
        return []

    def collect(self) -> Iterator[Any]:
        """The families of one scrape."""
        stats = self._stats()
        if stats is None:
            return
        for name, text, value in _gauges(stats):
            if value is not None:
                yield self._family(GaugeMetricFamily, name, text, [((), value)])
        for name, text, value in _counters(stats):
            yield self._family(CounterMetricFamily, name, text, [((), value)])
        owners = [((owner,), float(num_bytes)) for owner, num_bytes in sorted(stats.memory_bytes.items())]
        yield self._family(GaugeMetricFamily, "memory_bytes", "Leased memory by owner.", owners, "owner")
        if stats.train_job_id is not None:
            used = [((stats.train_job_id,), stats.train_job_device_s)]
            text = "Device time that the running job has used in all, engines before this one included."
            yield self._family(GaugeMetricFamily, "train_job_device_seconds", text, used, "job_id")
        steps = [((name,), float(number)) for name, number in sorted(stats.ladder_steps_total.items())]
        text = "Times that memory was taken from training, and given back, by rung."
        yield self._family(CounterMetricFamily, "memory_ladder_steps", text, steps, "rung")
        slices = [((kind,), ms / 1e3) for kind, ms in sorted(stats.slice_times_ms.items())]
        yield self._family(GaugeMetricFamily, "slice_time_seconds", "Mean time of a slice by kind.", slices, "kind")

    def _family(
        self, kind: Any, name: str, text: str, samples: Sequence[tuple[tuple[str, ...], float]], *extra: str
    ) -> Any:
        family = kind(self._prefix + name, text, labels=(*_LABELS, *extra))
        for labels, value in samples:
            family.add_metric((*self._labels, *labels), value)
        return family


def _gauges(stats: EngineStats) -> list[tuple[str, str, float | None]]:
    kv_usage = stats.kv_slots_used / max(1, stats.kv_slots_now)
    return [
        ("engine_clock_seconds", "The engine's monotonic clock when these numbers were taken.", stats.time_s),
        ("num_requests_running", "Requests being processed.", stats.num_running),
        ("num_requests_waiting", "Requests waiting.", stats.num_waiting),
        (
            "kv_cache_usage_perc",
            "Used part of the KV pool; 1 is all.",
            kv_usage,
        ),
        ("kv_slots_used", "Token slots in use.", stats.kv_slots_used),
        ("kv_slots_cached", "Token slots that only the prefix cache holds.", stats.kv_slots_cached),
        ("kv_slots_now", "Token slots of the pool now.", stats.kv_slots_now),
        ("kv_slots_max", "Token slots the pool can grow to.", stats.kv_slots_max),
        ("num_adapters", "Adapter names that can be served.", len(stats.adapters)),
        ("lora_slots", "Adapter slots.", stats.adapter_slots),
        ("lora_slots_used", "Adapter slots that hold an adapter.", stats.adapter_slots_used),
        ("train_step", "Finished updates of the running job.", stats.train_step),
        ("train_steps_planned", "Updates of the running job.", stats.train_total_steps),
        ("train_loss", "Loss of the newest update.", stats.train_loss),
        ("train_learning_rate", "Learning rate of the newest update.", stats.train_learning_rate),
        ("train_grad_norm", "Gradient norm of the newest update.", stats.train_grad_norm),
        ("train_tokens_per_second", "Training speed.", stats.train_tokens_per_s),
    ]


def _counters(stats: EngineStats) -> list[tuple[str, str, float]]:
    return [
        ("prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens_total),
        ("generation_tokens", "Tokens generated.", stats.generation_tokens_total),
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries_total),
        ("prefix_cache_hits", "Prompt tokens that it had.", stats.prefix_hits_total),
        ("num_preemptions", "Requests preempted.", stats.num_preemptions_total),
        ("adapter_loads", "Adapter versions written into slots.", stats.adapter_loads_total),
        ("adapter_evictions", "Adapter versions that lost their slot to others.", stats.adapter_evictions_total),
        ("train_tokens", "Tokens trained.", stats.train_tokens_total),
        ("train_device_seconds", "Time that training slices took.", stats.train_device_s_total),
        ("train_preempted_seconds", "Time a started update stood still for requests.", stats.train_yielded_s_total),
        ("train_kept_layers_dropped", "Layer graphs dropped to give memory back.", stats.kept_layers_dropped_total),
        ("kv_resizes", "Changes of the KV pool's size.", stats.kv_resizes_total),
    ]
