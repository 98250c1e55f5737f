# SPDX-License-Identifier: Apache-2.0
"""Devices whose incoming packets pass an ifb: a shaped uplink, a limited pod.

The CNI plugin bandwidth sets such a limit for kubernetes.io/egress-bandwidth, as soon as the pod's
device exists. Before Linux 6.6 a device has room for its qdisc or for the agent's, not for both.
"""

import signal
from itertools import count

import pytest

from ebpflb.kernel.attach import tcx
from ebpflb.lab.hosts import Host
from ebpflb.model.packet_path import Engine
from tests.kernel.node import nodes
from tests.kit import two_nodes
from tests.kit.parameters import families, protocols
from tests.kit.requests import Send
from tests.kit.two_nodes import ENGINES, Frontends, TwoNodes

FRONTENDS = Frontends(10)
RATE = ["tbf", "rate", "1gbit", "burst", "1mb", "latency", "25ms"]
EVERYTHING = ["protocol", "all", "u32", "match", "u32", "0", "0"]
NUMBERS = count(20)


def shape(node: Host, device: str) -> None:
    """Give packets that come in at the device a separate queue, as the plugin does."""
    queue = f"ifb-{device}"
    node.ip(f"link add {queue} type ifb", f"link set {queue} up")
    redirect = ["action", "mirred", "egress", "redirect", "dev", queue]
    with nodes.entered(node.netns):
        nodes.run("tc", "qdisc", "add", "dev", queue, "root", *RATE)
        nodes.run("tc", "qdisc", "add", "dev", device, "handle", "ffff:", "ingress")
        where = ["dev", device, "parent", "ffff:"]
        nodes.run("tc", "filter", "add", *where, *EVERYTHING, *redirect)


two = two_nodes.fixture(
    engines=ENGINES if tcx.works() else [Engine.NETFILTER],
    prepare=lambda two: shape(two.near, "eth0"),
    publish=two_nodes.web_on_far,
)


@families
@protocols
def test_requests_by_a_shaped_uplink_are_served(two: TwoNodes, send: Send, v6: bool) -> None:
    client = two.sockets(two.outside)
    assert send(client, *FRONTENDS.to("nodeport", two.near, v6=v6)).name == two.there.name


@pytest.fixture(scope="module")
def limited(two: TwoNodes) -> Host:
    """Add a pod that is limited right after its device is made, however slow this machine is."""
    number = next(NUMBERS)
    agent = two.agents[0].process
    assert agent
    agent.send_signal(signal.SIGSTOP)
    try:
        pod = two.lab.pod(two.near, f"limited{number}", number, hooked=False)
        shape(two.near, f"veth{number}")
    finally:
        agent.send_signal(signal.SIGCONT)
    two.until_served(pod, FRONTENDS.to("cluster", two.near))
    return pod


@families
@protocols
def test_requests_of_a_limited_pod_are_served(
    two: TwoNodes, limited: Host, send: Send, v6: bool
) -> None:
    """The program at ingress serves them; before Linux 6.6 it shares the plugin's qdisc."""
    where = FRONTENDS.to("cluster", two.near, v6=v6)
    assert send(two.sockets(limited), *where).name == two.there.name
