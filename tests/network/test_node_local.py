# SPDX-License-Identifier: Apache-2.0
"""A listener on the node at a cluster IP, such as NodeLocal DNSCache (docs/node-local.md).

The node `theirs` has kube-proxy's rules instead of an agent.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from bench import kubeproxy
from bench.services import NodePort
from ebpflb.lab import cni
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.model.annotations import NODE_LOCAL_ANNOTATION
from tests.kit import requests, two_nodes
from tests.kit.lab_cluster import PORT
from tests.kit.parameters import families
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, TwoNodes

DNS = Frontends(10)
LISTENERS = ["169.254.20.10", "fd00:20::10"]
ANNOTATION = {NODE_LOCAL_ANNOTATION: ",".join(LISTENERS)}
# The rules of NodeLocal DNSCache in PREROUTING, and the same ones of nftables.
TOOLS = ["iptables-legacy", "iptables-nft", "nft"]
_BY_NFT = """table inet exempt {
set dns { type inet_service; elements = { 53, %(port)d } }
chain early { ip daddr { 169.254.20.10, %(v4)s } th dport @dns notrack
ip6 daddr { fd00:20::10, %(v6)s } th dport @dns notrack
}
chain raw { type filter hook prerouting priority raw; meta l4proto { tcp, udp } jump early; }
}
"""


class Listening(NamedTuple):
    """The nodes, and the pod of the node with kube-proxy's rules."""

    two: TwoNodes
    theirs: Host
    pod: Host


two = two_nodes.fixture("--node-local-addresses", ",".join(LISTENERS))


@pytest.fixture(scope="module")
def listening(two: TwoNodes) -> Listening:
    """Put the listener's addresses on a separate device, as NodeLocal DNSCache does."""
    theirs = two.lab.node("theirs", 3)
    pod, web = (
        two.lab.pod(theirs, name, i, hooked=False) for i, name in ((4, "asks"), (11, "web"))
    )
    two.start_program(web, "serve", "here", str(two_nodes.TARGET))
    for v6, network in enumerate(cni.NETWORKS):
        to = ((web.v6 if v6 else web.v4, "theirs"),)
        port = NodePort("dns", DNS.cluster[v6], DNS.nodeport, ("tcp", "udp"), to)
        theirs.nft(kubeproxy.nft([port], "theirs", theirs.v6 if v6 else theirs.v4, network))
    for node in (two.near, theirs):
        node.ip("link add nodelocaldns type bridge", "link set nodelocaldns up")
        for address in (*LISTENERS, *DNS.cluster):
            node.ip(f"address add {address} dev nodelocaldns{' nodad' * (':' in address)}")
    return Listening(two, theirs, pod)


@contextmanager
def listener(two: TwoNodes, node: Host, *addresses: str) -> Iterator[None]:
    mapped = [address if ":" in address else f"::ffff:{address}" for address in addresses]
    started = [two.start_program(node, "serve", "cache", str(PORT), it) for it in mapped]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


@contextmanager
def exempted(node: Host, tool: str) -> Iterator[None]:
    """Add rules as NodeLocal DNSCache writes them; its tool also turns a comment into a rule."""
    if tool == "nft":
        node.nft(_BY_NFT % {"port": PORT, "v4": DNS.cluster[0], "v6": DNS.cluster[1]})
    else:
        _change(node, tool, "-A")
    try:
        yield
    finally:
        if tool == "nft":
            node.nft("delete table inet exempt\n")
        else:
            _change(node, tool, "-D")


def _change(node: Host, tool: str, how: str) -> None:
    note = ["-m", "comment", "--comment", "NodeLocal DNS Cache: skip conntrack", "-j", "NOTRACK"]
    for v6, family in enumerate((tool, tool.replace("ip", "ip6", 1))):
        for address in (LISTENERS[v6], DNS.cluster[v6]):
            for protocol in ("udp", "tcp"):
                match = ["-d", address, "-p", protocol, "-m", protocol, "--dport", str(PORT)]
                words = [*node.enter, family, "-t", "raw", how, "PREROUTING", *match, *note]
                subprocess.run(words, check=True)


def service(
    two: TwoNodes, *pods: Host, annotations: dict[str, str] | None = None
) -> list[Manifest]:
    found = two.service("dns", 10, *pods)
    found[0]["metadata"]["annotations"] = annotations or {}
    return found


def answer(two: TwoNodes, host: Host, send: Send, v6: bool) -> str:
    """Return who answers at the cluster IP; "refused", or "" without an answer."""
    sockets, address = two.sockets(host), DNS.cluster[v6]
    try:
        if send is not requests.udp:
            return send(sockets, address).name
        with requests.udp_socket(sockets, address) as client:
            client.settimeout(1.0)  # a datagram to a listener that has just ended is lost
            return requests.exchange(client, address, PORT).name
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return ""


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("send", [requests.tcp, requests.udp])
def test_what_rules_in_raw_exempt_goes_to_the_listener(
    listening: Listening, tool: str, send: Send
) -> None:
    """Exempt packets go to the listener, and to an endpoint again when the rules are removed, as
    with kube-proxy.
    """
    two = listening.two
    two.publish(service(two, two.here))
    clients = [(two.near, two.unhooked), (listening.theirs, listening.pod)]
    for node, client in clients:
        for v6 in (False, True):
            with listener(two, node, DNS.cluster[v6]):

                def until(who: str, client: Host = client, v6: bool = v6) -> None:
                    wait_until(f"{who} answers", lambda: answer(two, client, send, v6) == who)

                until("here")
                with exempted(node, tool):
                    until("cache")
                until("here")


@families
@pytest.mark.parametrize("who", ["hooked", "near"])
@pytest.mark.parametrize("send", [requests.tcp, requests.udp, requests.connected_udp])
def test_sockets_go_to_the_listener_while_it_answers(
    listening: Listening, who: str, send: Send, v6: bool
) -> None:
    """The client sees the cluster IP as its peer; without the listener it gets an endpoint."""
    two, client = listening.two, getattr(listening.two, who)
    two.publish(service(two, two.here, annotations=ANNOTATION))

    def until(who: str) -> None:
        wait_until(f"{who} answers", lambda: answer(two, client, send, v6) == who)

    until("here")
    with listener(two, two.near, LISTENERS[v6]):
        until("cache")
        found = send(two.sockets(client), DNS.cluster[v6])
        assert found.peer == (DNS.cluster[v6], PORT)
    until("here")


def rows(two: TwoNodes, protocol: str) -> dict[str, dict[str, Any]]:
    """Return the endpoints of the IPv4 port, as in `ebpflb services get`."""
    page = json.loads(two.ebpflb("services", "get", "default/dns", "-o", "json").stdout)
    (found,) = (it for it in page["ports"] if (it["family"], it["protocol"]) == ("IPv4", protocol))
    return {row["endpoint"]: row for row in found["endpoints"]}


def test_it_is_shown_and_outlives_the_agent(listening: Listening) -> None:
    """`services get` and `explain` name the listener, which stays after a restart."""
    two = listening.two
    two.publish(service(two, two.here, annotations=ANNOTATION))
    place, asked = f"{LISTENERS[0]}:{PORT}", f"{DNS.cluster[0]}:{PORT}"
    silent = rows(two, "UDP")[place]
    assert silent["state"] == "not used"
    assert silent["reason"].startswith("does not answer on this node")
    with listener(two, two.near, LISTENERS[0]):
        wait_until("it is used", lambda: rows(two, "TCP")[place]["state"] == "used")
        said = two.ebpflb("explain", asked, "--from", two.hooked.v4).stdout
        assert f"the listener on this node, while it answers: {place} (node-local)" in said
        client = two.start_client(two.hooked, "tcp", DNS.cluster[0], pause=0.005)
        two.restart(*two.agents[0].options)
        counted = two.stop_client(client)
        assert set(counted["names"]) == {"cache"}
        assert not counted["errors"]
    two.logs("node-local listener 169.254.20.10:80/TCP: Connection refused; sockets get endpoints")
