# SPDX-License-Identifier: Apache-2.0
"""Pods on one bridge and the kernel's NAT: what the engine netfilter needs, and who serves without.

The kernel's own rules show the need: kube-proxy's are of this kind.
"""

from collections.abc import Iterator
from contextlib import suppress
from socket import AF_INET, AF_INET6, SOCK_DGRAM, SOCK_STREAM

import pytest

from ebpflb.kernel.node.device_watch import list_devices
from ebpflb.kernel.node.sysctls import bridge_calls
from ebpflb.lab import cni
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.model.addresses import Family
from ebpflb.model.packet_path import SYSCTLS, unsuited
from tests.kernel.node import nodes
from tests.kit import needs
from tests.kit.lab_cluster import new_lab
from tests.kit.sockets import CALL_SECONDS, Sockets

VIPS = {Family.IPV4: "10.96.0.10", Family.IPV6: "fd00:96::10"}
KINDS = {Family.IPV4: AF_INET, Family.IPV6: AF_INET6}
PORT, TARGET = 80, 8080
NARROW = 1280  # bytes, the least that IPv6 allows
RULES = """
table inet kernel {{
  chain c {{
    type nat hook prerouting priority dstnat
    ip daddr 10.96.0.10 tcp dport 80 dnat ip to {v4}:8080
    ip6 daddr fd00:96::10 tcp dport 80 dnat ip6 to [{v6}]:8080
  }}
}}
"""
CONNTRACK = """
table inet kernel {
  chain c {
    type filter hook forward priority 0
    ct state invalid counter
  }
}
"""

pytestmark = needs.bridge_netfilter


@pytest.fixture
def lab() -> Iterator[Lab]:
    with new_lab() as made:
        yield made


def patience(expected: object) -> float:
    """Seconds to wait for what is expected, and for what is not."""
    return CALL_SECONDS if expected else 2.0


def is_answered(client: Host, server: Host, family: Family, seconds: float) -> bool:
    """Whether a connection of a pod by the service's address to another pod comes about."""
    sockets = [Sockets(host) for host in (client, server)]
    opened, listener = (each.open(KINDS[family], SOCK_STREAM) for each in sockets)
    try:
        listener.bind(("::" if family is Family.IPV6 else "0.0.0.0", TARGET))
        listener.listen()
        opened.settimeout(seconds)
        opened.connect((VIPS[family], PORT))
    except OSError:
        return False
    finally:
        for each in sockets:
            each.close()
    return True


@pytest.mark.parametrize("family", list(Family), ids=str)
def test_the_kernel_translates_answers_of_one_bridge_only_with_br_netfilter(
    lab: Lab, family: Family
) -> None:
    """What is recognized is what happens, family by family, as the sysctl is turned on and off."""
    node = lab.node("node", 1, cni.Bridge(hairpin=True))
    client, server = (lab.pod(node, name, 2 + at) for at, name in enumerate(("client", "server")))
    node.nft(RULES.format(v4=server.v4, v6=server.v6))
    other = next(each for each in Family if each is not family)
    node.sysctl(SYSCTLS[other].replace("/", "."), 1)
    for on in (0, 1, 0):
        node.sysctl(SYSCTLS[family].replace("/", "."), on)
        with nodes.entered(node.netns):
            found = unsuited(list_devices().devices, (), bridge_calls())
        assert (found is None) == bool(on)
        assert is_answered(client, server, family, patience(on)) == bool(on)


@pytest.mark.parametrize("forgets", [True, False], ids=["bridge", "routed"])
@pytest.mark.parametrize("family", list(Family), ids=str)
def test_the_kernel_forgets_at_a_bridge_how_small_fragments_of_ipv6_have_to_be(
    lab: Lab, family: Family, forgets: bool
) -> None:
    """A pod that has learnt what the path takes sends fragments: with conntrack and br_netfilter
    they are put together at the bridge and leave the node as one packet, which routers of IPv4 cut
    and those of IPv6 refuse, whether anybody translates it or not.
    """
    lab.router.narrow(NARROW)
    node = lab.node("node", 1, cni.Bridge() if forgets else cni.Routed())
    pod, client = lab.pod(node, "pod", 2), lab.outside("client", 1)
    for name in SYSCTLS.values():
        node.sysctl(name.replace("/", "."), 1)
    node.nft(CONNTRACK)
    sender, receiver = Sockets(pod), Sockets(client)
    v6 = family is Family.IPV6
    lab.router.ip(f"route add {cni.network(1)[v6]} via {node.v6 if v6 else node.v4}")
    to = (client.v6 if v6 else client.v4), PORT
    try:
        come, go = (each.open(KINDS[family], SOCK_DGRAM) for each in (receiver, sender))
        come.bind(to)
        come.settimeout(0.2)

        def arrives() -> bool:
            with suppress(TimeoutError):
                go.sendto(bytes(NARROW + 1), to)
                return bool(come.recv(2 * NARROW))
            return False

        if forgets and v6:
            assert not any(arrives() for _ in range(5))
        else:
            wait_until("a datagram arrives", arrives)
    finally:
        sender.close()
        receiver.close()


def serves(sockets: Sockets, family: Family, seconds: float) -> bool:
    with sockets.open(KINDS[family], SOCK_STREAM) as client:
        client.settimeout(seconds)
        try:
            client.connect((VIPS[family], PORT))
        except OSError:
            return False
        return bool(client.recv(64))
