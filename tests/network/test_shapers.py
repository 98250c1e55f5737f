# SPDX-License-Identifier: Apache-2.0
"""Devices whose incoming packets take a way through an ifb: a shaped uplink, a limited pod.

The CNI plugin bandwidth makes such a limit for kubernetes.io/egress-bandwidth.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ebpflb.lab.hosts import Host
from tests.kernel.node import nodes
from tests.kit import two_nodes
from tests.kit.parameters import families, protocols
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, TwoNodes

FRONTENDS = Frontends(10)
RATE = ["tbf", "rate", "1gbit", "burst", "1mb", "latency", "25ms"]
EVERYTHING = ["protocol", "all", "u32", "match", "u32", "0", "0"]


@contextmanager
def shaped(node: Host, device: str) -> Iterator[None]:
    """What comes in at the device passes a queue of the device "ifb0", as the plugin makes it."""
    node.ip("link add ifb0 type ifb", "link set ifb0 up")
    redirect = ["action", "mirred", "egress", "redirect", "dev", "ifb0"]
    with nodes.entered(node.netns):
        nodes.run("tc", "qdisc", "add", "dev", "ifb0", "root", *RATE)
        nodes.run("tc", "qdisc", "add", "dev", device, "handle", "ffff:", "ingress")
        nodes.run(
            *("tc", "filter", "add", "dev", device, "parent", "ffff:"), *EVERYTHING, *redirect
        )
    try:
        yield
    finally:
        with nodes.entered(node.netns):
            nodes.run("tc", "qdisc", "del", "dev", device, "ingress")
        node.ip("link del ifb0")


two = two_nodes.fixture(publish=two_nodes.web_on_far)


def shaped_requests(who: str) -> tuple[str, str]:
    return {"outside": ("eth0", "nodeport"), "unhooked": ("veth3", "cluster")}[who]


@families
@protocols
@pytest.mark.parametrize("who", ["outside", "unhooked"])
def test_shaped_requests_are_served(two: TwoNodes, who: str, send: Send, v6: bool) -> None:
    """Of clients behind a shaped uplink, and of a pod with a limit."""
    device, kind = shaped_requests(who)
    with shaped(two.near, device):
        client = two.sockets(getattr(two, who))
        assert send(client, *FRONTENDS.to(kind, two.near, v6=v6)).name == two.there.name
