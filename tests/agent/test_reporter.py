# SPDX-License-Identifier: Apache-2.0
"""The consequences of the agent's syncs: health, metrics, health-check ports, stale flows."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Any

import pytest

from ebpflb.agent import sync
from ebpflb.lab import manifests
from ebpflb.model.addresses import Family
from ebpflb.model.events import Key, Kind, Removed
from ebpflb.model.services import PortName
from tests.agent.fakes import SYNCS, Harness, Json, changed, listed, service, slices, value
from tests.agent.told import EVERYTHING, FULL, NODES, SERVICES, SLICES

LATENCIES = "kubeproxy_network_programming_duration_seconds_count"
HC_PORT = 32000


def latencies(harness: Harness) -> float | None:
    return value(harness, LATENCIES, ip_family="IPv4")


def triggered(slice: Json, after: timedelta) -> Json:
    """Return the slice as the controller writes it, with the time of the change that caused it."""
    when = (datetime.now(UTC) + after).isoformat().replace("+00:00", "Z")
    slice["metadata"]["annotations"] = {"endpoints.kubernetes.io/last-change-trigger-time": when}
    return slice


def balanced(policy: str = "Local") -> Json:
    """Return a load balancer's Service, which has a health-check node port under policy Local."""
    manifest = service("a", "10.96.0.1")
    manifest["spec"] |= {
        "type": "LoadBalancer",
        "externalTrafficPolicy": policy,
        "healthCheckNodePort": HC_PORT,
    }
    return manifest


def datagrams(*ips: str) -> tuple[Json, Json]:
    """Return a UDP Service and its endpoints."""
    ports = [{"port": 53, "protocol": "UDP"}]
    endpoints = [manifests.endpoint(ip, node="node-1", target=ip) for ip in ips]
    return (
        manifests.service("dns", ["10.96.0.3"], ports),
        manifests.endpoint_slice("dns", "IPv4", endpoints, ports),
    )


def test_syncs_are_counted(serving: Harness) -> None:
    """The first sync is a full one, later ones are partial; without changes there is no sync."""
    serving.send(changed(Kind.ENDPOINT_SLICE, slices("b", "10.1.0.4")))
    serving.send(changed(Kind.ENDPOINT_SLICE, slices("b", "10.1.0.4")))
    kinds = {kind: value(serving, SYNCS.format(kind), ip_family="IPv6") for kind in KINDS}
    assert kinds == {"": 2, "full_": 1, "partial_": 1}


KINDS = ("", "full_", "partial_")


def test_order_within_a_sync(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is: rules, latency and health, health-check ports, then stale UDP flows, because
    unwritten rules could create those again; at the start only after the programs are in force.
    """
    calls: list[str] = []
    for owner, name in (
        (harness.datapath, "apply"),
        (harness.datapath, "attach"),
        (harness.metrics, "programmed"),
        (harness.health, "synced"),
        (harness.service_health, "update"),
        (harness.stale, "check"),
        (harness.stale, "check_everything"),
    ):
        monkeypatch.setattr(owner, name, _noted(calls, name, getattr(owner, name)))
    harness.start()
    harness.send(*EVERYTHING)
    assert calls == ["apply", "attach", "synced", "update", "check", "check_everything"]
    calls.clear()
    after = triggered(slices("a", "10.1.0.9"), timedelta(seconds=1))
    harness.send(changed(Kind.ENDPOINT_SLICE, after))
    assert calls == ["apply", "programmed", "synced", "update", "check"]


def _noted(calls: list[str], name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **more: Any) -> Any:
        calls.append(name)
        return real(*args, **more)

    return noted


def test_pending_changes(serving: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each changed Service and slice counts once as pending, until a sync."""
    names = [f"kubeproxy_sync_proxy_rules_{it}_changes_pending" for it in ("service", "endpoint")]
    labelled = service("b", "10.96.0.2")
    labelled["metadata"]["labels"] = {"a": "b"}
    serving.send(changed(Kind.SERVICE, labelled), SERVICES, SLICES)
    assert [value(serving, name) for name in names] == [0, 0]
    monkeypatch.setattr(sync, "WRITE_RETRY_SECONDS", 0.01)
    serving.datapath.failures = [FULL] * 10000
    for ip in ("10.1.0.8", "10.1.0.9"):
        serving.send(changed(Kind.ENDPOINT_SLICE, slices("a", ip)))
    serving.send(changed(Kind.SERVICE, service("b", "10.96.0.7")), NODES)
    assert [value(serving, name) for name in names] == [1, 1]
    serving.datapath.failures.clear()
    serving.wait_for(lambda status: not status.sync_error)
    assert [value(serving, name) for name in names] == [0, 0]


def test_latency_of_a_change(serving: Harness) -> None:
    """The time since a slice's trigger is observed when its sync has succeeded, and only once."""
    after = triggered(slices("a", "10.1.0.9"), timedelta(seconds=1))
    serving.send(changed(Kind.ENDPOINT_SLICE, after))
    assert latencies(serving) == 1
    serving.send(listed(Kind.ENDPOINT_SLICE, after, slices("b", "10.1.0.3")))
    assert latencies(serving) == 1


def test_unhealthy_while_it_fails(serving: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent is unhealthy while a change cannot be written."""
    monkeypatch.setattr(sync, "WRITE_RETRY_SECONDS", 60.0)
    serving.health.timeout = 0
    serving.datapath.failures = [FULL]
    serving.send(changed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.9")))
    assert not serving.health.healthy
    monkeypatch.setattr(sync, "WRITE_RETRY_SECONDS", 0.01)
    serving.send()
    serving.wait_for(lambda status: not status.sync_error)
    assert serving.health.healthy


def test_health_check_node_port(serving: Harness) -> None:
    """After each sync the ports have the number of ready local endpoints; a Service with policy
    Cluster has no such port.
    """
    key = Key("default", "a")
    serving.send(changed(Kind.SERVICE, balanced()))
    assert serving.service_health.wanted[-1][key].local_endpoints == {Family.IPV4: 2}
    serving.send(changed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.1")))
    assert serving.service_health.wanted[-1][key].local_endpoints == {Family.IPV4: 1}
    serving.send(changed(Kind.SERVICE, balanced("Cluster")))
    assert not serving.service_health.wanted[-1]


def test_no_local_endpoints(serving: Harness) -> None:
    """Service ports under policy Local that have endpoints only on other nodes are counted."""
    name = "kubeproxy_sync_proxy_rules_no_local_endpoints_total"
    labels = {"traffic_policy": "external", "ip_family": "IPv4"}
    away = slices("a", "10.1.0.1")
    away["endpoints"][0]["nodeName"] = "node-2"
    manifest = balanced()
    manifest["spec"]["ports"][0]["nodePort"] = 30080
    serving.send(changed(Kind.SERVICE, manifest), changed(Kind.ENDPOINT_SLICE, away))
    assert value(serving, name, **labels) == 1
    serving.send(Removed(Kind.SERVICE, Key("default", "a")))
    assert value(serving, name, **labels) == 0


def test_minimal_sync_period(harness: Harness) -> None:
    """Changes within the period after a sync are written together, by one plan."""
    harness.options = replace(harness.options, min_sync_period=3600.0)
    harness.start()
    harness.send(*EVERYTHING)
    harness.send(changed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.7")))
    harness.send(changed(Kind.ENDPOINT_SLICE, slices("b", "10.1.0.8")))
    assert len(harness.datapath.plans) == 1
    harness.sync.options = replace(harness.options, min_sync_period=0.0)
    harness.send()
    assert len(harness.datapath.plans) == 2
    assert {name.service for name, _ in _planned(harness)} == {"a", "b"}


def _planned(harness: Harness) -> list[tuple[PortName, object]]:
    names = harness.datapath.maps.service_names
    return [(names[service.id], service) for _, service in harness.datapath.plans[-1].services]


def test_stale_flows(serving: Harness) -> None:
    """After the start everything is checked, and later only what each sync removes."""
    dns, endpoints = datagrams("10.1.0.7", "10.1.0.8")
    serving.send(changed(Kind.SERVICE, dns), changed(Kind.ENDPOINT_SLICE, endpoints))
    assert serving.stale.checks_of_everything == 1
    serving.send(changed(Kind.ENDPOINT_SLICE, datagrams("10.1.0.8")[1]))
    assert serving.stale.removals[-1].endpoints == {(ip_address("10.1.0.7"), 53)}
