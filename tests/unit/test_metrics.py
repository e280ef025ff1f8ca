"""Metrics: TGI's names as TGI writes them, one registry per process."""

import re

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from infra.metrics import ComingGauge, GatewayMetrics, ReplicaMetrics


def test_tgi_counters_carry_no_suffix_and_ours_do() -> None:
    metrics = ReplicaMetrics()
    metrics.request_count.inc()
    metrics.request_failure.labels("overloaded").inc(2)
    metrics.swaps.labels("code", "local").inc()
    lines = metrics.render().decode().splitlines()
    assert "tgi_request_count 1.0" in lines
    assert "# TYPE tgi_request_count counter" in lines
    assert 'tgi_request_failure{err="overloaded"} 2.0' in lines
    assert 'collm_swaps_total{adapter="code",kind="local"} 1.0' in lines
    assert not [line for line in lines if re.match(r"(# \w+ )?tgi_\w+_total|.*_created", line)]


def test_what_is_rendered_can_be_read() -> None:
    for metrics in (ReplicaMetrics(), GatewayMetrics()):
        names = {family.name for family in text_string_to_metric_families(metrics.render().decode())}
        assert {"tgi_request_count", "tgi_request_duration", "process_resident_memory_bytes"} <= names


def test_two_in_one_process_do_not_meet() -> None:
    one, other = ReplicaMetrics(), ReplicaMetrics()
    one.request_count.inc()
    assert b"tgi_request_count 0.0" in other.render()


def test_durations_have_tgis_buckets() -> None:
    metrics = ReplicaMetrics()
    metrics.request_duration.observe(0.0002)
    bounds = re.findall(r'tgi_request_duration_bucket\{le="([^"]+)"\}', metrics.render().decode())
    assert len(bounds) == 36
    assert float(bounds[0]) == 0.00015
    assert float(bounds[1]) == 0.00015 * 1.5


def test_labels_that_are_not_shown_again_are_removed() -> None:
    registry = CollectorRegistry()
    gauge = ComingGauge("g", "help", ("adapter", "version"), registry=registry)
    gauge.show({("code", "1"): 2.0, ("code", "2"): 3.0})
    gauge.show({("code", "2"): 4.0, ("code", "3"): 5.0})
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    assert lines == ['g{adapter="code",version="2"} 4.0', 'g{adapter="code",version="3"} 5.0']
