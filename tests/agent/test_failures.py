# SPDX-License-Identifier: Apache-2.0
"""The agent reports a failed write, keeps serving, and tries again; nothing else waits."""

from ipaddress import ip_network

import pytest

from ebpflb.agent import sync
from ebpflb.entries.services import prefix_of
from ebpflb.lab import manifests
from ebpflb.model.addresses import Family
from ebpflb.model.annotations import ON_REMOVAL_ANNOTATION
from ebpflb.model.events import Kind, Removed
from ebpflb.model.kube_proxy import Detection
from ebpflb.plan.stale import DELETED, Watched
from tests.agent.fakes import Harness, changed, found, listed, service, slices
from tests.agent.started import BRIDGE, ETH, NODES, PORT, SERVICES, SLICES, V4, here, start
from tests.agent.told import FULL


def test_events_after_a_failed_write(serving: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many events come, the maps are not read and written again before the retry is due."""
    monkeypatch.setattr(sync, "WRITE_RETRY_SECONDS", 60.0)
    serving.datapath.failures = [FULL]
    serving.send(changed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.7")))
    plans = len(serving.datapath.plans)
    for ip in ("10.1.0.8", "10.1.0.9"):
        serving.send(changed(Kind.ENDPOINT_SLICE, slices("b", ip)))
    assert serving.status.sync_error
    assert len(serving.datapath.plans) == plans


def test_full_map(harness: Harness) -> None:
    """A full map does not keep other maps from being written. Only the programs wait; they are
    attached once everything is written. That is still a full sync.
    """
    harness.datapath.full["node_addresses"] = FULL
    harness.start()
    cidrs = listed(Kind.SERVICE_CIDR, manifests.service_cidr("10.96.0.0/16"))
    harness.send(here(ETH, BRIDGE), cidrs, SERVICES, SLICES, NODES)
    assert harness.status.sync_error == str(FULL)
    assert harness.datapath.small_maps.keys() == {
        "own_addresses",
        "link_addresses",
        "devices",
        "service_ranges",
        "timeouts",
    }
    assert len(harness.datapath.maps.services) == 1
    assert harness.datapath.settings.span_v4 == prefix_of(ip_network("10.96.0.0/16"))
    assert not harness.datapath.attached
    assert harness.stale.checks_of_everything < 1
    harness.datapath.full.clear()
    harness.wait_for(lambda status: not status.sync_error)
    assert len(harness.datapath.attached) == 1
    assert harness.stale.checks_of_everything == 1
    assert harness.service_health.addresses == [{Family.IPV4: {V4}}]


def test_device_fails(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """A device that cannot be served is named in log and status, and tried again."""
    harness.datapath.unattached = [{"eth0": "no room"}] * 2
    start(harness)
    harness.wait_for(lambda status: not status.devices_not_served)
    assert len(harness.datapath.served) == 3
    lines = [r.getMessage() for r in caplog.records if "eth0" in r.getMessage()]
    assert lines == ["device eth0: no room; its packets are not served"]


def test_what_came_before_a_device_was_served_goes(harness: Harness) -> None:
    """Whenever a device gets programs, even late, conntrack is searched for its earlier entries."""
    start(harness)
    searches = harness.stale.checks_of_untranslated
    harness.datapath.unattached = [{PORT.name: "no room"}]
    harness.send(here(ETH, BRIDGE, PORT))
    harness.wait_for(lambda status: not status.devices_not_served)
    assert harness.stale.checks_of_untranslated == searches + 1
    harness.send(changed(Kind.SERVICE, service("b", "10.96.0.2")))
    assert harness.stale.checks_of_untranslated == searches + 1


def test_sockets_are_searched_for_when_the_rules_of_a_kube_proxy_go(harness: Harness) -> None:
    """It may have served some of the node's own, such as IPVS."""
    start(harness)
    searches = harness.stale.checks_of_everything
    for rules, more in ((("device kube-ipvs0",), 0), ((), 1), ((), 1)):
        harness.send(Detection(rules=rules))
        assert harness.stale.checks_of_everything == searches + more


def test_a_service_that_goes_after_a_failed_write_is_known_to_have_gone(serving: Harness) -> None:
    """After a failed write everything is written again, and the part that resets open connections
    is told about the deleted Service.
    """
    watched = service("a", "10.96.0.1")
    watched["metadata"]["annotations"] = {ON_REMOVAL_ANNOTATION: "reset=1h"}
    serving.send(changed(Kind.SERVICE, watched))
    (name,) = [it for it, change in serving.stale.resets.items() if isinstance(change, Watched)]
    serving.datapath.failures = [FULL]
    key, _ = found(Kind.SERVICE, watched)
    serving.send(changed(Kind.ENDPOINT_SLICE, slices("b", "10.1.0.9")))
    serving.send(Removed(Kind.SERVICE, key))
    serving.wait_for(lambda status: not status.sync_error)
    assert serving.stale.resets[name] == DELETED
