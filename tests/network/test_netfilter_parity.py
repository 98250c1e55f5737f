# SPDX-License-Identifier: Apache-2.0
"""What netfilter shows and does with flows of the engine netfilter, beside kube-proxy's rules.

Each test asks the same NodePort of two nodes, one with ebpflb and one with kube-proxy's rules, and
compares both (tests/kit/beside_kube_proxy.py).
"""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from socket import SO_REUSEADDR, SOL_SOCKET

import pytest

from bench import kubeproxy
from bench.services import NodePort
from ebpflb.kernel.netfilter import conntrack
from ebpflb.lab import cni
from ebpflb.lab.hosts import Host
from tests.kernel.node import nodes
from tests.kit import beside_kube_proxy, conntrack_events, requests
from tests.kit.beside_kube_proxy import BesideKubeProxy, entries
from tests.kit.firewall import chain, rules
from tests.kit.lab_cluster import NODEPORT, TARGET
from tests.kit.parameters import protocols
from tests.kit.requests import Send
from tests.kit.sockets import CALL_SECONDS

A_MOMENT = 0.3  # seconds in which nothing may happen
BOTH = "meta l4proto { tcp, udp }"
ZONE, LABEL, MARK, SHORT = 5, 5, 0x10, 15
MASQUERADE_MARK = 0x4000
DATA_PORT = 2000
READ_REQUEST = b"\0\1file\0octet\0"  # of TFTP
REQUESTS = 8


def ask(pair: BesideKubeProxy, node: Host, send: Send, seconds: float = CALL_SECONDS) -> str:
    """The name of the endpoint that answers at the node's NodePort, or the kind of failure: "lost"
    after so many seconds.
    """
    client = pair.sockets(pair.outside)
    try:
        if requests.is_answered(send, client, (node.v4, NODEPORT), seconds):
            return send(client, node.v4, NODEPORT).name
    except ConnectionRefusedError:
        return "refused"
    except OSError as error:
        return str(error)
    return "lost"


def both(pair: BesideKubeProxy, seen: Callable[[Host], object]) -> object:
    """What is seen on either node, which is the same."""
    ours, theirs = map(seen, pair.nodes)
    assert ours == theirs
    return ours


def lines(node: Host) -> list[str]:
    """The entries of flows to the NodePort, as the kernel prints them."""
    words = [*node.enter, "cat", "/proc/net/nf_conntrack"]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return [line for line in text.splitlines() if f"dport={NODEPORT} " in line]


def counted(node: Host, comment: str) -> int:
    """How many packets the rule with this comment has counted."""
    words = [*node.enter, "nft", "list", "table", "inet", "firewall"]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in text.splitlines() if f'comment "{comment}"' in line]
    return int(line.split("packets ")[1].split()[0])


@protocols
def test_events_tell_of_the_flow(pair: BesideKubeProxy, send: Send) -> None:
    """`conntrack -E` shows NEW with the endpoint in the reply's tuple, updates, and DESTROY."""

    def events(node: Host) -> set[tuple[str, str, str, int]]:
        with conntrack_events.listening(node) as listener:
            assert ask(pair, node, send) == "there"
            with nodes.entered(node.netns):
                conntrack.delete(conntrack.connections(lambda *_: True))
            found = listener.events()
        return {
            (kind, str(original.source), str(reply.source), reply.source_port)
            for kind, original, reply in found
            if original.destination_port == NODEPORT and str(reply.destination) == node.v4
        }

    kinds = both(pair, events)
    every = {(kind, pair.outside.v4, pair.there.v4, TARGET) for kind in ("new", "destroy")}
    assert isinstance(kinds, set)
    assert every <= kinds


@protocols
def test_packets_and_bytes_are_counted(pair: BesideKubeProxy, send: Send) -> None:
    """With nf_conntrack_acct both directions are counted, with nf_conntrack_timestamp the age."""
    for node in pair.nodes:
        for name in ("acct", "timestamp"):
            node.sysctl(f"net.netfilter.nf_conntrack_{name}", 1)

    def counters(node: Host) -> tuple[object, ...]:
        pair.forget()
        send(pair.sockets(pair.outside), node.v4, NODEPORT)
        (line,) = lines(node)
        words = [word.split("=") for word in line.split() if "=" in word]
        found = [int(number) for name, number in words if name in ("packets", "bytes")]
        exact = send is requests.udp  # the acknowledgments of a connection vary
        return len(found), all(found), "delta-time=" in line, found if exact else None

    assert both(pair, counters) == (4, True, True, None) or send is requests.udp


@protocols
def test_a_label_that_a_rule_sets_stays(pair: BesideKubeProxy, send: Send) -> None:
    """`ct label set` in PREROUTING is seen in POSTROUTING, and in the directions that follow."""
    label = f"{BOTH} th dport {NODEPORT} ct label set {LABEL}"
    count = f'{BOTH} ct original proto-dst {NODEPORT} ct label {LABEL} counter comment "seen"'

    def seen(node: Host) -> bool:
        hooks = chain("prerouting", "mangle", label), chain("postrouting", "mangle", count)
        with rules(node, "\n".join(hooks)):
            assert ask(pair, node, send) == "there"
            return counted(node, "seen") >= 4

    assert both(pair, seen) is True


@protocols
def test_a_mark_that_a_rule_sets_stays(pair: BesideKubeProxy, send: Send) -> None:
    """Behind NAT a packet has the bits of others, and not that of the masquerade."""
    mark = f"{BOTH} th dport {NODEPORT} meta mark set {MARK} ct mark set {MARK}"
    to = f"ip daddr {pair.there.v4}"
    count = f'{to} meta mark {MARK} ct mark {MARK} counter comment "seen"'
    left = f'{to} meta mark and {MASQUERADE_MARK} != 0 counter comment "left"'

    def seen(node: Host) -> tuple[bool, int]:
        hooks = chain("prerouting", "mangle", mark), chain("postrouting", "300", count, left)
        with rules(node, "\n".join(hooks)):
            assert ask(pair, node, send) == "there"
            return counted(node, "seen") >= 2, counted(node, "left")

    assert both(pair, seen) == (True, 0)


@protocols
@pytest.mark.parametrize("requests_only", [False, True], ids=["all packets", "requests"])
def test_a_zone_that_raw_sets_counts(
    pair: BesideKubeProxy, requests_only: bool, send: Send
) -> None:
    """The flow is tracked in this zone. Where the replies are not in it, nobody is answered."""
    match = f"{BOTH} th dport {NODEPORT}" if requests_only else BOTH
    zone = chain("prerouting", "raw", f"{match} ct zone set {ZONE}")
    seconds = A_MOMENT if requests_only else CALL_SECONDS

    def seen(node: Host) -> tuple[str, bool]:
        pair.forget()
        with rules(node, zone):
            name = ask(pair, node, send, seconds)
            return name, all(f"zone={ZONE}" in line for line in lines(node))

    found = both(pair, seen)
    assert requests_only or found == ("there", True)


@protocols
def test_what_raw_does_not_track_is_not_translated(pair: BesideKubeProxy, send: Send) -> None:
    """With `notrack` for the NodePort no NAT rule sees the packet: the node itself refuses it."""
    notrack = chain("prerouting", "raw", f"{BOTH} th dport {NODEPORT} notrack")

    def seen(node: Host) -> tuple[str, int]:
        with rules(node, notrack):
            return ask(pair, node, send), len(entries(node))

    assert both(pair, seen) == ("refused", 0)


def test_a_timeout_that_a_rule_sets_applies(pair: BesideKubeProxy) -> None:
    """`ct timeout set` shortens the life of an entry."""
    policy = f"policy = {{ unreplied : {SHORT}, replied : {SHORT} }}"
    short = f"ct timeout short {{\nprotocol udp; l3proto ip; {policy}\n}}"
    use = f'meta nfproto ipv4 udp dport {NODEPORT} ct timeout set "short"'

    def seen(node: Host) -> set[bool]:
        pair.forget()
        with rules(node, "\n".join([short, chain("prerouting", "mangle", use)])):
            assert ask(pair, node, requests.udp) == "there"
            found = {entry.seconds <= SHORT for entry in entries(node)}
            pair.forget()  # the policy is in use as long as an entry has it
            return found

    assert both(pair, seen) == {True}


@contextmanager
def helped(node: Host, kind: str, protocol: str) -> Iterator[None]:
    """A rule gives flows to the NodePort this helper of conntrack; another counts related flows.

    The rule does not load the module by which NAT translates for the helper.
    """
    with suppress(FileNotFoundError):
        subprocess.run(["modprobe", f"nf_nat_{kind}"], check=False, capture_output=True)
    helper = f'ct helper used {{\ntype "{kind}" protocol {protocol}; l3proto ip\n}}'
    use = f'meta nfproto ipv4 {protocol} dport {NODEPORT} ct helper set "used"'
    count = f'ct state related {protocol} dport != 0 counter comment "related"'
    hooks = chain("prerouting", "mangle", use), chain("forward", "filter", count)
    with rules(node, "\n".join([helper, *hooks])):
        yield


def test_a_helper_translates_what_ftp_announces(pair: BesideKubeProxy) -> None:
    """The endpoint announces an address and port of its own for data. The client reads the node's
    address instead, and reaches the endpoint there: the connection is related to the first one.
    """
    host, port = pair.there.v4, DATA_PORT
    announced = f"227 Entering Passive Mode ({host.replace('.', ',')},{port >> 8},{port & 255})"

    def seen(node: Host) -> tuple[bytes, int]:
        outside, server = pair.sockets(pair.outside), pair.sockets(pair.there)
        with (
            helped(node, "ftp", "tcp"),
            requests.tcp_socket(server, host) as listening,
            requests.tcp_socket(outside, node.v4) as control,
            requests.tcp_socket(outside, node.v4) as data,
        ):
            listening.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen(1)
            control.connect((node.v4, NODEPORT))
            control.recv(64)
            assert requests.lives(control, b"200 a line, for the helper to begin behind\r\n")
            control.send(f"{announced}\r\n".encode())  # which the endpoint sends back
            said = control.recv(128).decode()
            assert node.v4.replace(".", ",") in said
            data.connect((node.v4, port))
            connection, _ = listening.accept()
            with connection:
                connection.send(b"a file")
                return data.recv(64), counted(node, "related")

    found = both(pair, seen)
    assert found == (b"a file", 1)


def test_a_helper_translates_what_tftp_sends(pair: BesideKubeProxy) -> None:
    """The endpoint answers a request for a file from a new port. The client gets the data from the
    node's address: the flow is related to that of the request.
    """

    def seen(node: Host) -> tuple[bytes, str, int]:
        with (
            helped(node, "tftp", "udp"),
            requests.udp_socket(pair.sockets(pair.there), node.v4) as server,
            requests.udp_socket(pair.sockets(pair.outside), node.v4) as client,
        ):
            client.sendto(READ_REQUEST, (node.v4, NODEPORT))
            client.recvfrom(64)
            (entry,) = entries(node)
            server.bind((pair.there.v4, DATA_PORT))
            server.sendto(b"a file", (str(entry.reply.destination), entry.reply.destination_port))
            said, (sender, _) = client.recvfrom(64)
            return said, "node" if sender == node.v4 else sender, counted(node, "related")

    found = both(pair, seen)
    assert found == (b"a file", "node", 1)


@protocols
def test_entries_are_as_kube_proxys(pair: BesideKubeProxy, send: Send) -> None:
    """A flow that was answered has the same state and status: translated both ways."""

    def seen(node: Host) -> set[tuple[str, int, str, int]]:
        pair.forget()
        with ExitStack() as stack:
            client = requests.socket_of(send, pair.sockets(pair.outside), node.v4)
            stack.enter_context(client)
            client.connect((node.v4, NODEPORT))
            for _ in range(3):
                client.send(b"?")
                assert client.recv(64)
            return {
                (each.state_name, each.status, str(each.reply.source), each.reply.source_port)
                for each in entries(node)
            }

    found = both(pair, seen)
    assert isinstance(found, set)
    assert [endpoint for _, _, *endpoint in found] == [[pair.there.v4, TARGET]]


@protocols
def test_a_deleted_entry_of_a_masqueraded_flow(pair: BesideKubeProxy, send: Send) -> None:
    """After `conntrack -F` a datagram is answered again; a masqueraded connection ends, because it
    gets another source port.
    """

    def seen(node: Host) -> bool:
        with requests.socket_of(send, pair.sockets(pair.outside), node.v4) as client:
            client.connect((node.v4, NODEPORT))
            client.send(b"?")
            assert client.recv(64)
            pair.forget()
            client.settimeout(2.0)
            try:
                for _ in range(3):
                    client.send(b"?")
                    if not client.recv(64):
                        return False
            except OSError:
                return False
            return True

    assert both(pair, seen) is (send is requests.udp)


@contextmanager
def kube_proxy_beside(pair: BesideKubeProxy, mode: str) -> Iterator[None]:
    """Rules for the same Service on ebpflb's node, which lead to an endpoint that is not there."""
    nowhere = ((cni.addresses(3, 99)[0], pair.far.name),)
    service = NodePort("web", beside_kube_proxy.SERVICE_IP, NODEPORT, ("tcp", "udp"), nowhere)
    node, pods = pair.near, cni.NETWORKS[0]
    if mode == "nftables":
        node.nft(kubeproxy.nft([service], node.name, node.v4, pods))
    else:
        words = [*node.enter, f"{mode}-restore", "--noflush"]
        subprocess.run(words, input=kubeproxy.iptables([service], pods), text=True, check=True)
    try:
        yield
    finally:
        if mode == "nftables":
            node.nft("delete table ip kube-proxy")
        else:
            empty = "".join(f"*{table}\nCOMMIT\n" for table in ("nat", "filter"))
            subprocess.run([*node.enter, f"{mode}-restore"], input=empty, text=True, check=True)


@pytest.mark.parametrize("mode", ["nftables", "iptables-legacy", "iptables-nft"])
@protocols
def test_kube_proxy_may_run_beside(pair: BesideKubeProxy, mode: str, send: Send) -> None:
    """ebpflb serves: its chain comes first. The bit that both masquerade by is used once."""
    to = f"ip daddr {pair.there.v4}"
    left = f'{to} meta mark and {MASQUERADE_MARK} != 0 counter comment "left"'
    with (
        kube_proxy_beside(pair, mode),
        rules(pair.near, chain("postrouting", "300", left)),
    ):
        for _ in range(REQUESTS):
            assert ask(pair, pair.near, send) == "there"
        assert {str(each.reply.destination) for each in entries(pair.near)} == {pair.near.v4}
        assert counted(pair.near, "left") == 0
