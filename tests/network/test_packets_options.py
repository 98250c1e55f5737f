# SPDX-License-Identifier: Apache-2.0
"""Options: how pods are recognized, and which requests are masqueraded."""

import time
from collections.abc import Iterator

import pytest

from ebpflb.lab import cni, manifests
from ebpflb.model.packet_path import Engine
from ebpflb.plan.flow_entries import Hook
from tests.kit import requests
from tests.kit.requests import Send
from tests.kit.two_nodes import CLUSTER_CIDR, ENGINES, TwoNodes
from tests.network.test_packets_table import (
    BOTH_CLIENT,
    BOTH_NODE,
    KINDS,
    answers,
    families,
    meaning,
    protocols,
    services_of,
)

both_engines = pytest.mark.parametrize("two", ENGINES, indirect=True)
flow_tables = pytest.mark.parametrize("two", [Engine.FLOWS], indirect=True)  # their ports

MONOTONIC_COARSE = 6  # the clock by which flows are dated (uapi/linux/time.h)

MODE = "--detect-local-mode"
DETECTORS = {
    "ClusterCIDR": CLUSTER_CIDR,
    "NodeCIDR": (MODE, "NodeCIDR"),
    "BridgeInterface": (MODE, "BridgeInterface", "--pod-bridge-interface", "cni0"),
    "InterfaceNamePrefix": (MODE, "InterfaceNamePrefix", "--pod-interface-name-prefix", "veth"),
}


@pytest.fixture(scope="module")
def services(two: TwoNodes) -> None:
    numbers = {two.near: 1, two.far: 2}
    nodes = [
        manifests.node(node.name, node.v4, node.v6, pod_cidrs=cni.network(number))
        for node, number in numbers.items()
    ]
    two.publish(nodes, *services_of(two, two.here, two.there))


@pytest.fixture(scope="module")
def restarted(two: TwoNodes, services: None, request: pytest.FixtureRequest) -> Iterator[TwoNodes]:
    """With the agents at work with other options."""
    for agent in two.agents:
        agent.stop()
        agent.options = request.param
        agent.start()
    two.delete_flows("other_flows")
    yield two


@pytest.mark.extended
@both_engines
@families
@protocols
@pytest.mark.parametrize("restarted", DETECTORS.values(), ids=DETECTORS, indirect=True)
def test_detector(restarted: TwoNodes, v6: bool, send: Send) -> None:
    """By cluster IPs pods are seen as themselves, others as the node; Local confines no pod."""
    for who, kind, policy, cell in (
        ("unhooked", "cluster", "cluster", BOTH_CLIENT),
        ("outside", "cluster", "cluster", BOTH_NODE),
        ("unhooked", "nodeport", "external local", BOTH_CLIENT),
        ("outside", "nodeport", "external local", "here=client"),
    ):
        found = answers(restarted, who, kind, policy, v6=v6, send=send)
        assert found == meaning(restarted, who, cell, v6=v6)


@pytest.mark.extended
@both_engines
@families
@protocols
@pytest.mark.parametrize("restarted", [()], ids=["no detector"], indirect=True)
def test_no_detector(restarted: TwoNodes, v6: bool, send: Send) -> None:
    """Without a detector cluster IPs are not masqueraded, and Local holds for pods too."""
    found = answers(restarted, "outside", "cluster", "internal local", v6=v6, send=send)
    assert found == meaning(restarted, "outside", "here=client", v6=v6)
    for kind in KINDS["external"]:
        found = answers(restarted, "unhooked", kind, "external local", v6=v6, send=send)
        assert found == meaning(restarted, "unhooked", "here=client", v6=v6)


@pytest.mark.extended
@both_engines
@families
@protocols
@pytest.mark.parametrize(
    "restarted", [(*CLUSTER_CIDR, "--masquerade-local-backends")], ids=["local too"], indirect=True
)
def test_masquerade_local_backends(restarted: TwoNodes, v6: bool, send: Send) -> None:
    """With --masquerade-local-backends an endpoint here sees the node, as with kube-proxy."""
    for kind in KINDS["external"]:
        found = answers(restarted, "outside", kind, "cluster", v6=v6, send=send)
        assert found == meaning(restarted, "outside", BOTH_NODE, v6=v6)


@pytest.mark.extended
@both_engines
@families
@protocols
@pytest.mark.parametrize("restarted", [("--masquerade-all",)], ids=["all"], indirect=True)
def test_masquerade_all(restarted: TwoNodes, v6: bool, send: Send) -> None:
    """With --masquerade-all every request to a cluster IP is masqueraded."""
    for who in ("unhooked", "outside"):
        found = answers(restarted, who, "cluster", "cluster", v6=v6, send=send)
        assert found == meaning(restarted, who, BOTH_NODE, v6=v6)


@pytest.mark.extended
@flow_tables
@families
@protocols
@pytest.mark.parametrize(
    "restarted",
    [(*CLUSTER_CIDR, "--masquerade-ports", "31000-31999")],
    ids=["ports"],
    indirect=True,
)
def test_masquerade_ports(restarted: TwoNodes, v6: bool, send: Send) -> None:
    """What goes on as the node comes from the ports that the operator chose."""
    began = time.clock_gettime_ns(MONOTONIC_COARSE)
    answers(restarted, "outside", "cluster", "cluster", v6=v6, send=send)
    flows = restarted.maps["tcp_flows" if send is requests.tcp else "other_flows"].items()
    ports = {
        flow.port
        for to, flow in flows
        if flow.created >= began
        and to.hook == Hook.EGRESS
        and {"request", "masquerade"} <= flow.flags
    }
    assert ports
    assert ports <= set(range(31000, 32000))
