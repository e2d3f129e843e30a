"""What a gateway counts, as Prometheus metrics. No label holds a text, a key, a session or a tenant."""

from __future__ import annotations

from warmprefix.errors import MissingExtraError

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
except ImportError as exc:
    raise MissingExtraError("serve", "prometheus-client") from exc

__all__ = ["GatewayMetrics"]

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class GatewayMetrics:
    """The metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests, by route and status.", "route", "status")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens that upstreams report.")
        self.unreported_tokens = self._counter("unreported_tokens", "Of these, those without a report of cached ones.")
        self.unreported = self._counter("unreported_answers", "Answers without a report of cached tokens.")
        self.cached_tokens = self._counter("cached_tokens", "Of all others, found in a cache.")
        self.uncached_tokens = self._counter(
            "uncached_tokens", "Not found: of a first request, new, behind a changed front or a cut, or lost.", "cause"
        )
        self.references = self._counter("references", "Tool results sent as a reference.")
        self.saved_tokens = self._counter("saved_tokens", "Tokens that these references save, estimated.")
        self.echoes = self._counter("echoes", "References that models copied into tool calls, by outcome.", "outcome")
        self.histories = self._counter(
            "server_histories", "Responses that upstreams keep, by what became of their record.", "outcome"
        )
        self.shared_sessions = self._counter(
            "shared_sessions", "Look-ups of a request's session in Redis, by outcome.", "outcome"
        )
        self.marked = self._counter("marked_requests", "Requests that got cache marks.")
        self.contexts = self._counter("contexts", "Contexts found, by what became of their order.", "order")
        self.touches = self._counter("touches", "Requests of the gateway's own that keep a context cached.", "outcome")
        self.touch_tokens = self._counter("touch_tokens", "Prompt tokens of these, by where they came from.", "source")
        self.upstream_errors = self._counter("upstream_errors", "Failures of upstreams, by reason.", "reason")
        self.retries = self._counter("retries", "Requests sent again, by reason.", "reason")
        self.disconnects = self._counter("disconnects", "Clients that left before the end.")
        self.refused = self._counter("refused", "Requests not passed on, by reason.", "reason")
        self.failures = self._counter(
            "failures", "Failures of the gateway itself; requests pass as they came if they can."
        )
        self.in_flight = self._gauge("in_flight", "Requests that are not over.")
        self.sessions = self._gauge("sessions", "Sessions in memory.")
        self.upstreams = self._gauge("upstreams", "Upstreams that answer.")
        self.added_seconds = Histogram(
            "warmprefix_gateway_added_seconds",
            "Time to decide what to send.",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"warmprefix_gateway_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"warmprefix_gateway_{name}", text, registry=self._registry)

    def text(self) -> bytes:
        """Return all metrics in the text format."""
        return generate_latest(self._registry)
