"""What a replica shows of its versions and its training to Prometheus. Engine thread only."""

from collections import Counter
from collections.abc import Iterable, Mapping

from adapters.model import Version
from infra.metrics import ReplicaMetrics
from serving.replica.residency import Residency

Labels = tuple[str, ...]


def show_versions(metrics: ReplicaMetrics, residency: Residency, kv_tokens: Mapping[Version | None, int]) -> None:
    """Show which versions are resident, active and pinned, and the KV positions of each; those that are gone vanish.

    Requests without an adapter have empty labels.
    """
    pins = residency.places.pins()
    resident = residency.resident()
    pinned: Counter[Labels] = Counter()
    for version in resident:
        pinned[_labels(version)] += pins.get(version.uid, 0)
    metrics.resident_versions.show(_count(resident))
    metrics.pins.show(pinned)
    metrics.active_versions.show(_count(residency.active()))
    held: Counter[Labels] = Counter()
    for worn, tokens in kv_tokens.items():
        held[("", "") if worn is None else _labels(worn)] += tokens
    metrics.kv_tokens.show(held)
    metrics.adapters_waiting.set(len(residency.awaited()))


def _count(versions: Iterable[Version]) -> Counter[Labels]:
    # Two versions of one label: the same steps after the same base, once before a restart of the round.
    return Counter(_labels(version) for version in versions)


def _labels(version: Version) -> Labels:
    return version.adapter, version.label
