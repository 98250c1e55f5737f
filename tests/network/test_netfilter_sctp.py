# SPDX-License-Identifier: Apache-2.0
"""SCTP on the engine netfilter, where the kernel's NAT can translate it.

Kernels need no SCTP sockets for that: an INIT is sent and received by raw sockets.
"""

from socket import IPPROTO_SCTP, SOCK_RAW

import pytest
from scapy.layers.sctp import SCTP, SCTPChunkInit

from ebpflb.lab.hosts import Host
from ebpflb.lab.sockets import Socket
from tests.kit import needs, requests
from tests.kit.lab_cluster import TARGET
from tests.kit.parameters import families, netfilter, packet_clients
from tests.kit.two_nodes import Frontends, TwoNodes

FRONTENDS = Frontends(10)
CLIENT_PORT = 5000

pytestmark = netfilter


@pytest.fixture(scope="module", autouse=True)
def sctp() -> None:
    needs.sctp()


def publish(two: TwoNodes, pod: Host) -> None:
    two.publish(two.one_port("sctp", 10, pod, TARGET, "SCTP"))


def raw(two: TwoNodes, host: Host, *, v6: bool) -> Socket:
    family = requests.family_of(host.v6 if v6 else host.v4)
    return two.sockets(host).open(family, SOCK_RAW, IPPROTO_SCTP)


@families
@pytest.mark.parametrize("where", ["here", "there"])
@packet_clients
def test_an_init_reaches_its_endpoint(
    two: TwoNodes, who: str, kind: str, where: str, v6: bool
) -> None:
    """With the endpoint's port, the client's verification tag and a correct checksum."""
    endpoint = getattr(two, where)
    publish(two, endpoint)
    two.delete_flows("other_flows")
    address, port = FRONTENDS.to(kind, two.near, v6=v6)
    init = SCTPChunkInit(init_tag=0x1234, a_rwnd=65536, n_out_streams=1, n_in_streams=1)
    sent = bytes(SCTP(sport=CLIENT_PORT, dport=port) / init)
    with raw(two, endpoint, v6=v6) as server, raw(two, getattr(two, who), v6=v6) as client:
        client.sendto(sent, (address, 0))
        received = server.recv(1 << 16)
    packet = SCTP(received if v6 else received[20:])
    assert packet.dport == TARGET
    assert packet[SCTPChunkInit].init_tag == 0x1234
    claimed, packet.chksum = packet.chksum, None
    assert SCTP(bytes(packet)).chksum == claimed
