"""Every Prometheus metric, declared once. A process makes the group it feeds and renders it at ``/metrics``.

Names that start with ``tgi_`` mean what they mean in text-generation-inference, so that its dashboards and load
tools read them; ``collm_`` names are ours. Times are seconds.
"""

import re
from collections.abc import Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DURATION_BUCKETS = tuple(0.00015 * 1.5**i for i in range(35))
"""TGI's."""
TOKEN_BUCKETS = tuple(float(2**i) for i in range(15))
PAUSE_BUCKETS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
WAIT_BUCKETS = (1e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1, 2e-1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
SLICE_BUCKETS = (1e-3, 2e-3, 5e-3, 1e-2, 1.5e-2, 2e-2, 3e-2, 5e-2, 1e-1, 2e-1)

_TGI_TOTAL = re.compile(rb"^((?:# (?:HELP|TYPE) )?tgi_\w+)_total\b", re.MULTILINE)

disable_created_metrics()


class ComingGauge:
    """A gauge whose label values come and go, as versions do: those that are not shown again are removed."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str], *, registry: CollectorRegistry) -> None:
        self._gauge = Gauge(name, help_text, labels, registry=registry)
        self._shown: set[tuple[str, ...]] = set()

    def show(self, values: Mapping[tuple[str, ...], float]) -> None:
        """Set the values by labels; from one thread only, though any may read."""
        for labels, value in values.items():
            self._gauge.labels(*labels).set(value)
        for labels in self._shown - values.keys():
            self._gauge.remove(*labels)
        self._shown = set(values)


class RequestMetrics:
    """Requests as TGI counts them; fed by the gateway and by each replica."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def duration(name: str, help_text: str) -> Histogram:
            return Histogram(name, help_text, buckets=DURATION_BUCKETS, registry=registry)

        def tokens(name: str, help_text: str) -> Histogram:
            return Histogram(name, help_text, buckets=TOKEN_BUCKETS, registry=registry)

        self.request_count = Counter("tgi_request_count", "Requests received", registry=registry)
        self.request_success = Counter("tgi_request_success", "Requests answered whole", registry=registry)
        self.request_failure = Counter(
            "tgi_request_failure",
            "Requests not answered whole: overloaded, validation, incomplete, dropped, generation",
            ["err"],
            registry=registry,
        )
        self.request_duration = duration("tgi_request_duration", "Arrival to last token")
        self.request_queue_duration = duration("tgi_request_queue_duration", "Arrival to first prefill")
        self.request_inference_duration = duration("tgi_request_inference_duration", "First prefill to last token")
        self.request_mean_time_per_token_duration = duration(
            "tgi_request_mean_time_per_token_duration", "Mean gap between a request's tokens"
        )
        self.request_generated_tokens = tokens("tgi_request_generated_tokens", "Tokens generated per request")
        self.request_input_length = tokens("tgi_request_input_length", "Prompt tokens per request")
        self.request_max_new_tokens = tokens("tgi_request_max_new_tokens", "Tokens asked for per request")

    def render(self) -> bytes:
        """Return the text exposition; TGI's counters carry no ``_total``, so theirs is cut off."""
        return _TGI_TOTAL.sub(rb"\1", generate_latest(self.registry))


class ReplicaMetrics(RequestMetrics):
    """A replica: its queue, its steps, its versions, its training."""

    def __init__(self) -> None:
        super().__init__()
        registry = self.registry

        self.queue_size = Gauge("tgi_queue_size", "Requests that wait for their first prefill", registry=registry)
        self.batch_current_size = Gauge("tgi_batch_current_size", "Requests that run", registry=registry)
        self.batch_inference_count = Counter("tgi_batch_inference_count", "Engine steps", ["method"], registry=registry)
        self.batch_inference_success = Counter(
            "tgi_batch_inference_success", "Engine steps that went well", ["method"], registry=registry
        )
        self.batch_inference_failure = Counter(
            "tgi_batch_inference_failure", "Engine steps that failed", ["method"], registry=registry
        )
        self.batch_inference_duration = Histogram(
            "tgi_batch_inference_duration",
            "Seconds of an engine step; method prefill if it computed any prompt, else decode",
            ["method"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )

        self.queue_by_class = Gauge("collm_queue_requests", "Waiting requests", ["priority"], registry=registry)
        self.queue_age_seconds = Gauge(
            "collm_queue_age_seconds", "Age of the oldest waiting request", ["priority"], registry=registry
        )
        self.kv_used_ratio = Gauge("collm_kv_used_ratio", "Share of KV rows in use", registry=registry)
        self.prefix_looked_up_tokens = Counter(
            "collm_prefix_looked_up_tokens", "Prompt tokens of requests that began", ["adapter"], registry=registry
        )
        self.prefix_hit_tokens = Counter(
            "collm_prefix_hit_tokens", "Of them, those whose KV was there already", ["adapter"], registry=registry
        )
        self.prefix_kept_tokens = Gauge(
            "collm_prefix_kept_tokens", "KV positions that free rows hold for prompts to come", registry=registry
        )
        self.cancelled = Counter("collm_requests_cancelled", "Requests whose caller went away", registry=registry)

        version = ("adapter", "version")
        self.resident_versions = ComingGauge(
            "collm_resident_versions", "Adapter versions in places", version, registry=registry
        )
        self.active_versions = ComingGauge(
            "collm_active_versions", "Versions that new requests get, resident or not", version, registry=registry
        )
        self.pins = ComingGauge("collm_pinned_requests", "Requests pinned to a version", version, registry=registry)
        self.kv_tokens = ComingGauge(
            "collm_kv_tokens", "KV positions that running requests hold", version, registry=registry
        )
        self.adapters_waiting = Gauge(
            "collm_adapters_waiting", "Adapters whose requests wait for a place", registry=registry
        )
        self.place_waits = Counter(
            "collm_place_waits",
            "Times that requests waited for their version to come in",
            ["adapter"],
            registry=registry,
        )
        self.place_wait_seconds = Histogram(
            "collm_place_wait_seconds", "How long they waited", buckets=WAIT_BUCKETS, registry=registry
        )
        self.swaps = Counter("collm_swaps", "Changes of the active version", ["adapter", "kind"], registry=registry)
        self.swaps_deferred = Counter(
            "collm_swaps_deferred", "Publishes that found no free place and wait", ["adapter"], registry=registry
        )
        self.swaps_refused = Counter(
            "collm_swaps_refused", "Publishes refused as stale or by the probe", ["adapter"], registry=registry
        )
        self.swap_pause_seconds = Histogram(
            "collm_swap_pause_seconds",
            "Engine-thread time that a swap takes from serving",
            ["adapter"],
            buckets=PAUSE_BUCKETS,
            registry=registry,
        )

        self.train_tokens = Counter("collm_train_tokens", "Supervised tokens trained", ["adapter"], registry=registry)
        self.train_tokens_decoding = Counter(
            "collm_train_tokens_while_decoding",
            "Of those, trained while a request was decoding",
            ["adapter"],
            registry=registry,
        )
        self.train_loss = ComingGauge(
            "collm_train_loss", "Nats per token of the latest step; version: where it began", version, registry=registry
        )
        self.train_share = ComingGauge(
            "collm_train_share", "Share of the time that training took", ["adapter"], registry=registry
        )
        self.train_share_ceiling = Gauge(
            "collm_train_share_ceiling", "Ceiling that the controller set", registry=registry
        )
        self.train_preemptions = Counter(
            "collm_train_preemptions", "Times that training stopped for requests", ["adapter"], registry=registry
        )
        self.slices = Counter(
            "collm_slices",
            "Background slices run: train, of an adapter, or score",
            ["adapter", "work"],
            registry=registry,
        )
        self.slice_seconds = Histogram(
            "collm_slice_seconds", "Seconds of a background slice", buckets=SLICE_BUCKETS, registry=registry
        )


class GatewayMetrics(RequestMetrics):
    """The gateway: what it relayed, and where to."""

    def __init__(self) -> None:
        super().__init__()
        registry = self.registry
        self.inflight = Gauge("collm_gateway_inflight", "Requests that are being relayed", registry=registry)
        self.relayed = Counter("collm_gateway_relayed", "Requests sent to a replica", ["replica"], registry=registry)
        self.retried = Counter(
            "collm_gateway_retried", "Requests sent again before their first token", ["replica"], registry=registry
        )
        self.replicas_live = Gauge("collm_gateway_replicas_live", "Replicas that get requests", registry=registry)
        self.weight = Gauge("collm_gateway_weight", "Dispatch weight in force", ["replica"], registry=registry)
