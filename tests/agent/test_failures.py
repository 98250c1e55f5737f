# SPDX-License-Identifier: Apache-2.0
"""What the agent cannot write it says, serves on, and tries again; nothing else waits for it."""

import errno
from ipaddress import ip_network

import pytest

from ebpflb.agent import loop
from ebpflb.errors import KernelError
from ebpflb.lab import objects
from ebpflb.model.addresses import Family
from ebpflb.model.events import Kind
from ebpflb.plan.prefixes import prefix_of
from tests.agent.fakes import Stage, changed, listed, slices
from tests.agent.test_corridor import EVERYTHING, FULL
from tests.agent.test_node import BRIDGE, ETH, NODES, PORT, SERVICES, SLICES, V4, here, start
from tests.agent.test_report import SYNCS, value

UNREADABLE = KernelError("map look-up", errno.ENOMEM, "Cannot allocate memory")


@pytest.fixture
def serving(stage: Stage) -> Stage:
    stage.start()
    stage.say(*EVERYTHING)
    return stage


def test_events_after_a_failed_write(serving: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come, the maps are not read and written again before it is time to."""
    monkeypatch.setattr(loop, "WRITE_RETRY_SECONDS", 60.0)
    serving.datapath.failures = [FULL]
    serving.say(changed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.7")))
    plans = len(serving.datapath.plans)
    for ip in ("10.1.0.8", "10.1.0.9"):
        serving.say(changed(Kind.ENDPOINT_SLICE, slices("b", ip)))
    assert serving.words.failed
    assert len(serving.datapath.plans) == plans


def test_maps_cannot_be_read(serving: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """Neither written nor then read: the agent says both, each once, and tries until it can."""
    serving.datapath.failures, serving.datapath.unreadable = [FULL], [UNREADABLE] * 2
    serving.say(changed(Kind.ENDPOINT_SLICE, slices("b", "10.1.0.9")))
    serving.until(lambda words: not words.failed)
    answers = serving.datapath.maps.answers().values()
    assert "10.1.0.9" in {str(backend.address) for it in answers for backend in it.cluster}
    errors = [it.getMessage() for it in caplog.records if it.levelname == "ERROR"]
    assert errors == [f"{error}; trying again every 1 s" for error in (FULL, UNREADABLE)]


def test_full_map(stage: Stage) -> None:
    """A map that is full keeps no other part back; the programs alone wait, and are put in force
    once all is written. That is a full sync still.
    """
    stage.datapath.full["node_addresses"] = FULL
    stage.start()
    cidrs = listed(Kind.SERVICE_CIDR, objects.service_cidr("10.96.0.0/16"))
    stage.say(here(ETH, BRIDGE), cidrs, SERVICES, SLICES, NODES)
    assert stage.words.failed == str(FULL)
    assert stage.datapath.held.keys() == {"devices", "service_ranges"}
    assert len(stage.datapath.maps.services) == 1
    assert stage.datapath.settings["span_v4"] == prefix_of(ip_network("10.96.0.0/16"))
    assert not stage.datapath.attached
    assert not stage.cure.surveys
    stage.datapath.full.clear()
    stage.until(lambda words: not words.failed)
    assert len(stage.datapath.attached) == stage.cure.surveys == 1
    assert stage.checks.addresses == [{Family.IPV4: {V4}}]


def test_full_map_later(stage: Stage) -> None:
    """Devices that come are served nevertheless."""
    start(stage)
    stage.datapath.full["node_addresses"] = FULL
    stage.say(here(ETH, BRIDGE, PORT))
    assert stage.words.failed
    assert stage.datapath.served[-1] == (ETH, BRIDGE, PORT)
    assert 4 in stage.datapath.held["devices"]


def test_device_fails(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """A device that cannot be served is named in log and status, and tried again."""
    stage.datapath.unattached = [{"eth0": "no room"}] * 2
    start(stage)
    stage.until(lambda words: not words.unattached)
    assert len(stage.datapath.served) == 3
    lines = [r.getMessage() for r in caplog.records if "eth0" in r.getMessage()]
    assert lines == ["device eth0: no room; its packets are not served"]


def test_what_lacks_is_no_sync(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that cannot be served is tried again and again: nothing is heard of, none counts."""
    monkeypatch.setattr(loop, "WRITE_RETRY_SECONDS", 0.01)
    stage.datapath.unattached = [{"eth0": "no room"}] * 5
    stage.start()
    stage.say(*EVERYTHING)
    stage.until(lambda words: len(stage.datapath.served) > 5 and not words.unattached)
    assert value(stage, SYNCS.format(""), ip_family="IPv4") == 1
