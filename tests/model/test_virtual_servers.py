# SPDX-License-Identifier: Apache-2.0
"""Virtual servers as /proc/net/ip_vs shows them, and whose they are."""

from ipaddress import ip_address

from ebpflb.model.kube_proxy import VirtualServer, parse_virtual_servers, split

TABLE = """\
IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
TCP  0A60000A:0050 rr
  -> 0AF4010B:1F90      Masq    1      3          1
  -> 0AF4010C:1F90      Masq    1      4          0
UDP  C0000201:7580 rr persistent 10800 FFFFFFFF
TCP  [fd00:0096:0000:0000:0000:0000:0000:000a]:0050 rr
  -> [fd00:0244:0001:0000:0000:0000:0000:000b]:1F90      Masq    1      1          0
FWM  00000001 wlc
  -> 0AF4010D:1F90      Route   1      9          0
TCP  C0000201:01BB wlc
"""
CLUSTER = VirtualServer("TCP", ip_address("10.96.0.10"), 80, 7)
NODE_PORT = VirtualServer("UDP", ip_address("192.0.2.1"), 30080)
CLUSTER6 = VirtualServer("TCP", ip_address("fd00:96::a"), 80, 1)
OTHER = VirtualServer("TCP", ip_address("192.0.2.1"), 443)


def test_parse() -> None:
    """Virtual servers of both families have the open connections of all their destinations.

    Firewall marks are left out.
    """
    assert parse_virtual_servers(TABLE) == [CLUSTER, NODE_PORT, CLUSTER6, OTHER]
    assert parse_virtual_servers("") == []


def test_split() -> None:
    """kube-proxy's are at its device's addresses and at its NodePorts, of the same protocol."""
    device = {CLUSTER.address, CLUSTER6.address}
    ours, others = split(parse_virtual_servers(TABLE), device, {"UDP": {30080}, "TCP": {30081}})
    assert (ours, others) == ([CLUSTER, NODE_PORT, CLUSTER6], [OTHER])
    assert split(parse_virtual_servers(TABLE), set(), {"TCP": {30080}})[0] == []


def test_words() -> None:
    """A server is named by address, port and protocol."""
    assert str(OTHER) == "192.0.2.1:443/TCP"
    assert str(CLUSTER6) == "[fd00:96::a]:80/TCP"
