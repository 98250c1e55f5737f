# SPDX-License-Identifier: Apache-2.0
"""How this node's state and Node object become maps, settings and devices."""

from dataclasses import replace
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from msgspec import structs

from ebpflb.agent import node_sync
from ebpflb.agent.sync import DevicesAttached
from ebpflb.config.fields import KubeProxyConfiguration
from ebpflb.entries import services
from ebpflb.entries.services import prefix_of
from ebpflb.errors import NodeError
from ebpflb.kernel.node import sysctls
from ebpflb.lab import manifests
from ebpflb.model.addresses import Family
from ebpflb.model.devices import LocalDetector, LocalMode
from ebpflb.model.events import Kind
from ebpflb.model.nodes import FORWARD_AUTO, FORWARD_ON, EachPacketRules
from ebpflb.model.packet_path import Engine
from ebpflb.options import ConntrackOptions, Options
from tests.agent.fakes import FakeNetfilter, Harness, changed, engine_choice, listed, service
from tests.agent.started import (
    BRIDGE,
    ETH,
    NODE,
    NODES,
    POD,
    PORT,
    SERVICES,
    SLICES,
    V4,
    here,
    start,
)
from tests.agent.told import FULL


def test_pods_devices_get_programs_beside_the_loop(harness: Harness) -> None:
    """A first start waits only for the node's own devices; the status counts the remaining ones
    until they have programs. Then conntrack is searched for entries of their earlier packets.
    """
    pod = structs.replace(PORT, index=9, name="veth9", master=0, kind="veth")
    harness.datapath.devices.to_come = {pod.index}
    harness.start()
    harness.send(here(pod, ETH), SERVICES, SLICES, NODES)
    assert harness.datapath.now == {ETH.index}
    assert harness.datapath.served[-1] == (ETH, pod)
    assert harness.status.attached
    assert harness.status.devices_to_come == 1
    searches = harness.stale.checks_of_untranslated
    harness.send(DevicesAttached())
    assert harness.status.devices_to_come == 0
    assert harness.stale.checks_of_untranslated == searches + 1


@pytest.mark.parametrize(("engine", "waits"), [(Engine.FLOWS, True), (Engine.NETFILTER, False)])
def test_flows_wait_for_every_device(harness: Harness, engine: Engine, waits: bool) -> None:
    """The flow tables open no flows before all devices have programs; netfilter serves at once."""
    harness.datapath.flows_wait = True
    harness.engine = engine_choice(engine)
    start(harness, packet_path=engine)
    assert harness.status.flows_wait == waits
    harness.send(DevicesAttached())
    assert not harness.status.flows_wait


@pytest.mark.parametrize(("engine", "waits"), [(Engine.FLOWS, True), (Engine.NETFILTER, False)])
def test_healthz_waits_for_the_nodes_devices(harness: Harness, engine: Engine, waits: bool) -> None:
    """With the flow tables, /healthz also waits for pods' devices: until then requests open no
    flow.
    """
    pod = structs.replace(PORT, index=9, name="veth9", master=0, kind="veth")
    harness.engine = engine_choice(engine)
    harness.datapath.devices.to_come, harness.datapath.flows_wait = {pod.index}, True
    harness.start()
    harness.send(here(pod, ETH), SERVICES, SLICES, NODES)
    assert harness.health.serves is not waits
    harness.send(DevicesAttached())
    assert harness.health.serves


def test_covering_prefix_grows_first(harness: Harness) -> None:
    """A prefix that contains a new cluster IP is written before the cluster IP."""
    start(harness)
    harness.send(changed(Kind.SERVICE, service("b", "10.96.0.2")))
    settings = harness.datapath.settings_at_plans[-1]
    assert settings.span_v4 == prefix_of(ip_network("10.96.0.0/30"))


def test_node_cidr(harness: Harness) -> None:
    """In mode NodeCIDR the Node names the prefixes of its pods, and may change them."""
    start(harness, detector=LocalDetector(LocalMode.NODE_CIDR))
    assert harness.datapath.settings.pods_v4 == prefix_of(ip_network("10.244.1.0/24"))
    assert "detect_local" in harness.datapath.settings.flags
    harness.send(changed(Kind.NODE, NODE | {"spec": {}}))
    assert harness.datapath.settings.pods_v4 == services.NO_PREFIX
    assert "detect_local" not in harness.datapath.settings.flags


def test_pods_sockets_wait_for_the_end_of_ipvs(harness: Harness) -> None:
    """While the device of kube-proxy's mode ipvs is left, pods' packets are translated instead. One
    that comes later, on the way back, changes nothing.
    """
    with_ipvs = structs.replace(here(ETH, BRIDGE), has_ipvs=True)
    harness.start()
    harness.send(with_ipvs, SERVICES, SLICES, NODES)
    assert "host_sockets" in harness.datapath.settings.flags
    assert harness.status.socket_translation == "host, until kube-ipvs0 is gone"
    for devices in (here(ETH, BRIDGE), with_ipvs):
        harness.send(devices)
        assert "host_sockets" not in harness.datapath.settings.flags
        assert harness.status.socket_translation == "all"


def test_service_ranges(harness: Harness) -> None:
    """Ranges are written only once they are known; covering prefixes contain them."""
    start(harness)
    assert "service_ranges" not in harness.datapath.small_maps
    harness.send(listed(Kind.SERVICE_CIDR, manifests.service_cidr("10.96.0.0/16")))
    written = {services.ServiceRange(112, ip_address("10.96.0.0")): 1}
    assert harness.datapath.small_maps["service_ranges"] == written
    assert harness.datapath.settings.span_v4 == prefix_of(ip_network("10.96.0.0/16"))
    harness.send(listed(Kind.SERVICE_CIDR))
    assert harness.datapath.small_maps["service_ranges"] == {}


def test_new_service_ranges_wait_for_the_services(harness: Harness) -> None:
    """Until all Services are written none of their addresses is an unused one; what an earlier
    agent has dropped is dropped meanwhile.
    """
    harness.datapath.ranges = [ip_network("10.96.0.0/16"), ip_network("10.98.0.0/16")]
    harness.datapath.failures = [FULL]
    cidrs = listed(Kind.SERVICE_CIDR, manifests.service_cidr("10.96.0.0/16", "10.97.0.0/16"))
    harness.start()
    harness.send(here(ETH, BRIDGE), cidrs, SERVICES, SLICES, NODES)
    assert harness.status.sync_error
    ranges = [services.ServiceRange(112, ip_address(f"10.{it}.0.0")) for it in (96, 97)]
    assert [*harness.datapath.small_maps["service_ranges"]] == ranges[:1]
    harness.wait_for(lambda status: not status.sync_error)
    assert {*harness.datapath.small_maps["service_ranges"]} == {*ranges}


def test_nodeport_addresses(harness: Harness) -> None:
    """NodePorts are served on the Node's address if it is assigned here."""
    start(harness)
    assert harness.datapath.small_maps["node_addresses"] == {V4: 1}
    harness.send(changed(Kind.NODE, manifests.node("node-1", str(POD))))
    assert harness.datapath.small_maps["node_addresses"] == {POD: 1}


def test_reserved_ports(harness: Harness) -> None:
    """The ports for masquerading are reserved, so that the host does not use them; if that fails,
    the status says so.
    """
    start(harness, masquerade_ports=(30, 39))
    assert sysctls.RESERVED.read_text() == "30-39\n"
    assert harness.status.ports_not_reserved is None
    harness.stop()
    sysctls.RESERVED.unlink()
    start(harness)
    assert harness.status.ports_not_reserved == f"{sysctls.RESERVED}: No such file or directory"


def test_the_node_is_changed_last(harness: Harness) -> None:
    """No port is reserved before everything needed has been received and written."""
    harness.options = replace(harness.options, masquerade_ports=(30, 39))
    harness.start()
    harness.send(here(ETH, BRIDGE), SERVICES, SLICES)
    assert sysctls.RESERVED.read_text() == "\n"
    harness.send(NODES)
    assert sysctls.RESERVED.read_text() == "30-39\n"


@pytest.fixture
def one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a kernel without IPv6."""
    monkeypatch.setattr(node_sync, "supported_families", lambda: frozenset({Family.IPV4}))


def configured(harness: Harness, **fields: Any) -> Options:
    return replace(harness.options, configuration=KubeProxyConfiguration(**fields))


def end(harness: Harness, *events: Any) -> str:
    """Return why the agent has ended by itself, without having programmed anything."""
    harness.start()
    for event in (here(ETH), SERVICES, SLICES, *events):
        harness.inbox.put(event)
    harness.thread.join(60)
    assert not harness.datapath.plans
    return str(harness.error)


def test_families_of_the_node(harness: Harness) -> None:
    """If nothing could be served on the Node, the agent ends with one line that says why."""
    harness.options = configured(harness, detect_local_mode=LocalMode.NODE_CIDR.value)
    wrong = NODE | {"spec": {"podCIDRs": ["fd00:244::/64"]}}
    assert "podCIDRs: the node is IPv4-primary" in end(harness, listed(Kind.NODE, wrong))


def test_family_that_the_kernel_lacks(harness: Harness, one_family: None) -> None:
    """The agent also ends if the kernel lacks the primary family, even if --bind-address chose this
    family.
    """
    options = configured(harness, bind_address="fd00::7")
    harness.options = replace(options, bind_address=ip_address("fd00::7"))
    assert "primary family is IPv6, which the kernel does not support" in end(harness, NODES)


@pytest.mark.parametrize(("engine", "lost"), [(Engine.FLOWS, True), (Engine.NETFILTER, False)])
def test_a_device_without_room_at_egress(harness: Harness, engine: Engine, lost: bool) -> None:
    """The flow tables translate replies at a pod's egress; netfilter needs nothing there."""
    harness.engine = engine_choice(engine)
    harness.datapath.devices.attacher.without_egress = {PORT.index}
    harness.start()
    harness.send(here(ETH, PORT), SERVICES, SLICES, NODES)
    assert (PORT.name in harness.status.devices_not_served) == lost


def test_rules_for_open_connections_that_change_end_their_offloads(harness: Harness) -> None:
    """--fast-forward=auto ends offloads at the start and whenever such rules change."""
    start(harness, fast_forward=FORWARD_AUTO)
    ended: list[str] = []
    allowed: list[str | None] = []
    flowtable = harness.node_sync.flowtable
    flowtable.end_flows = lambda: ended.append("ended")  # type: ignore[method-assign]
    flowtable.allow = allowed.append  # type: ignore[method-assign,assignment]
    for rules, times in (
        (EachPacketRules(), 1),
        (EachPacketRules(changes=1), 2),
        (EachPacketRules(("a rule",), changes=1), 2),
        (EachPacketRules((), changes=2), 3),
    ):
        harness.send(rules)
        assert len(ended) == times
        assert allowed.pop() == (rules.lines[0] if rules.lines else None)


ASKING = "table inet filter, chain input: handle 4: asks for ct state invalid"


def test_be_liberal_follows_the_rules(harness: Harness) -> None:
    """--conntrack-tcp-be-liberal=auto is on while no rule asks for invalid packets, and the status
    says why it is off. What could not be written is tried again.
    """
    netfilter = FakeNetfilter()
    harness.engine = engine_choice(Engine.NETFILTER, netfilter)
    start(harness, conntrack=ConntrackOptions(follows_rules=True))
    assert harness.status.conntrack_liberal == "off: the rules are not read yet"
    for rules, state in (
        (EachPacketRules(("a rule for each packet",)), "on"),
        (EachPacketRules(invalid=ASKING), f"off: {ASKING}"),
        (EachPacketRules(), "on"),
    ):
        harness.send(rules)
        assert harness.status.conntrack_liberal == state
    netfilter.error = NodeError("no memory")
    harness.send(EachPacketRules(invalid=ASKING))
    assert "no memory" in str(harness.status.sync_error)
    netfilter.error = None
    harness.wait_for(lambda status: status.conntrack_liberal == f"off: {ASKING}")
    assert not netfilter.is_liberal


@pytest.mark.parametrize(
    ("chosen", "engine", "state"),
    [
        ({}, Engine.FLOWS, None),
        ({"fast_forward": FORWARD_ON}, Engine.FLOWS, "none: the flow tables serve"),
        ({"fast_forward": FORWARD_ON, "packet_path": Engine.FLOWS}, Engine.FLOWS, None),
        ({}, Engine.NETFILTER, None),
    ],
    ids=["not wanted", "auto", "without effect", "netfilter"],
)
def test_the_flow_tables_have_no_fast_path(
    harness: Harness, chosen: dict[str, str], engine: Engine, state: str | None
) -> None:
    """The status says so if --packet-path=auto chose them; otherwise the option has no effect."""
    harness.engine = engine_choice(engine)
    start(harness, **chosen)
    assert harness.status.flowtable == state
