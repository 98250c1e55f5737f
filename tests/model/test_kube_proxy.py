# SPDX-License-Identifier: Apache-2.0
"""kube-proxy's names, and the messages about a detected kube-proxy."""

from ipaddress import ip_address

import pytest

from ebpflb.model.kube_proxy import (
    SETS,
    Detection,
    VirtualServer,
    is_chain,
    parse_datagrams,
    parse_virtual_servers,
    split,
)

RULES = ("table ip kube-proxy",)


@pytest.mark.parametrize(
    "name",
    [
        "KUBE-SERVICES",
        "KUBE-EXTERNAL-SERVICES",
        "KUBE-NODEPORTS",
        "KUBE-POSTROUTING",
        "KUBE-MARK-MASQ",
        "KUBE-FORWARD",
        "KUBE-PROXY-FIREWALL",
        "KUBE-PROXY-CANARY",
        "KUBE-SVC-ZTJ5SYOBFAZQXTQF",
        "KUBE-SVL-ZTJ5SYOBFAZQXTQF",
        "KUBE-EXT-ZTJ5SYOBFAZQXTQF",
        "KUBE-FW-ZTJ5SYOBFAZQXTQF",
        "KUBE-SEP-2ACZ7VJ4SLNY7XTQ",
        "KUBE-XLB-ZTJ5SYOBFAZQXTQF",
        "KUBE-LOAD-BALANCER",
        "KUBE-NODE-PORT",
        "KUBE-SOURCE-RANGES-FIREWALL",
        "KUBE-IPVS-FILTER",
        "KUBE-IPVS-OUT-FILTER",
    ],
)
def test_own_chains(name: str) -> None:
    """Every chain of kube-proxy.md 17 and of the ipvs mode is kube-proxy's."""
    assert is_chain(name)


def test_sets_have_names_for_both_families() -> None:
    """Sets have names for both families; the names of IPv6 sets are cut to the kernel's limit."""
    assert {"KUBE-CLUSTER-IP", "KUBE-6-CLUSTER-IP", "KUBE-6-LOAD-BALANCER-SOURCE-CID"} <= SETS
    assert max(map(len, SETS)) <= 31


def test_rules_alone_are_leftovers() -> None:
    """Rules alone are leftovers: the message has them, their effect, and how to remove them."""
    found = Detection(rules=RULES)
    assert not found.running
    assert found.log_message is not None
    assert "has stopped and left table ip kube-proxy" in found.log_message
    assert "`ebpflb cleanup --kube-proxy` removes them" in found.log_message


def test_invisible_processes_prove_nothing() -> None:
    """If the node's processes are invisible, rules alone do not prove that no kube-proxy runs."""
    found = Detection(rules=RULES, unseen=True)
    assert found.state.startswith("has left table ip kube-proxy") and "unknown" in found.state
    assert "once it has stopped `ebpflb cleanup --kube-proxy` removes them" in found.advice


@pytest.mark.parametrize(
    ("found", "evidence"),
    [
        (Detection(pids=(7, 9)), "pid 7, pid 9"),
        (Detection(proxy_modes=(("127.0.0.1:10249", "ipvs"),)), "mode ipvs at 127.0.0.1:10249"),
        (Detection(rules=RULES, rules_returned=True), "its rules have come back"),
    ],
)
def test_any_of_three_signs_means_running(found: Detection, evidence: str) -> None:
    """A process, an answer, or rules that come back mean a running kube-proxy."""
    assert found.running
    assert found.log_message == (
        f"kube-proxy is also running ({evidence}): ebpflb handles packets first; stop kube-proxy,"
        " then `ebpflb cleanup --kube-proxy`"
    )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Detection(), "does not run: Services outside of --services=a are not served"),
        (
            Detection(rules=RULES),
            "Services outside of --services=a follow these rules as they were",
        ),
        (Detection(pids=(7,), rules=RULES), None),
    ],
)
def test_left_to_it(found: Detection, said: str | None) -> None:
    """If Services are left to kube-proxy, it must run, and nothing should be removed."""
    message = found._replace(left_to_it="Services outside of --services=a").message
    assert (said in message and "cleanup" not in message) if message and said else message is said


def test_rules_that_appear_later_are_no_leftovers() -> None:
    """Rules of the first detection may be leftovers; rules that appear later are not."""
    none, some = Detection(), Detection(rules=RULES)
    assert not some.compared_with(None).running
    assert not some.compared_with(some).running
    came = some.compared_with(none)
    assert came.running
    assert some.compared_with(came).running, "and that stays known"
    assert not none.compared_with(came).running


# Virtual servers as /proc/net/ip_vs shows them, and whose they are.

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
CLUSTER = VirtualServer("TCP", ip_address("10.96.0.10"), 80, 8)
NODE_PORT = VirtualServer("UDP", ip_address("192.0.2.1"), 30080)
CLUSTER6 = VirtualServer("TCP", ip_address("fd00:96::a"), 80, 1)
OTHER = VirtualServer("TCP", ip_address("192.0.2.1"), 443)


def test_servers_have_their_connections() -> None:
    """Virtual servers of both families have all connections of all their destinations.

    Firewall marks are left out.
    """
    assert parse_virtual_servers(TABLE) == [CLUSTER, NODE_PORT, CLUSTER6, OTHER]
    assert parse_virtual_servers("") == []


def test_datagrams_of_ipvs() -> None:
    """A flow of UDP has client, virtual server and server, in both families; TCP is left out."""
    table = """\
Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData
UDP 0A60000A C350 0A60000A 0035 0AF4010B 14E9 UDP             299
TCP 0A60000A C350 0A60000A 0050 0AF4010B 1F90 ESTABLISHED     899
UDP fd00:0096:0000:0000:0000:0000:0000:000a C350 fd00:0096:0000:0000:0000:0000:0000:000a 0035 \
fd00:0244:0001:0000:0000:0000:0000:000b 14E9 UDP             299
"""
    vip, pod, vip6, pod6 = map(
        ip_address, ("10.96.0.10", "10.244.1.11", "fd00:96::a", "fd00:244:1::b")
    )
    assert parse_datagrams(table) == {
        ((vip, 50000), (vip, 53)): (pod, 5353),
        ((vip6, 50000), (vip6, 53)): (pod6, 5353),
    }


def test_servers_of_kube_proxy_are_told_apart() -> None:
    """kube-proxy's servers are at its device's addresses and at its NodePorts, per protocol."""
    device = {CLUSTER.address, CLUSTER6.address}
    ours, others = split(parse_virtual_servers(TABLE), device, {"UDP": {30080}, "TCP": {30081}})
    assert (ours, others) == ([CLUSTER, NODE_PORT, CLUSTER6], [OTHER])
    assert split(parse_virtual_servers(TABLE), set(), {"TCP": {30080}})[0] == []
