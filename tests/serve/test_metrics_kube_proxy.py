# SPDX-License-Identifier: Apache-2.0
"""The metrics of kube-proxy.md 14: the table itself defines what must be there."""

import re

import pytest
from prometheus_client import Metric

from ebpflb.model.addresses import Family
from ebpflb.model.endpoints import TrafficPolicy
from ebpflb.serve.metrics import Metrics
from tests.serve.kube_proxy_table import OF_OTHER_MODES, OURS, TABLE, Row, section
from tests.serve.subjects import changes, families, value, values

BOTH = {"IPv4": 1.0, "IPv6": 1.0}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(clock=lambda: 1000.0)


@pytest.fixture
def shown(metrics: Metrics) -> dict[str, Metric]:
    return families(metrics.exposition().body)


def test_the_table_is_read() -> None:
    """Every row of section 14 is parsed."""
    rows = [line for line in section(14).splitlines() if line.startswith("| ")]
    assert len(TABLE) == "".join(rows).count("kubeproxy_") == 15
    assert len(OF_OTHER_MODES) == 11
    assert {row.type for row in TABLE.values()} == {"histogram", "gauge", "counter"}
    histograms = [row.buckets for row in TABLE.values() if row.type == "histogram"]
    assert sorted(map(len, histograms)) == [15] * 4 + [80]


def test_exactly_those_that_have_a_meaning_here(shown: dict[str, Metric]) -> None:
    """The metrics are those of section 14, except those of other modes, and there are no further
    metrics with kube-proxy's prefix.
    """
    assert {name for name in shown if name.startswith("kubeproxy_")} == OURS.keys()


@pytest.mark.parametrize("row", OURS.values(), ids=OURS)
def test_type_and_labels(shown: dict[str, Metric], row: Row) -> None:
    """Types and labels are those of section 14, with each family and each code from the start."""
    metric = shown[row.name]
    assert metric.type == row.type
    assert metric.samples
    labels = {frozenset(sample.labels) - {"le"} for sample in metric.samples}
    assert labels == {row.labels}
    for sample in metric.samples:
        assert sample.labels.get("ip_family", "IPv4") in BOTH
        assert sample.labels.get("code", "200") in ("200", "503")
        assert sample.labels.get("traffic_policy", "internal") in ("internal", "external")
    count = len({tuple(sorted({**s.labels, "le": ""}.items())) for s in metric.samples})
    assert count == 2 ** len(row.labels)


@pytest.mark.parametrize("row", [r for r in OURS.values() if r.buckets], ids=lambda row: row.name)
def test_buckets_are_those_of_section_14(metrics: Metrics, row: Row) -> None:
    """Buckets are those of section 14, written as in Go (le="1"), because queries name them."""
    text = metrics.exposition().body.decode()
    found = re.findall(rf'{row.name}_bucket{{ip_family="IPv4",le="([^"]*)"}}', text)
    assert [float(bound) for bound in found] == pytest.approx([*row.buckets, float("inf")])
    assert found == [f"{bound:g}" for bound in map(float, found[:-1])] + ["+Inf"]


@pytest.mark.parametrize("case", ["full", "partial"])
def test_a_sync_is_observed_once_per_family(metrics: Metrics, case: str) -> None:
    """A sync is observed once per family, under its own kind and under "any", with a timestamp."""
    before = values(metrics)
    metrics.synced(0.01, full=case == "full")
    found = changes(metrics, before)
    for kind in ("sync_", f"sync_{case}_"):
        name = f"kubeproxy_{kind}proxy_rules_duration_seconds"
        assert found[f"{name}_count"] == BOTH
        assert found[f"{name}_sum"] == dict.fromkeys(BOTH, 0.01)
    stamps = dict.fromkeys(BOTH, 1000.0)
    assert found["kubeproxy_sync_proxy_rules_last_timestamp_seconds"] == stamps
    other = "partial" if case == "full" else "full"
    assert not any(other in name or "queued" in name for name in found)


def test_sync_failed(metrics: Metrics) -> None:
    """A failed sync has a duration but no time of success, and changes stay pending."""
    metrics.pending(2, 3)
    before = values(metrics)
    metrics.failed(0.01, full=True)
    found = changes(metrics, before)
    assert found["kubeproxy_sync_proxy_rules_duration_seconds_count"] == BOTH
    assert found["ebpflb_sync_failures_total"] == {"": 1.0}
    assert not any("timestamp" in name or "pending" in name for name in found)


def test_last_queued(metrics: Metrics) -> None:
    """The metric has the time of the last request for a sync, in both families."""
    before = values(metrics)
    metrics.queued()
    assert changes(metrics, before) == {
        "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds": dict.fromkeys(BOTH, 1000.0)
    }


def test_endpoint_changes_count_once(metrics: Metrics) -> None:
    """A slice belongs to one family, so its event counts once."""
    metrics.endpoint_changes(3)
    assert value(metrics, "kubeproxy_sync_proxy_rules_endpoint_changes_total") == 3


def test_pending_changes(metrics: Metrics) -> None:
    """The last numbers of waiting Services and slices are shown."""
    names = [
        f"kubeproxy_sync_proxy_rules_{kind}_changes_pending" for kind in ("service", "endpoint")
    ]
    metrics.pending(2, 3)
    metrics.pending(1, 3)
    assert [value(metrics, name) for name in names] == [1, 3]


def test_network_programming_latency(metrics: Metrics) -> None:
    """Each latency is observed once, in its own family."""
    before = values(metrics)
    metrics.programmed(Family.IPV6, [0.2, 61.0])
    found = changes(metrics, before)
    assert found["kubeproxy_network_programming_duration_seconds_count"] == {"IPv6": 2}
    assert found["kubeproxy_network_programming_duration_seconds_sum"] == {"IPv6": 61.2}
    assert found["kubeproxy_network_programming_duration_seconds_bucket"]["IPv6 65"] == 2
    assert found["kubeproxy_network_programming_duration_seconds_bucket"]["IPv6 60"] == 1


def test_no_local_endpoints_is_a_gauge(metrics: Metrics) -> None:
    """The number of services without local endpoints, by policy and family, can also fall."""
    name = "kubeproxy_sync_proxy_rules_no_local_endpoints_total"
    at = {"traffic_policy": "external", "ip_family": "IPv6"}
    for count in (3, 1):
        metrics.no_local_endpoints({TrafficPolicy.EXTERNAL: {Family.IPV6: count}})
        assert value(metrics, name, **at) == count
    assert value(metrics, name, **at | {"traffic_policy": "internal"}) == 0


def test_stale_udp_flows(metrics: Metrics) -> None:
    """Each search is observed in its family, with the number of entries that it deleted."""
    before = values(metrics)
    metrics.stale_flows_ended(Family.IPV4, 0.5, 7)
    found = changes(metrics, before)
    name = "kubeproxy_conntrack_reconciler"
    assert found[f"{name}_sync_duration_seconds_count"] == {"IPv4": 1}
    assert found[f"{name}_deleted_entries_total"] == {"IPv4": 7}
