"""Prometheus metrics with vLLM's names and units, from the events of the engine."""

from __future__ import annotations

from typing import Literal

from warmprefix.errors import MissingExtraError
from warmprefix_tools.emulator.answers import FinishReason
from warmprefix_tools.emulator.engine import EmulatorConfig, EmulatorEngine, EngineObserver

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
except ImportError as exc:
    raise MissingExtraError("cli", "prometheus_client") from exc

__all__ = ["EmulatorMetrics"]

_LABELS = ("model_name", "engine")
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)


class EmulatorMetrics(EngineObserver):
    """Metrics of one engine, in a registry of its own, so that engines in one process stay separate."""

    def __init__(self, config: EmulatorConfig) -> None:
        self._registry = CollectorRegistry()
        self._values = (config.model, "0")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of the requests that were prefilled.")
        self._cached = self._counter("prompt_tokens_cached", "Those of them that were not computed again.")
        self._generated = self._counter("generation_tokens", "Generated tokens.")
        labels = (*_LABELS, "finished_reason")
        self._success = Counter("vllm:request_success", "Finished requests.", labels, registry=self._registry)
        self._ttft = Histogram(
            "vllm:time_to_first_token_seconds",
            "Time to first token in seconds.",
            _LABELS,
            registry=self._registry,
            buckets=_TTFT_BUCKETS,
        ).labels(*self._values)
        profile = config.cache_profile
        is_recurrent = profile.checkpoints is not None and config.window is None
        values = {
            "block_size": config.kv_block_size,
            "mamba_cache_mode": "align" if is_recurrent else "none",
            "num_gpu_blocks": config.kv_blocks,
            "enable_prefix_caching": True,
            "engine": "0",
        }
        info = Gauge("vllm:cache_config_info", "The KV cache's configuration.", [*values], registry=self._registry)
        info.labels(**values).set(1)

    def watch(self, engine: EmulatorEngine) -> None:
        """Read the gauges from `engine` at each scrape; call this once."""
        self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.").set_function(
            lambda: engine.cache.usage
        )
        self._gauge("num_requests_running", "Requests that hold KV blocks.").set_function(lambda: engine.num_running)
        self._gauge("num_requests_waiting", "Requests that wait for them.").set_function(lambda: engine.num_waiting)

    def prefilled(self, prompt_tokens: int, cached_tokens: int, ttft: float) -> None:
        """Count the prompt and its hit."""
        self._queries.inc(prompt_tokens)
        self._hits.inc(cached_tokens)
        self._prompt.inc(prompt_tokens)
        self._cached.inc(cached_tokens)
        self._ttft.observe(ttft)

    def generated(self) -> None:
        """Count one token."""
        self._generated.inc()

    def finished(self, reason: FinishReason | Literal["abort"]) -> None:
        """Count the request by reason, including aborts, as vLLM does."""
        self._success.labels(*self._values, reason).inc()

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(f"vllm:{name}", documentation, _LABELS, registry=self._registry).labels(*self._values)

    def _gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(f"vllm:{name}", documentation, _LABELS, registry=self._registry).labels(*self._values)
